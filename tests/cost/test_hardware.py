"""What is said of hardware that is not here: within physics, and around what was measured there."""

from functools import cache

import pytest
from tests.cost.workloads import forward_seen, gradients_seen, raw

from attention_service.cost import Datasheet, Rates, Roofline
from attention_service.cost.datasheet import HARDWARE, find

each = pytest.mark.parametrize("hardware", HARDWARE.hardware, ids=lambda hardware: hardware.name)


def attention(batch, length, heads, width):
    sizes = {"queries": length, "new_keys": length, "heads": heads, "kv_heads": heads}
    bound = raw(batch=batch, head_dim=width, value_dim=width, itemsize=2, **sizes)
    bound.threads = 0
    return bound


@cache
def rehearsed(sizes, kernel, cost_of):
    """The counts of a pass, which are those of every device."""
    return cost_of(attention(*sizes), kernel).total()


def predicted(clock, sizes, kernel, cost_of=forward_seen):
    return clock.predict(rehearsed(sizes, kernel, cost_of), 2, "")


@pytest.mark.parametrize("milliseconds", [3.538, 4.021, 4.105])
def test_published_times_are_within_the_bounds(milliseconds):
    """Shah et al. 2024, table 2: batch 4, 8448 tokens, 16 heads 128 wide, on an H100 SXM5 in half precision."""
    estimate = predicted(Datasheet.of(find("H100 SXM"), "float16"), (4, 8448, 16, 128), "fused")
    assert estimate.low * 1e3 < milliseconds < estimate.high * 1e3


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("A100 SXM 80GB", 0.73),  # Dao 2023, section 4.1: FlashAttention-2's forward pass, up to 230 TFLOP/s
        ("H100 SXM", 0.35),  # Shah et al. 2024, section 1: FlashAttention-2 on an H100
        ("H100 SXM", 0.75),  # ibid.: FlashAttention-3, up to 740 TFLOP/s
    ],
)
@pytest.mark.parametrize("length", [4096, 16384])
def test_published_shares_of_the_peak_are_within_the_bounds(name, reached, length):
    hardware, batch = find(name), 16384 // length
    seconds = 4 * batch * length**2 * 16 * 128 / (reached * hardware.tflops["float16"] * 1e12)
    estimate = predicted(Datasheet.of(hardware, "float16"), (batch, length, 16, 128), "fused")
    assert estimate.low < seconds < estimate.high


@each
def test_no_time_is_below_what_the_peaks_allow(hardware):
    for dtype, tflops in hardware.tflops.items():
        clock = Datasheet.of(hardware, dtype)
        peak = Roofline(Rates(tflops * 1e12, hardware.bandwidth_gb_s * 1e9, 0.0))
        for kernel in ("fused", "blocked", "materialized"):
            for cost_of in (forward_seen, gradients_seen):
                one, other = (predicted(each, (1, 4096, 8, 64), kernel, cost_of) for each in (clock, peak))
                assert other.median < one.low < one.median < one.high
    assert clock.basis == "datasheet"


@each
def test_every_entry_says_where_its_numbers_are_from(hardware):
    assert hardware.sources
    for source in hardware.sources:
        assert source.title
        assert source.url.startswith(("https://www.nvidia.com/", "https://images.nvidia.com/", "https://resources.nvidia.com/",
                                      "https://www.amd.com/"))  # fmt: skip
    assert hardware.tflops.keys() <= {"float64", "float32", "float16", "bfloat16"}
    assert hardware.tflops["float32"] <= hardware.tflops["float16"]
    assert 10e9 <= hardware.memory_bytes <= 300e9
    assert hardware.link_gb_s < hardware.bandwidth_gb_s


def test_names_are_found_however_they_are_written():
    for hardware in HARDWARE.hardware:
        for name in (hardware.name, hardware.name.lower(), hardware.name.replace(" ", "-"), hardware.name.upper()):
            assert find(name) is hardware
    assert find("H100") is None
