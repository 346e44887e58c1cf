"""Datasheets of common GPUs, so that costs can be predicted for absent hardware.

Rates are peaks of dense matrix products, never those with sparsity, in the arithmetic that PyTorch uses by default:
float64 on tensor or matrix cores where there are any for it, float32 without TF32, half types accumulated in float32.
Gigabytes are 10⁹ bytes, as in the datasheets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from attention_contract.schemas.hardware import HardwareInfo, HardwareList, HardwareSource
from attention_service.cost.clock import Basis, Estimate, Roofline
from attention_service.cost.retrieval import Retrieval
from attention_service.cost.terms import Form
from attention_service.cost.time import Rates
from attention_service.cost.workload import Workload


class Source(NamedTuple):
    """Publication of the numbers."""

    title: str
    url: str


@dataclass(frozen=True)
class Hardware:
    """One device as its maker describes it."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    """Bandwidth of its memory."""
    link_gb_s: float
    """Bandwidth to the host, in one direction."""
    link: str
    tflops: Mapping[str, float]
    """Peak 10¹² FLOP/s by dtype; one that is missing has no published rate."""
    sources: tuple[Source, ...]
    note: str = ""

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory."""
        return round(self.memory_gb * 10**9)


class Share(NamedTuple):
    """Share of its peaks that a device reaches."""

    flops: float
    bandwidth: float
    overhead_s: float
    """Seconds to start one attention, however small: an assumption, since no datasheet says."""


BEST: Final = Share(1.0, 1.0, 5e-6)
"""Nothing is faster than the peaks."""
TYPICAL: Final = Share(0.5, 0.8, 2e-5)
"""Between the 35 % of FlashAttention-2 on an H100 and the 73 % on an A100 (Dao 2023, section 4.1; Shah et al. 2024,
section 1, who reach 75 %); bandwidth as of a large copy."""
POOR: Final = Share(0.25, 0.5, 1e-4)
"""The lower end of FlashAttention on an A100: 25 to 40 % (Dao 2023, section 1)."""


@dataclass(frozen=True)
class Datasheet:
    """Clock of an absent device: its peaks, and the shares of them that are commonly reached."""

    best: Roofline
    typical: Roofline
    poor: Roofline
    basis: Basis = field(default="datasheet", init=False)

    @classmethod
    def of(cls, hardware: Hardware, dtype: str) -> "Datasheet":
        """Return the clock for passes in one dtype. Raises KeyError if the datasheet has no rate for it."""
        peak = hardware.tflops[dtype] * 1e12

        def reaching(share: Share) -> Roofline:
            bandwidth = share.bandwidth * hardware.bandwidth_gb_s * 1e9
            link = share.bandwidth * hardware.link_gb_s * 1e9
            return Roofline(Rates(share.flops * peak, bandwidth, share.overhead_s, link), "datasheet")

        return cls(reaching(BEST), reaching(TYPICAL), reaching(POOR))

    def forward(self, work: Workload, kernel: str) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.forward(work, kernel) for clock in self._clocks))

    def gradients(self, work: Workload, kernel: str, *, twice: bool = False, checks: int = 0) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.gradients(work, kernel, twice=twice, checks=checks) for clock in self._clocks))

    def inspection(self, work: Workload, *, named: int = 0) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.inspection(work, named=named) for clock in self._clocks))

    def transfer(self, of_bytes: int) -> Estimate:
        """Predict from the link's peak down to the lower end of the reached shares."""
        return _between(*(clock.transfer(of_bytes) for clock in self._clocks))

    def carrying(self, form: Form, read: int, written: int, itemsize: int) -> Estimate:
        """Predict for a typical host of these years, since the host does this work."""
        return _HOST.carrying(form, read, written, itemsize)

    def retrieval(self, retrieval: Retrieval) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.retrieval(retrieval) for clock in self._clocks))

    def rated(self, seconds: Callable[[Rates], float]) -> Estimate:
        """Predict from the peaks down to the lower end of the reached shares."""
        return _between(*(clock.rated(seconds) for clock in self._clocks))

    @property
    def _clocks(self) -> tuple[Roofline, Roofline, Roofline]:
        return self.best, self.typical, self.poor


