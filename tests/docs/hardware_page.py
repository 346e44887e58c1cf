"""``docs/hardware.md``, made from the table of hardware: ``python -m tests.docs.hardware_page`` writes it anew."""

from attention_service.cost.hardware import BEST, POOR, TABLE, TYPICAL, Hardware
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "hardware.md"
DTYPES = ("float64", "float32", "float16", "bfloat16")
HEAD = """# Hardware that can be asked for

What `GET /v1/complexity/hardware` and `attention hardware` list: devices whose costs a complexity request can ask for
by `"hardware": NAME`, though they are not here. Rates are peaks of dense matrix products in 10¹² FLOP/s, never those
with sparsity: float64 on tensor or matrix cores where there are any for it, float32 without TF32, half types
accumulated in float32. Memory is in 10⁹ bytes, its bandwidth in 10⁹ bytes a second, and so is the link to the host,
in one direction. A rate that is missing is one that the maker does not state; asking for that dtype is refused.

No device reaches its peaks, and no datasheet says how far it stays below. Times that rest on this table (`basis:
"datasheet"`) are therefore wide:

| | share of the peak rate | share of the bandwidth | to start an attention |
|---|---|---|---|
"""
TAIL = """
The shares are those that papers report: FlashAttention 25 to 40 % of an A100's peak (Dao 2023, section 1),
FlashAttention-2 up to 73 % of it and 35 % of an H100's (Dao 2023, section 4.1; Shah et al. 2024, section 1),
FlashAttention-3 up to 75 % of an H100's (ibid.); tests hold published times against the bounds. The time to start is
an assumption. On a device that is here, a server measures instead.

Written by `python -m tests.docs.hardware_page` from `cost/hardware.py`.

| name | memory | bandwidth | link | float64 | float32 | float16 | bfloat16 | source |
|---|---|---|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    named = (("lower bound: the peaks", BEST), ("median", TYPICAL), ("upper bound", POOR))
    shares = "".join(
        f"| {name} | {share.flops:.0%} | {share.bandwidth:.0%} | {share.overhead_s * 1e6:g} µs |\n"
        for name, share in named
    )
    return HEAD + shares + TAIL + "".join(map(_row, TABLE))


def _row(hardware: Hardware) -> str:
    rates = [f"{hardware.tflops[dtype]:g}" if dtype in hardware.tflops else "" for dtype in DTYPES]
    sources = ", ".join(f"[{source.title}]({source.url})" for source in hardware.sources)
    told = f"{sources}; {hardware.note}" if hardware.note else sources
    link = f"{hardware.link}, {hardware.link_gb_s:g}"
    cells = (f"{hardware.memory_gb:g}", f"{hardware.bandwidth_gb_s:g}", link, *rates, told)
    return f"| {hardware.name} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
