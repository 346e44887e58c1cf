"""Callers of a base and of two adapters, mixed, beside as many callers of the base alone, over HTTP.

``python -m benchmarks.adapters`` prints the table; ``--output FILE`` writes it.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.callers import CONFIG, NEW, Server, cases, texts_of, timed
from benchmarks.generation import letters
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import short, table

ROUNDS, CALLERS = 12, 12
ADAPTERS: Final = ("one", "two")
RANK: Final = 8
KINDS: Final = ("generation", "forward, 13 tokens", "weights and statistics, 13 tokens")
"""The cases of ``benchmarks.callers`` that are measured."""
TEXT = f"""A Llama of 6 layers of 6 heads and 384 features with random parameters, float32, tokens in, and two LoRA
adapters of rank {RANK} on all its projections. {CALLERS} callers send one request each at once; {NEW} greedy tokens a
generation. *Mixed*: four callers of the base, four of each adapter; *base*: all of the base. Rounds of both take turns,
and `of the base alone` is the median of the ratios of their rates.
"""
Body = tuple[str, dict[str, Any]]


def write_adapter(model: torch.nn.Module, folder: Path, seed: int) -> None:
    """Write a LoRA adapter of every projection of a model, with random numbers."""
    torch.manual_seed(seed)
    tensors, names = {}, set()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path.endswith("_proj"):
            names.add(path.rpartition(".")[2])
            name = f"base_model.model.{path}.lora_{{}}.weight"
            tensors[name.format("A")] = torch.randn(RANK, module.in_features) * 0.02
            tensors[name.format("B")] = torch.randn(module.out_features, RANK) * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "llama", "r": RANK, "lora_alpha": 2 * RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": sorted(names)}))


def by(adapter: str | None, body: Body) -> Body:
    """The same request to an adapter; None for the base."""
    path, fields = body
    if adapter is None:
        return body
    return path, fields | ({"model": f"llama:{adapter}"} if "model" in fields else {"adapter": adapter})


def rows(rounds: int, threads: int, folder: Path) -> Iterator[str]:
    """The table, line by line."""
    yield table(["asked", "of the base alone", "mixed, requests/s", "base, requests/s"], [])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).eval()
    models = folder / "models"
    model.save_pretrained(models / "llama")
    letters().save_pretrained(models / "llama")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(model, models / name, seed)
    port = free_port()
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(models)]
    address = [*command, "--port", str(port)]
    settings = {"ATTENTION_THREADS": str(threads)}
    with running(address, port, "/health/ready", cores_for(2)[0], settings, folder / "log") as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        for name, lengths, body, _ in [case for case in cases() if case[0] in KINDS]:
            texts = texts_of(CALLERS, lengths, CALLERS)
            found = []
            for number in range(rounds + 1):  # the first warms up
                own = [[3 + number, *ids[1:]] for ids in texts]  # nobody reads on from the texts of a round before
                others = [[3 + number, 4, *ids[2:]] for ids in texts]
                askers = [(None, *ADAPTERS)[at % 3] for at in range(CALLERS)]
                mixed = [by(adapter, body(ids)) for adapter, ids in zip(askers, own, strict=True)]
                took = [timed(partial(server.together, bodies)) for bodies in (mixed, [body(ids) for ids in others])]
                found += [took] if number else []
            ratio = median(base / mixed for mixed, base in found)
            rates = [short(CALLERS / median(each)) for each in zip(*found, strict=True)]
            yield f"| {name} | {ratio:.2f} | {rates[0]} | {rates[1]} |"


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, ROUNDS)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the model")
    options = arguments.parse_args()
    rounds = options.rounds or (fewer(ROUNDS) if options.quick else ROUNDS)
    with TemporaryDirectory() as folder:
        lines = rows(rounds, options.threads, Path(folder))
        publish("Adapters of one model", TEXT, lines, options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
