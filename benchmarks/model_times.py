"""Predicted times of whole models beside what ran, over HTTP, with nothing learned before and after some requests.

``python -m benchmarks.model_times`` prints the table; ``--output FILE`` writes it.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.callers import CONFIG
from benchmarks.generation import letters
from benchmarks.page import parser, publish
from benchmarks.processes import free_port, running
from benchmarks.tables import table

ROUNDS, LENGTHS, NEW = 10, (14, 400), 24
MODELS: Final = {"tiny": None, "llama": CONFIG}
TEXT = f"""`tiny`, and a Llama of 6 layers of 6 heads and 384 features with random parameters. Predicted over measured
time: `complexity` before any request, `ran` of the requests from the eleventh on, and `complexity` afterwards; the
share of requests within their interval of nine in ten. Requests of both lengths take turns; a generation has
{NEW} tokens.
Measured is `ran.compute_ms`, the time in the model's process.
"""


def asked(model: str, kind: str, ids: list[int]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The path and the body of a request, and the sizes of its cost."""
    sizes = {"length": len(ids), "weights": kind == "weights", "new_tokens": NEW if kind == "generation" else 0}
    if kind == "generation":
        return "/v1/completions", {"model": model, "prompt": ids, "max_tokens": NEW, "temperature": 0}, sizes
    body: dict[str, Any] = {"tokens": ids, "encoding": "base64"}
    return f"/v1/models/{model}/{kind}", body | ({"of": {"position": -1}} if kind == "gradients" else {}), sizes


def rows(rounds: int, folder: Path) -> Iterator[str]:
    """The table, line by line."""
    header = ["model", "asked", "tokens", "before", "learned, of ran", "within", "learned, of price", "ms"]
    yield table(header, [])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(folder / "models" / "llama")
    letters().save_pretrained(folder / "models" / "llama")
    port = free_port()
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(folder / "models")]
    with running([*command, "--port", str(port)], port, "/health/ready", [0, 1], {}, folder / "log") as server:
        http = httpx.Client(base_url=server.url, timeout=300)
        chance = random.Random(0)  # noqa: S311

        def send(path: str, body: dict[str, Any]) -> dict[str, Any]:
            reply: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
            return reply

        for model in MODELS:
            send(f"/v1/models/{model}/forward", {"tokens": [5, 6, 7]})
            kinds = ("forward", "weights", "gradients", "generation")
            priced = {
                (kind, length): send(f"/v1/models/{model}/complexity", asked(model, kind, [5] * length)[2])
                for kind in kinds
                for length in LENGTHS
            }
            for kind in kinds:
                runs: dict[int, list[dict[str, float]]] = {length: [] for length in LENGTHS}
                for _ in range(10 + rounds):
                    for length in LENGTHS:
                        path, body, _ = asked(model, kind, [chance.randrange(3, 90) for _ in range(length)])
                        ran = send(path, body)["ran"]
                        if ran["compute_ms"] is not None:
                            runs[length].append(ran)
                for length, found in runs.items():
                    late = found[5:]  # ten requests of both lengths ran before
                    took = median(each["compute_ms"] for each in late)
                    ratio = median(each["predicted_ms"] / each["compute_ms"] for each in late)
                    within = [
                        each["predicted_low_ms"] <= each["compute_ms"] <= each["predicted_high_ms"] for each in late
                    ]
                    after = send(f"/v1/models/{model}/complexity", asked(model, kind, [5] * length)[2])
                    cells = [model, kind, str(length), *(
                        f"{each:.2f}" for each in (
                            priced[kind, length]["total_ms"] / took, ratio, sum(within) / len(within),
                            after["total_ms"] / took,
                        )
                    ), f"{took:.1f}"]  # fmt: skip
                    if kind == "gradients":  # which the question about costs does not price
                        cells[3] = cells[6] = ""
                    yield f"| {' | '.join(cells)} |"
        accuracy = http.get("/v1/complexity/accuracy").json()["predictions"]
        for each in (each for each in accuracy if each["model"]):
            yield (
                f"\nOf {each['count']} × {each['purpose']} of {each['kernel']}: "
                f"median error {each['median_error']:+.0%}, within the interval {each['coverage']:.0%}"
            )


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, ROUNDS).parse_args()
    rounds = options.rounds or (2 if options.quick else ROUNDS)
    with TemporaryDirectory() as folder:
        publish("Predicted times of whole models", TEXT, rows(rounds, Path(folder)), options.output, ("torch",))


if __name__ == "__main__":
    main()
