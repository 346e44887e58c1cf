"""Run a real encoder with its attention in the service, show the weights of its heads, and check every number.

::

    make demo                                        all-MiniLM-L6-v2, fetched once, and its own service
    make demo SENTENCE="Time flies like an arrow"
    make demo CHECKPOINT=path/to/folder              any checkpoint with the layout of BERT, as safetensors
    python examples/demo.py --layer 2                every head of layer 2; also --head, --all
    make demo ATTENTION_URL=http://host:8000         a running service, whose model repository has the checkpoint

The service computes the attention of every layer; ``transformers`` computes the rest (embeddings, feed-forward,
LayerNorm). For comparison, ``transformers`` then computes the whole encoder. The exit status is 1 if the weights differ
by more than 1e-5.
It needs the extras ``server`` and ``transformers``.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from attention_client import AttentionError, Client
from demo_parts import minilm, show
from demo_parts.encoder import Encoded, Encoder
from demo_parts.service import serving

TOLERANCE = 1e-5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Show what every head of an encoder looks at, through the service.")
    say = parser.add_argument
    say("--sentence", default=os.environ.get("SENTENCE") or "The cat sat on the mat")
    say("--checkpoint", type=Path, default=os.environ.get("CHECKPOINT") or None, help="folder; default: MiniLM")
    say(
        "--url",
        default=os.environ.get("ATTENTION_URL") or None,
        help="a running service, whose model repository has the checkpoint; default: ATTENTION_URL, else start one",
    )
    say("--stored-as", metavar="PATH", help="the checkpoint's path in that repository; default: the folder's name")
    say("--layer", type=int, help="show the weights of this layer")
    say("--head", type=int, help="show the weights of this head")
    say("--all", action="store_true", help="show the weights of every head")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    checkpoint = (given.checkpoint or minilm.fetch()).resolve()
    encoder = Encoder(checkpoint)
    tokens = encoder.tokens(given.sentence)
    with repository(checkpoint, given) as (url, stored), Client(url) as client:
        info = client.server.info()
        print(f"{info.name} {info.version} on {info.device_name}, torch {info.torch}, at {url}")
        modules = [client.modules.import_(stored, layer=layer).name for layer in range(encoder.depth)]
        print("imported", *modules)
        began = time.perf_counter()
        served = encoder.run_served(given.sentence, client, modules)
        took = time.perf_counter() - began
    print(f"sent {len(tokens)} tokens through {encoder.depth} layers in {1000 * took:.0f} ms:", *tokens)
    for layer, head in chosen(served, given):
        show.weights(console, served.layers, layer, head, tokens)
    show.statistics(console, served.layers, tokens)
    show.ran(console, served.layers)
    return compare(served, encoder.run(given.sentence))


@contextmanager
def repository(checkpoint: Path, given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield a service, and the checkpoint's path in its model repository."""
    if given.url:
        yield given.url, given.stored_as or checkpoint.name
    else:
        with serving(checkpoint) as started:
            yield started


def chosen(served: Encoded, given: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the heads to show, as (layer, head): by default the head with the lowest entropy."""
    largest = torch.stack([torch.as_tensor(layer.statistics.max_weight[0]) for layer in served.layers])
    depth, heads = largest.shape
    if not given.all and given.layer is None and given.head is None:
        return [divmod(int(largest.argmax()), heads)]
    layers = range(depth) if given.layer is None or given.all else [given.layer]
    columns = range(heads) if given.head is None or given.all else [given.head]
    if not set(layers) <= set(range(depth)) or not set(columns) <= set(range(heads)):
        raise ValueError(f"layers are 0 to {depth - 1}, heads 0 to {heads - 1}")
    return [(layer, head) for layer in layers for head in columns]


def compare(served: Encoded, reference: Encoded) -> int:
    """Print the distance of the service from ``transformers`` (eager attention). Return the exit status."""
    pairs = zip(served.weights, reference.weights, strict=True)
    weights = torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()
    hidden = (served.hidden - reference.hidden).abs().max().item()
    size = max(1.0, reference.hidden.abs().max().item())
    agree = weights <= TOLERANCE and hidden <= TOLERANCE * size  # false for NaN
    print("\nlargest difference from transformers (eager attention)")
    print(f"  weights of all heads and layers  {weights:.1e}   at most {TOLERANCE:.0e} is allowed")
    print(f"  final hidden state               {hidden:.1e}   of numbers up to {size:.2g}")
    print("the service agrees" if agree else "the service does NOT agree")
    return 0 if agree else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AttentionError, OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as fault:
        sys.exit(f"demo: {fault}")
    except KeyboardInterrupt:
        sys.exit(130)
