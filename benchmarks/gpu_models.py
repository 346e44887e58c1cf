"""A whole model of a billion parameters on a GPU beside transformers and vLLM: passes, generation, many callers.

``python -m benchmarks.gpu_models`` prints one line a measurement. ``--device cpu --small`` shows that it runs.
"""

import argparse
import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attention_client import Client
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.runtime.device.torch_device import Device
from benchmarks.generation import letters
from benchmarks.processes import cores_for, free_port, running

Json = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """The model and the sizes that are measured."""

    config: Json
    lengths: tuple[int, ...] = (128, 1024)
    new: int = 32
    prompt: int = 64
    batches: tuple[int, ...] = (1, 16)
    callers: tuple[int, ...] = (1, 16, 64)
    rounds: int = 5


LARGE = Work({
    "vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "bos_token_id": None,
    "eos_token_id": None,
})  # fmt: skip
"""The sizes of Llama 3.2 1B, with a smaller vocabulary."""
SMALL = Work(
    LARGE.config | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2},
    (16,), 4, 8, (1, 2), (1, 2), 2,
)  # fmt: skip


def made(work: Work, device: str, implementation: str = "sdpa") -> PreTrainedModel:
    """Make the model with random parameters, in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            LlamaConfig(**work.config), attn_implementation=implementation, dtype=torch.bfloat16
        )
    return model.eval().requires_grad_(False)


def milliseconds(run: Callable[[], object], device: str) -> float:
    """Time one run, to the end of what it launched."""
    started = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def beside(name: str, run: Callable[[], object], theirs: Callable[[], object], work: Work, device: str) -> str:
    """Time two things in turn. Return their medians and the median ratio in one line."""
    for each in (run, theirs):
        each()
    pairs = [(milliseconds(run, device), milliseconds(theirs, device)) for _ in range(work.rounds)]
    ratio = median(a / b for a, b in pairs)
    ours, other = (median(column) for column in zip(*pairs, strict=True))
    return f"{name}: {ours:.1f} ms, transformers {other:.1f} ms, ratio {ratio:.2f}"


def tokens(count: int, work: Work, seed: int = 0) -> list[int]:
    """Return random token ids."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, min(250, work.config["vocab_size"]), (count,), generator=made).tolist()


def passes(work: Work, device: str) -> Iterator[str]:
    """Each question about a text beside transformers' own pass that returns as much."""
    loaded = LoadedModel("llama", made(work, device, "eager"), letters(), Device.open(device))
    sdpa, eager = made(work, device), made(work, device, "eager")
    for length in work.lengths:
        ids = tokens(length, work)

        @torch.no_grad()
        def theirs(model: PreTrainedModel, *, weights: bool, ids: list[int] = ids) -> object:
            given = torch.tensor([ids], device=device)
            output = model(given, use_cache=False, output_attentions=weights)
            return [each.cpu() for each in output.attentions] if weights else output.logits[0, -1].cpu()

        plain, all_weights = partial(theirs, sdpa, weights=False), partial(theirs, eager, weights=True)
        edits = {str(work.config["num_hidden_layers"] - 1): [{"tap": "context", "heads": [0], "set": 0}]}
        questions = {
            "forward": (lambda ids=ids: forward_reply(loaded, ModelForwardRequest(tokens=ids)), plain),
            "forward with an edit": (
                lambda ids=ids, edits=edits: forward_reply(loaded, ModelForwardRequest(tokens=ids, edits=edits)),
                plain,
            ),
            "statistics of every head": (
                lambda ids=ids: weights_reply(loaded, ModelWeightsRequest(tokens=ids, return_weights=False)),
                all_weights,
            ),
            "weights and statistics of every head": (
                lambda ids=ids: weights_reply(loaded, ModelWeightsRequest(tokens=ids)),
                all_weights,
            ),
            "gradients of embeddings": (
                lambda ids=ids: ModelGradients(
                    loaded, ModelGradientsRequest(tokens=ids, of={"token": 7}, wrt=["embeddings"])
                ).reply(),
                plain,
            ),
        }
        for name, (run, other) in questions.items():
            yield beside(f"{name}, {length} tokens", run, other, work, device)
    loaded.close()


def generation(work: Work, device: str) -> Iterator[str]:
    """Tokens of one request, with nothing asked and with statistics, beside ``generate`` of the same batch."""
    loaded = LoadedModel("llama", made(work, device, "eager"), letters(), Device.open(device))
    sdpa = made(work, device)
    for count in work.batches:
        prompts = [tokens(work.prompt, work, seed) for seed in range(count)]
        given = torch.tensor(prompts, device=device)

        def theirs(given: torch.Tensor = given) -> object:
            every: Any = sdpa
            return every.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=work.new, pad_token_id=0
            )

        for name, more in {"nothing": {}, "statistics of every layer": {"attention": {}}}.items():
            fields: Json = {"model": "llama", "prompt": prompts, "max_tokens": work.new, "temperature": 0, **more}
            request = CompletionRequest(**fields)
            run = partial(generate, loaded, request, plan_generation(loaded, request), lambda _: None)
            yield beside(f"{work.new} tokens of {count} texts, {name} asked", run, theirs, work, device)
    loaded.close()


