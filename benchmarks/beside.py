"""A tiny request beside a large one: the latency of the tiny one over HTTP, and how soon a cancelled one stops.

``python -m benchmarks.beside`` starts a server, keeps one large request running, and prints p50 and p99.
"""

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.beside", description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args(arguments)
