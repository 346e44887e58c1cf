"""Plan the capacity for a long-context layer: how long a sequence fits, which variant, what it costs, and where.

The layer is one of Llama-3 8B: 32 query heads of width 128. Compared are a key/value head for each, groups of four as
the model has them, and a single one; then the same on several devices; then, on the server's own, from which length on
a window of 256 tokens is faster. Nothing is computed, so it takes a second whatever the sizes are, and the hardware
need not be there. Needs a running service (``attention serve``, or ATTENTION_URL); with ``--picture FILE.svg`` also one
with the extra ``plot``. Then: ``python examples/capacity.py``
"""

import argparse
from pathlib import Path
from typing import Any

from attention_client import Client

LENGTHS = [8192, 32768, 131072]
LAYERS = 32
CAUSAL = {"masks": [{"name": "causal"}]}
WINDOW = {"masks": [{"name": "sliding_window", "left": 255, "right": 0}]}
HEADS: dict[str, Any] = {"num_heads": 32, "head_dim": 128, "spec": CAUSAL}
VARIANTS = [{"label": "grouped heads", "num_kv_heads": 8}, {"label": "one kv head", "num_kv_heads": 1}]
DEVICES = ["L4", "A100 SXM 80GB", "H100 SXM", "MI300X"]


def variants(client: Client) -> None:
    """Return the cost of each variant on one device as decoding goes on."""
    reply = client.raw_complexity(LENGTHS[0], LENGTHS, compare=VARIANTS, hardware="H100 SXM", dtype="bfloat16", **HEADS)
    print(f"{LAYERS} layers on one {reply.device_name}, by its datasheet")
    for one in reply.compared:
        for cost in one.costs:
            forward, decode = cost.predicted.forward, cost.predicted.decode
            assert decode is not None  # exact attention decodes
            cache = LAYERS * cost.kv_cache_bytes / 2**30
            print(
                f"{one.label:>13} {cost.shape.queries:>6} tokens: cache {cache:5.1f} GiB, "
                f"forward {LAYERS * forward.median_ms:6.0f} ms, then {LAYERS * decode.median_ms:5.1f} ms a token "
                f"({LAYERS * decode.low_ms:.1f} to {LAYERS * decode.high_ms:.1f})"
            )


def elsewhere(client: Client) -> None:
    """The same layer, with grouped heads, on several devices."""
    print(f"one layer with grouped heads at {LENGTHS[1]} tokens")
    for device in DEVICES:
        reply = client.raw_complexity(LENGTHS[1], num_kv_heads=8, hardware=device, dtype="bfloat16", **HEADS)
        forward, longest = reply.costs[0].predicted.forward, reply.limits.forward.longest
        print(
            f"{reply.device_name:>13}: {forward.median_ms:6.1f} ms ({forward.low_ms:.1f} to {forward.high_ms:.1f}), "
            f"up to {longest.size:,} tokens"
        )


def window(client: Client) -> None:
    """From where on a window pays, on the device that is here."""
    reply = client.raw_complexity(1024, compare=[{"label": "window", "spec": WINDOW}], **HEADS)
    (faster,) = [crossover for crossover in reply.crossovers if crossover.of == "time"]
    surely = "nowhere that was looked" if faster.high is None else f"{faster.high} on"
    print(f"on {reply.device_name}, with {reply.limits.free_bytes / 2**30:.1f} GiB free")
    print(f"  {faster.cheaper} is faster from {faster.at or 1} tokens on, surely from {surely}")
    for one in reply.compared:
        longest = one.limits.gradients.longest if one.limits.gradients else one.limits.forward.longest
        print(f"  {one.label}: gradients of up to {longest.size:,} tokens, with the {longest.kernel} kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="draw time and memory of the variants into this .svg")
    picture = parser.parse_args().picture
    with Client() as client:
        variants(client)
        elsewhere(client)
        window(client)
        if picture is not None:
            drawn = client.raw_complexity_picture(
                LENGTHS[0], LENGTHS, compare=VARIANTS, hardware="H100 SXM", dtype="bfloat16", **HEADS
            )
            picture.write_bytes(drawn.data)
            print(f"picture: {picture}")


if __name__ == "__main__":
    main()