def callers(work: Work, device: str) -> Iterator[str]:
    """Many callers over HTTP, beside one batch of transformers: tokens and texts a second, and what a load takes."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        model = made(work, device)
        model.save_pretrained(root / "models" / "llama")
        letters().save_pretrained(root / "models" / "llama")
        for count in work.callers:
            yield f"one batch of {count} texts by transformers: {_batch_rate(model, count, work, device):.1f} tokens/s"
        del model
        port = free_port()
        command = [sys.executable, "-m", "attention_service", "--models-dir", str(root / "models")]
        command += ["--device", device, "--port", str(port)]
        log = root / "log"
        every_core = cores_for(64)[0]
        try:
            with running(command, port, "/health/ready", every_core, {}, log):
                yield from _answer_lines(f"http://127.0.0.1:{port}", work)
        except Exception:
            print(log.read_text(errors="replace")[-4000:])
            raise


def _batch_rate(model: Any, count: int, work: Work, device: str) -> float:
    """Tokens a second of ``generate`` for so many texts at once."""
    given = torch.tensor([tokens(work.prompt, work, seed) for seed in range(count)], device=device)
    settings = {"do_sample": False, "max_new_tokens": work.new, "pad_token_id": 0}
    run = partial(model.generate, given, attention_mask=torch.ones_like(given), **settings)
    run()
    return 1e3 * count * work.new / median(milliseconds(run, device) for _ in range(work.rounds))


def vllm(work: Work, device: str) -> Iterator[str]:
    """The same texts by vLLM, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        yield "vLLM is not installed"
        return
    library: Any = importlib.import_module("vllm")
    with TemporaryDirectory() as folder:
        made(work, device).save_pretrained(folder)
        engine = library.LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.5)
        settings = library.SamplingParams(temperature=0, max_tokens=work.new, ignore_eos=True, detokenize=False)
        for count in work.callers:
            prompts = [{"prompt_token_ids": tokens(work.prompt, work, seed)} for seed in range(count)]
            run = partial(engine.generate, prompts, settings, use_tqdm=False)
            run()
            seconds = median(milliseconds(run, device) for _ in range(work.rounds)) / 1e3
            yield f"{count} texts by vLLM: {count * work.new / seconds:.1f} tokens/s"


def _answer_lines(url: str, work: Work) -> Iterator[str]:
    with Client(url, timeout=300) as client:
        started = time.perf_counter()
        first = client.models.forward("llama", tokens=tokens(8, work))
        yield f"first answer after {time.perf_counter() - started:.1f} s; the model ran on {first.ran.device}"
        info = client.models.get("llama")
        yield f"counted {info.bytes / 2**20:.0f} MiB; memory {client.server.info().memory}"
        heads, last = work.config["num_attention_heads"], str(work.config["num_hidden_layers"] - 1)

        def edited(seed: int) -> Json:
            """The edit of one caller, of another head than those of the others."""
            return {"statistics": [], "edits": {last: [{"tap": "context", "heads": [seed % heads], "set": 0}]}}

        questions: dict[str, tuple[Callable[[int], object], int]] = {
            "generated tokens": (
                lambda seed: client.models.generate(
                    "llama", tokens(work.prompt, work, seed), max_tokens=work.new, temperature=0
                ),
                work.new,
            ),
            "generated tokens with statistics": (
                lambda seed: client.models.generate(
                    "llama", tokens(work.prompt, work, seed), max_tokens=work.new, temperature=0, attention={}
                ),
                work.new,
            ),
            "generated tokens with an edit of each caller's own": (
                lambda seed: client.models.generate(
                    "llama", tokens(work.prompt, work, seed), max_tokens=work.new, temperature=0,
                    attention=edited(seed),
                ),
                work.new,
            ),
            "forwards": (lambda seed: client.models.forward("llama", tokens=tokens(work.prompt, work, seed)), 1),
            "statistics": (
                lambda seed: client.models.weights(
                    "llama", tokens=tokens(work.prompt, work, seed), return_weights=False
                ),
                1,
            ),
            "replies with all weights": (
                lambda seed: client.models.weights("llama", tokens=tokens(work.prompt, work, seed)),
                1,
            ),
        }  # fmt: skip
        for name, (ask, each) in questions.items():
            ask(0)
            for count in work.callers:
                with ThreadPoolExecutor(count) as pool:
                    started = time.perf_counter()
                    list(pool.map(ask, range(count)))
                    yield f"{count} callers: {count * each / (time.perf_counter() - started):.1f} {name}/s"
        memory = client.server.info().memory
        yield f"in flight afterwards: {memory.in_flight_bytes} bytes"


PARTS = (passes, generation, callers, vllm)


def main() -> None:
    """Measure and print; a part that fails costs the others nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to see that it runs")
    parser.add_argument("--small", action="store_true", help="a toy model")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("there is no CUDA device here; nothing was measured")
        return
    for line in lines(arguments.device, SMALL if arguments.small else LARGE):
        print(line, flush=True)


def lines(device: str, work: Work) -> Iterator[str]:
    """All measurements, and what kept a part from being measured."""
    for part in PARTS:
        try:
            yield from part(work, device)
        except Exception:
            yield f"FAIL  {part.__name__}\n{traceback.format_exc(limit=-4)}"
        if device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