_HOST: Final = Roofline(Rates(1e11, 1e10, 5e-5), "datasheet")


def _between(best: Estimate, typical: Estimate, poor: Estimate) -> Estimate:
    return Estimate(typical.median, best.median, poor.median)


_PCIE3, _PCIE4, _PCIE5 = (16.0, "PCIe 3.0 x16"), (32.0, "PCIe 4.0 x16"), (64.0, "PCIe 5.0 x16")
_V100 = Source(
    "NVIDIA V100 Tensor Core GPU datasheet",
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
)
_A100 = Source(
    "NVIDIA A100 Tensor Core GPU datasheet",
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
)
_H100 = Source("NVIDIA H100 Tensor Core GPU", "https://www.nvidia.com/en-us/data-center/h100/")
_H100_SHEET = Source(
    "NVIDIA H100 Tensor Core GPU datasheet",
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
)
_H200 = Source("NVIDIA H200 Tensor Core GPU", "https://www.nvidia.com/en-us/data-center/h200/")
_GH200 = Source(
    "NVIDIA GH200 Grace Hopper Superchip", "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/"
)
_MI300 = "https://www.amd.com/en/products/accelerators/instinct/mi300"


def _both(half: float) -> dict[str, float]:
    return {"float16": half, "bfloat16": half}


_GA100 = {"float64": 19.5, "float32": 19.5} | _both(312)
_GH100 = {"float64": 67, "float32": 67} | _both(989.5)
_NVL = {"float64": 60, "float32": 60} | _both(835.5)
_CDNA3 = {"float64": 163.4, "float32": 163.4} | _both(1307.4)

