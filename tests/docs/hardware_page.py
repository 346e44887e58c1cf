"""Generator of *Known hardware* in ``docs/cost-model.md``: ``python -m tests.docs.hardware_page`` writes it."""

from attention_contract.schemas.costs.hardware import HardwareInfo
from attention_service.cost.datasheet import HARDWARE
from tests.docs.page_parts import with_part
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "cost-model.md"
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEAD = """
## Known hardware

`GET /v1/complexity/hardware` and `attention hardware` list these devices. A complexity request with `"hardware": NAME`
is answered for that device, even if the server runs on another one.

Rates are peaks of dense matrix products in 10¹² FLOP/s, without sparsity: float64 on tensor or matrix cores if the
device has them for float64, float32 without TF32, half types accumulated in float32. Memory is in 10⁹ bytes. Bandwidth
and link (to the host, one direction) are in 10⁹ bytes per second. A missing rate is not stated by the maker, and a
request for that dtype is refused.

A device never reaches its peaks, and no datasheet gives the achievable share. Predictions from this table (`basis:
"datasheet"`) therefore have wide bounds:

| | share of the peak rate | share of the bandwidth | time to start an attention |
|---|---|---|---|
"""
TAIL = """
The shares come from papers: FlashAttention reaches 25 to 40 % of an A100's peak (Dao 2023, section 1),
FlashAttention-2 up to 73 % of an A100's and 35 % of an H100's (Dao 2023, section 4.1; Shah et al. 2024, section 1),
and FlashAttention-3 up to 75 % of an H100's (ibid.). Tests compare published times with the bounds. The start time is
an assumption. A server measures its own device instead.

| name | memory | bandwidth | link | float64 | float32 | float16 | bfloat16 | source |
|---|---|---|---|---|---|---|---|---|
"""


def section() -> str:
    """Return the section."""
    named = (("lower bound: the peaks", "best"), ("median", "typical"), ("upper bound", "poor"))
    shares = "".join(
        f"| {name} | {share['flops']:.0%} | {share['bandwidth']:.0%} | {share['overhead_s'] * 1e6:g} µs |\n"
        for name, share in ((name, HARDWARE.efficiency[of]) for name, of in named)
    )
    return HEAD + shares + TAIL + "".join(map(_row, HARDWARE.hardware))


def render() -> str:
    """Return the page with the present section."""
    return with_part(PAGE, "hardware", "tests.docs.hardware_page", section())


def _row(hardware: HardwareInfo) -> str:
    rates = [f"{hardware.tflops[dtype]:g}" if dtype in hardware.tflops else "" for dtype in DTYPES]
    sources = ", ".join(f"[{source.title}]({source.url})" for source in hardware.sources)
    cited = f"{sources}; {hardware.note}" if hardware.note else sources
    link = f"{hardware.link}, {hardware.link_gb_s:g}"
    cells = (f"{hardware.memory_bytes / 1e9:g}", f"{hardware.bandwidth_gb_s:g}", link, *rates, cited)
    return f"| {hardware.name} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
