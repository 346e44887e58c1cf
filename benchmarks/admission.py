"""How long it takes to refuse what is a hundred times over the memory budget."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np

from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, to_safetensors
from benchmarks.measure import Case
from benchmarks.server import serving

BUDGET = 64 * 2**20
TIMES = 100
"""How many times the budget each request needs, at least: as bytes of one matrix of weights in float32."""
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
    with serving(memory_budget=BUDGET) as url, httpx.Client(base_url=url) as http:
        for name, (operation, body) in requests().items():

            def refused(operation: Operation[Any] = operation, body: bytes = body) -> None:
                answer = http.post(operation.path, content=body, headers=headers)
                assert answer.json()["needed_bytes"] >= TIMES * BUDGET

            yield Case(name, refused, "GET /health/live", lambda: http.get("/health/live"))
