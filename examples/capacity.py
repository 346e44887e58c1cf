"""Plan the capacity for a long-context layer on several devices: longest sequence, cheapest variant and costs.

The layer is one of Llama-3 8B, with 32 query heads of width 128. The example compares one key/value head per query
head, one per four query heads (as in the model), and a single one. It then compares devices. Last, it asks from which
length a window of 256 tokens is faster on the server's own device. The service computes no attention for these
answers, so they take about a second for all sizes, and the hardware can be absent.

Needs a running service (``attention serve``, or ATTENTION_URL): ``python examples/capacity.py``. ``--picture
FILE.svg`` needs a service with the extra ``plot``.
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
    """Return the cost of each variant on one device over the length of the past."""
    reply = client.attention.complexity(
        LENGTHS[0], LENGTHS, compare=VARIANTS, hardware="H100 SXM", dtype="bfloat16", **HEADS
    )
    print(f"{LAYERS} layers on one {reply.device_name}, by its datasheet")
    for one in reply.compared:
        for cost in one.costs:
            forward, decode = cost.predicted.forward, cost.predicted.decode
            assert decode is not None  # exact attention has a decode step
            cache = LAYERS * cost.kv_cache_bytes / 2**30
            print(
                f"{one.label:>13} {cost.shape.queries:>6} tokens: cache {cache:5.1f} GiB, "
                f"forward {LAYERS * forward.median_ms:6.0f} ms, then {LAYERS * decode.median_ms:5.1f} ms a token "
                f"({LAYERS * decode.low_ms:.1f} to {LAYERS * decode.high_ms:.1f})"
            )


def elsewhere(client: Client) -> None:
    """Compare several devices for the layer with grouped heads."""
    print(f"one layer with grouped heads at {LENGTHS[1]} tokens")
    for device in DEVICES:
        reply = client.attention.complexity(LENGTHS[1], num_kv_heads=8, hardware=device, dtype="bfloat16", **HEADS)
        forward, longest = reply.costs[0].predicted.forward, reply.limits.forward.longest
        print(
            f"{reply.device_name:>13}: {forward.median_ms:6.1f} ms ({forward.low_ms:.1f} to {forward.high_ms:.1f}), "
            f"up to {longest.size:,} tokens"
        )


def window(client: Client) -> None:
    """Find the length from which a window is faster on the server's device."""
    reply = client.attention.complexity(1024, compare=[{"label": "window", "spec": WINDOW}], **HEADS)
    (faster,) = [crossover for crossover in reply.crossovers if crossover.of == "time"]
    surely = "nowhere that was looked" if faster.high is None else f"{faster.high} on"
    print(f"on {reply.device_name}, with {reply.limits.free_bytes / 2**30:.1f} GiB free")
    print(f"  {faster.cheaper} is faster from {faster.at or 1} tokens on, surely from {surely}")
    for one in reply.compared:
        longest = one.limits.gradients.longest if one.limits.gradients else one.limits.forward.longest
        print(f"  {one.label}: gradients of up to {longest.size:,} tokens, with the {longest.kernel} kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="file (.svg) for a picture of time and memory of the variants")
    picture = parser.parse_args().picture
    with Client() as client:
        variants(client)
        elsewhere(client)
        window(client)
        if picture is not None:
            drawn = client.plot().of(
                client.attention.complexity,
                LENGTHS[0],
                LENGTHS,
                compare=VARIANTS,
                hardware="H100 SXM",
                dtype="bfloat16",
                **HEADS,
            )
            picture.write_bytes(drawn.data)
            print(f"picture: {picture}")


if __name__ == "__main__":
    main()
