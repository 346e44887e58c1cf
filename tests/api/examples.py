"""The examples of the OpenAPI document against a live server; run as a module, it brings the replies shown up to date.

``python -m tests.api.examples`` rewrites those in replies.json that are no longer what the server answers.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from attention_contract.operations import OPERATIONS, Operation
from tests.conftest import live_server
from tests.docs.snippets import json_difference

DIFFERS = {"accuracy", "list_modules", "server_info", "health_live", "health_ready", "list_variants"}
"""Operations whose answer depends on the machine or on what was asked before."""


def examples(http: httpx.Client) -> Iterator[tuple[Operation[Any], Any, httpx.Response | None]]:
    """Each operation, the reply that the document shows, and the answer to its example, where it can be asked."""
    document = http.get("/openapi.json").json()
    http.post("/v1/modules", json={"name": "demo", "config": {"d_model": 8, "num_heads": 2}, "seed": 0})
    http.post("/v1/modules", json={"name": "unit", "config": {"d_model": 1, "num_heads": 1, "bias": False}})
    for operation in OPERATIONS:
        described = document["paths"][operation.path][operation.method.lower()]
        content = described["responses"][str(operation.status)].get("content", {})
        shown = content.get("application/json", {}).get("example")
        answer = None
        if operation.name not in {"import_module", "delete_module"}:
            name = "unit" if operation.name == "replace_parameters" else "demo"
            request = described.get("requestBody", {}).get("content", {}).get("application/json", {})
            path = operation.path.format(name=name, parameter="q_proj.bias")
            answer = http.request(operation.method, path, json=request.get("example"))
        yield operation, shown, answer


def rewrite() -> None:
    """Put today's answers in the place of those that differ."""
    path = Path(__file__).parents[2] / "service" / "attention_service" / "api" / "replies.json"
    replies = json.loads(path.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder, live_server(Path(folder)) as url, httpx.Client(base_url=url) as http:
        for operation, shown, answer in examples(http):
            fresh = answer is not None and operation.name not in DIFFERS | {"delete_module"}
            if fresh and json_difference(shown, answer.json(), operation.name) is not None:
                replies[operation.name] = answer.json()
    path.write_text(json.dumps(replies, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    rewrite()
