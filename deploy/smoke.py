"""Check that a running server answers, and that it keeps modules. Needs only Python.

python deploy/smoke.py [URL]          create the module `smoke` if it is missing, and run it forward
python deploy/smoke.py --kept [URL]   the same, but `smoke` must exist already, as after a restart

Without URL, ATTENTION_URL is the address.
ATTENTION_API_KEY is a key with the scopes infer, inspect and manage, if the server needs one.
"""

import argparse
import json
import math
import os
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

MODULE = {"config": {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}, "seed": 7}
MAKE_KEY = (
    "set ATTENTION_API_KEY to one with scopes infer, inspect and manage. With compose, this makes one:\n"
    "  docker compose exec -T attention attention keys create smoke --scope infer --scope inspect --scope manage"
)
QUERY = [[math.sin(i + 3 * j) for i in range(8)] for j in range(4)]


def call(method: str, url: str, body: object = None) -> Any:
    """Send JSON, and read JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("ATTENTION_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data, headers, method=method)  # noqa: S310
    with urlopen(request, timeout=30) as reply:  # noqa: S310
        return json.loads(reply.read() or b"null")


def exists(url: str, name: str) -> bool:
    """Return True if the server has a module."""
    try:
        return bool(call("GET", f"{url}/v1/modules/{name}"))
    except HTTPError as error:
        if error.code == 404:
            return False
        if error.code in {401, 403}:
            raise SystemExit(f"{url} needs an API key; {MAKE_KEY}") from None
        raise


def output(url: str, name: str) -> list[float]:
    """Run the query through a module and return the numbers, row by row."""
    reply = call("POST", f"{url}/v1/modules/{name}/forward", {"query": QUERY})
    return [number for row in reply["output"] for number in row]


def main() -> None:
    """Check one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default=os.environ.get("ATTENTION_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()

    found = exists(options.url, "smoke")
    if options.kept and not found:
        raise SystemExit("the module `smoke` was not kept")
    if not found:
        call("POST", f"{options.url}/v1/modules", {"name": "smoke", **MODULE})

    # A second module with the same seed must give the same numbers, also after a restart.
    call("POST", f"{options.url}/v1/modules", {"name": "smoke-twin", **MODULE})
    try:
        first, twin = output(options.url, "smoke"), output(options.url, "smoke-twin")
    finally:
        call("DELETE", f"{options.url}/v1/modules/smoke-twin")
    if len(first) != 4 * 8 or not any(first):
        raise SystemExit(f"not an output of 4 x 8 numbers: {first}")
    if not all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(first, twin, strict=True)):
        raise SystemExit("the module `smoke` gives other numbers than a new module with the same seed")
    print(f"{options.url} answers; `smoke` was {'kept' if found else 'created'}, its output begins {first[:3]}")


if __name__ == "__main__":
    main()
