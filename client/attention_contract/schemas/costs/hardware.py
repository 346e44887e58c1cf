"""Devices in the table of datasheets, for which costs can be predicted."""

from attention_contract.base import WireModel


class HardwareSource(WireModel):
    """The datasheet with the numbers."""

    title: str
    url: str


class HardwareInfo(WireModel):
    """One device as its maker describes it; gigabytes are 10⁹ bytes."""

    name: str
    """The name that ``hardware`` takes, in upper or lower case."""
    memory_bytes: int
    bandwidth_gb_s: float
    """Gigabytes a second of its memory."""
    link: str
    """The link to the host."""
    link_gb_s: float
    """Gigabytes a second of the link, in one direction."""
    tflops: dict[str, float]
    """Peak 10¹² FLOP/s of dense matrix products, by dtype; no rate is stated for one that is missing."""
    note: str = ""
    sources: list[HardwareSource]


class HardwareList(WireModel):
    """Every device of the table, and what is assumed of all."""

    hardware: list[HardwareInfo]
    efficiency: dict[str, dict[str, float]]
    """Shares of the peaks (``flops``, ``bandwidth``) and seconds to start (``overhead_s``): ``best`` gives the lower
    bound of a predicted time, ``typical`` its median, ``poor`` the upper one."""
