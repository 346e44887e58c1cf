"""Time to refuse a request that needs a hundred times the memory budget.

``python -m benchmarks.admission`` prints the table; ``--output benchmarks/results/admission.md`` writes it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, to_safetensors
from benchmarks.contestants import OURS, SERVICE, Server, serving
from benchmarks.measure import Case, rows
from benchmarks.page import IN_TURN, fewer, parser, publish
from benchmarks.workloads import WORKLOADS

BUDGET = 64 * 2**20
TIMES = 100
"""Each request needs at least this many times the budget, as bytes of one matrix of weights in float32."""
LENGTH = math.isqrt(TIMES * BUDGET // 4) + 1
_WANTED: dict[str, tuple[Operation[Any], dict[str, Any]]] = {
    **{
        f"forward, {kernel}, the weights returned": (operations.raw_forward, {"return": ["weights"], "kernel": kernel})
        for kernel in ("fused", "blocked", "materialized")
    },
    "forward, the scores returned": (operations.raw_forward, {"return": ["scores"]}),
    "forward, alibi and a window, the weights returned": (
        operations.raw_forward,
        {
            "return": ["weights"],
            "spec": {"position": {"name": "alibi"}, "masks": [{"name": "sliding_window", "left": 512, "right": 0}]},
        },
    ),
    "weights": (operations.raw_weights, {}),
    "gradients, materialized": (operations.raw_gradients, {"wrt": ["query"], "kernel": "materialized"}),
    "gradients with respect to the weights": (operations.raw_gradients, {"wrt": ["weights"]}),
}


def requests() -> dict[str, tuple[Operation[Any], bytes]]:
    """Each request by what it asks for: its operation and its body, a safetensors file of a megabyte."""
    query = np.ones((1, 1, LENGTH, 8), np.float32)
    found = {}
    for name, (operation, options) in _WANTED.items():
        assert operation.request is not None
        request = validate(operation.request, {"query": query, **options})
        found[name] = (operation, b"".join(map(bytes, to_safetensors(request, "request"))))
    return found


def cases() -> Iterator[Case]:
    """Each refusal over HTTP, and a round trip that asks for nothing."""
    headers = {"content-type": SAFETENSORS, "accept": "application/json"}
    with TemporaryDirectory() as folder, _limited(Path(folder)) as url, httpx.Client(base_url=url) as http:
        for name, (operation, body) in requests().items():

            def refused(operation: Operation[Any] = operation, body: bytes = body) -> None:
                answer = http.post(operation.path, content=body, headers=headers)
                assert answer.json()["needed_bytes"] >= TIMES * BUDGET

            yield Case(name, refused, "GET /health/live", lambda: http.get("/health/live"))


@contextmanager
def _limited(folder: Path) -> Iterator[str]:
    """The URL of a server with that budget."""
    limited = Server(OURS, lambda setup: [*SERVICE.command(setup), "--memory-budget", str(BUDGET)], SERVICE.ready)
    with serving(limited, WORKLOADS["W1"], folder) as process:
        yield process.url


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 41).parse_args()
    text = f"""What needs {TIMES} times the memory budget or more, refused over HTTP on loopback before anything is
allocated for it: one head, a body of a megabyte in safetensors.

{IN_TURN}"""
    publish(
        "Admission", text, rows(cases(), arguments.rounds or (fewer(41) if arguments.quick else 41)), arguments.output
    )


if __name__ == "__main__":
    main()
