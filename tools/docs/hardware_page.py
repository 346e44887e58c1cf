"""Generator of *Known hardware* in ``docs/cost-model.md``: ``python -m tools.docs.hardware_page`` writes it."""

from attention_contract.schemas.costs.hardware import HardwareInfo
from attention_service.cost.datasheet import HARDWARE
from tools.docs.page_parts import with_part
from tools.docs.snippets import ROOT

PAGE = ROOT / "docs" / "cost-model.md"
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEAD = """
## Known hardware

`GET /v1/complexity/hardware` and `attention hardware` list these devices, with the titles of the sources. Rates are
peaks of dense matrix products in 10¹² FLOP/s, without sparsity: float64 on tensor or matrix cores if they have it,
float32 without TF32, half types accumulated in float32. Memory is in 10⁹ bytes. Bandwidth and link (to the host, one
direction) are in 10⁹ bytes per second. A request for a dtype without a rate is refused.

A device never reaches its peaks. Predictions from this table (`basis: "datasheet"`) have wide bounds:

| | share of the peak rate | share of the bandwidth | time to start an attention |
|---|---|---|---|
"""
TAIL = """
The shares come from papers: FlashAttention reaches 25 to 40 % of an A100's peak (Dao 2023, section 1),
FlashAttention-2 up to 73 % of an A100's and 35 % of an H100's (Dao 2023, section 4.1; Shah et al. 2024, section 1),
and FlashAttention-3 up to 75 % of an H100's (ibid.). The start time is an assumption.

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
    return with_part(PAGE, "hardware", "tools.docs.hardware_page", section())


def _row(hardware: HardwareInfo) -> str:
    rates = [f"{hardware.tflops[dtype]:g}" if dtype in hardware.tflops else "" for dtype in DTYPES]
    sources = ", ".join(f"[{number}]({source.url})" for number, source in enumerate(hardware.sources, 1))
    cited = f"{sources}; {hardware.note}" if hardware.note else sources
    sizes = (hardware.memory_bytes / 1e9, hardware.bandwidth_gb_s, hardware.link_gb_s)
    cells = (*(f"{size:g}" for size in sizes), *rates, cited)
    return f"| {hardware.name} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