TABLE: Final = (
    Hardware(
        "V100 PCIe 32GB", 32, 900, *_PCIE3, {"float64": 7, "float32": 14, "float16": 112}, (_V100,), "no bfloat16"
    ),
    Hardware(
        "V100 SXM2 32GB", 32, 900, *_PCIE3, {"float64": 7.8, "float32": 15.7, "float16": 125}, (_V100,), "no bfloat16"
    ),
    Hardware(
        "T4", 16, 320, *_PCIE3, {"float32": 8.1, "float16": 65},
        (Source(
            "NVIDIA T4 Tensor Core GPU product brief",
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-product-brief.pdf",
        ),),
        "no bfloat16",
    ),
    Hardware(
        "A10", 24, 600, *_PCIE4, {"float32": 31.2} | _both(125),
        (Source(
            "NVIDIA A10 Tensor Core GPU datasheet",
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
        ),),
    ),
    Hardware(
        "L4", 24, 300, *_PCIE4, {"float32": 30.3} | _both(121),
        (Source("NVIDIA L4 Tensor Core GPU", "https://www.nvidia.com/en-us/data-center/l4/"),),
        "half types: half of the 242 stated with sparsity",
    ),
    Hardware(
        "L40S", 48, 864, *_PCIE4, {"float32": 91.6} | _both(362.05),
        (Source("NVIDIA L40S GPU", "https://www.nvidia.com/en-us/data-center/l40s/"),),
    ),
    Hardware(
        "RTX 3090", 24, 936, *_PCIE4, {"float64": 0.56, "float32": 35.6} | _both(71),
        (Source(
            "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A",
            "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
        ),),
        "half types: half of the 142 stated with sparsity, accumulated in float32",
    ),
    Hardware(
        "RTX 4090", 24, 1008, *_PCIE4, {"float64": 1.29, "float32": 82.6} | _both(165.2),
        (Source(
            "NVIDIA Ada GPU architecture whitepaper, appendix A",
            "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/"
            "nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf",
        ),),
    ),
    Hardware(
        "RTX 5090", 32, 1792, *_PCIE5, {"float64": 1.64, "float32": 104.8} | _both(209.5),
        (Source(
            "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A",
            "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
        ),),
        "half types: half of the 419 stated with sparsity, accumulated in float32",
    ),
    Hardware("A100 PCIe 40GB", 40, 1555, *_PCIE4, _GA100, (_A100,)),
    Hardware("A100 SXM 40GB", 40, 1555, *_PCIE4, _GA100, (_A100,)),
    Hardware("A100 PCIe 80GB", 80, 1935, *_PCIE4, _GA100, (_A100,)),
    Hardware("A100 SXM 80GB", 80, 2039, *_PCIE4, _GA100, (_A100,)),
    Hardware("H100 PCIe", 80, 2000, *_PCIE5, {"float64": 51, "float32": 51} | _both(756.5), (_H100_SHEET,)),
    Hardware("H100 SXM", 80, 3350, *_PCIE5, _GH100, (_H100, _H100_SHEET)),
    Hardware("H100 NVL", 94, 3900, *_PCIE5, _NVL, (_H100,)),
    Hardware("H200 SXM", 141, 4800, *_PCIE5, _GH100, (_H200,), "half types: half of the 1,979 stated with sparsity"),
    Hardware("H200 NVL", 141, 4800, *_PCIE5, _NVL, (_H200,), "half types: half of the 1,671 stated with sparsity"),
    Hardware("GH200 96GB", 96, 4000, 450, "NVLink-C2C", _GH100, (_GH200,)),
    Hardware("GH200 144GB", 144, 4900, 450, "NVLink-C2C", _GH100, (_GH200,)),
    Hardware(
        "B200", 180, 8000, *_PCIE5, {"float64": 40, "float32": 80} | _both(2250),
        (
            Source(
                "NVIDIA Blackwell architecture technical brief (HGX B200)",
                "https://resources.nvidia.com/en-us-blackwell-architecture",
            ),
            Source("NVIDIA DGX B200 (an eighth of its memory)", "https://www.nvidia.com/en-us/data-center/dgx-b200/"),
        ),
        "at 1,000 W; half types: half of the 4,500 stated with sparsity",
    ),
    Hardware(
        "MI250X, one die", 64, 1638.4, *_PCIE4, {"float64": 47.85, "float32": 47.85} | _both(191.5),
        (Source(
            "AMD Instinct MI250X accelerators", "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
        ),),
        "one of its two dies, which is what PyTorch sees as a device: half of what is stated",
    ),
    Hardware(
        "MI300X", 192, 5300, *_PCIE5, _CDNA3, (Source("AMD Instinct MI300X accelerators", f"{_MI300}/mi300x.html"),)
    ),
    Hardware(
        "MI325X", 256, 6000, *_PCIE5, _CDNA3, (Source("AMD Instinct MI325X accelerators", f"{_MI300}/mi325x.html"),)
    ),
)  # fmt: skip
HARDWARE: Final[Mapping[str, Hardware]] = {hardware.name: hardware for hardware in TABLE}


def find(name: str) -> Hardware | None:
    """Find a device by name, in any case and with or without spaces and hyphens; None if there is none."""
    return next((hardware for hardware in TABLE if _plain(hardware.name) == _plain(name)), None)


def listed() -> HardwareList:
    """Return the table in the contract's form."""
    return HardwareList(
        hardware=[
            HardwareInfo(
                name=one.name,
                memory_bytes=one.memory_bytes,
                bandwidth_gb_s=one.bandwidth_gb_s,
                link=one.link,
                link_gb_s=one.link_gb_s,
                tflops=dict(one.tflops),
                note=one.note,
                sources=[HardwareSource(title=source.title, url=source.url) for source in one.sources],
            )
            for one in TABLE
        ],
        efficiency={name: share._asdict() for name, share in (("best", BEST), ("typical", TYPICAL), ("poor", POOR))},
    )


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
