"""Many callers of one whole model over HTTP, beside one batch of transformers with as many texts.

``python -m benchmarks.callers --callers 1,4,16`` prints the table; ``--output FILE`` writes it. ``--checkpoint``
takes a trained model in place of the random one.
"""

import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.generation import letters
from benchmarks.page import fewer, parser, publish
from benchmarks.processes import Running, cores_for, free_port, running
from benchmarks.tables import short, table

NEW, ROUNDS, CALLERS = 48, 5, (1, 4, 16)
REPEATS: Final = 10
"""Requests of a caller in a round, of those that take a few milliseconds."""
_PAUSE_S: Final = 0.2
CONFIG: Final = {
    "vocab_size": 8000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_HOW: Final = f"""In a round, each caller sends one generation of {NEW} greedy tokens, or {REPEATS} other requests in
turn, over its own connection. The baseline is one call of transformers for all texts together, filled up at the left,
with as many threads: `generate` with `sdpa` attention, or as many passes with eager attention and
`output_attentions`. Rounds of both take turns, with a pause in which the threads of one stop spinning; `of one batch`
is the median of the ratios of their rates, and `cpu` the processor seconds of the server and its processes for each
request.
"""
TEXT: Final = f"""A Llama of 6 layers of 6 heads and 384 features with random parameters, float32, tokens in.
{_HOW}"""
Texts = Sequence[list[int]]


class Server:
    """A server with the model, and its callers."""

    def __init__(self, url: str, process: Running) -> None:
        self._client = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=32))
        self._callers = ThreadPoolExecutor(32)
        self._process = process

    def send(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send one request."""
        return self._client.post(path, json=body).raise_for_status()

    def together(self, requests: Sequence[Sequence[tuple[str, dict[str, Any]]]]) -> None:
        """Send the requests of all callers, of each caller one after the other, and wait for all."""

        def send_all(bodies: Sequence[tuple[str, dict[str, Any]]]) -> None:
            for body in bodies:
                self.send(*body)

        for caller in [self._callers.submit(send_all, bodies) for bodies in requests]:
            caller.result()

    def first_token(self, ids: list[int]) -> float:
        """Return the seconds until a generation's first token has come."""
        began = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=_generation(ids, stream=True, logprobs=0)) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if line.startswith("data: {"))
            found = time.perf_counter() - began
            for _ in lines:
                pass
        return found

    def first_tokens(self, texts: Texts) -> list[float]:
        """Return the same of many callers at once."""
        return list(self._callers.map(self.first_token, texts))

    def beside(self, path: str, body: dict[str, Any], tokens: int) -> float:
        """Return the median seconds of a request beside a generation of so many tokens."""
        running_one = self._callers.submit(self.send, "/v1/completions", _generation([5, 6, 7], max_tokens=tokens))
        time.sleep(0.3)
        took = []
        while not running_one.done():
            began = time.perf_counter()
            self.send(path, body)
            took.append(time.perf_counter() - began)
        return median(took[:-1] or took)

    def seconds(self) -> float:
        """Processor seconds of the server and its processes until now."""
        return sum(sum(psutil.Process(each.pid).cpu_times()[:2]) for each in self._process.family())


def rows(
    callers: Sequence[int], rounds: int, threads: int, folder: Path, checkpoint: Path | None = None
) -> Iterator[str]:
    """The table, line by line. ``checkpoint``: a folder, or a GGUF file."""
    yield f"\n## With {threads} thread{'s' * (threads > 1)}\n"
    yield table(["asked", "callers", "of one batch", "requests/s", "batch", "cpu, s"], [])
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = _model(folder / "models" / "llama", checkpoint)
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(folder / "models")]
    port = free_port()
    with running(
        [*command, "--port", str(port)],
        port,
        "/health/ready",
        cores_for(2)[0],
        {"ATTENTION_THREADS": str(threads)},
        folder / "log",
    ) as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        server.send("/v1/completions", _generation([5, 6]))
        for name, lengths, body, baseline in cases():
            for count in callers:
                yield _row(server, model, name, texts_of(count, lengths, count), body, baseline, rounds)
        alone = [timed(partial(server.send, *_forward([5] * 13))) for _ in range(20)]
        shared = server.beside(*_forward([5] * 13), tokens=400)
        yield f"\nA forward of 13 tokens: {1e3 * median(alone):.0f} ms alone, {1e3 * shared:.0f} ms beside a generation"
        for count in callers:
            waits = [each for at in range(rounds) for each in server.first_tokens(texts_of(at, (10, 60), count))]
            late = quantiles(waits, n=100)[98] if len(waits) > 1 else waits[0]
            yield f"Time to the first token, {count} callers: {median(waits):.3f} s, p99 {late:.3f} s"


def _model(folder: Path, checkpoint: Path | None) -> Any:
    """The model that the folder then holds."""
    if checkpoint is None:
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).eval()
        model.save_pretrained(folder)
        letters().save_pretrained(folder)
        return model
    if checkpoint.is_dir():
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkpoint, folder)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=checkpoint.name, dtype=torch.float32).eval()


def cases() -> Iterator[tuple[str, tuple[int, int], Callable[[list[int]], Any], Callable[[Any, Texts], None]]]:
    """The name of each case, the lengths of its texts, its request, and its baseline."""

    def entropies(ids: list[int]) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", _generation(ids, attention={"statistics": ["entropy"]})

    def plain(ids: list[int]) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", _generation(ids)

    yield "generation", (10, 60), plain, generated
    yield "generation, entropies of every head", (10, 60), entropies, generated
    yield "generation, unlike prompts", (24, 600), plain, generated
    for length in (13, 60):
        yield f"forward, {length} tokens", (length, length), _forward, attentions
        yield f"weights and statistics, {length} tokens", (length, length), _weights, attentions


def _generation(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "llama", "prompt": ids, "max_tokens": NEW, "temperature": 0} | more


def _forward(ids: list[int]) -> tuple[str, dict[str, Any]]:
    return "/v1/models/llama/forward", {"tokens": ids}


def _weights(ids: list[int]) -> tuple[str, dict[str, Any]]:
    return "/v1/models/llama/weights", {"tokens": ids, "encoding": "base64"}


def texts_of(seed: int, lengths: tuple[int, int], count: int) -> Texts:
    """Random texts, the same at each call."""
    chance = random.Random(seed)  # noqa: S311
    return [[chance.randrange(3, 7000) for _ in range(chance.randint(*lengths))] for _ in range(count)]


@torch.inference_mode()
def generated(model: Any, texts: Texts) -> None:
    """Generate for all texts by one call of transformers."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in texts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in texts])
    model.set_attn_implementation("sdpa")
    model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


@torch.inference_mode()
def attentions(model: Any, texts: Texts) -> None:
    """Run all texts in one eager pass that returns weights."""
    model.set_attn_implementation("eager")
    model(torch.tensor(texts), output_attentions=True, use_cache=False)


def _row(
    server: Server, model: Any, name: str, texts: Texts, body: Callable[[list[int]], Any],
    baseline: Callable[[Any, Texts], None], rounds: int,
) -> str:  # fmt: skip
    found = []
    repeats = 1 if baseline is generated else REPEATS
    for number in range(rounds + 1):  # the first warms up
        time.sleep(_PAUSE_S)
        theirs = timed(lambda: [baseline(model, texts) for _ in range(repeats)])
        time.sleep(_PAUSE_S)
        before = server.seconds()
        firsts = range(3 + number * repeats, 3 + (number + 1) * repeats)  # nobody reads on from an earlier text
        ours = timed(partial(server.together, [[body([first, *ids[1:]]) for first in firsts] for ids in texts]))
        if number:
            found.append((ours, theirs, server.seconds() - before))
    ours, theirs, used = (median(each) for each in zip(*found, strict=True))
    ratio = median(theirs / ours for ours, theirs, _ in found)
    count = len(texts) * repeats
    cells = [name, str(len(texts)), f"{ratio:.2f}", short(count / ours), short(count / theirs), short(used / count)]
    return f"| {' | '.join(cells)} |"


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, ROUNDS)
    arguments.add_argument("--callers", type=lambda text: [int(each) for each in text.split(",")], default=CALLERS)
    arguments.add_argument(
        "--threads", type=lambda text: [int(each) for each in text.split(",")],
        default=sorted({1, torch.get_num_threads()}),
        help="of the model, and of transformers; default: one, and those of the machine",
    )  # fmt: skip
    arguments.add_argument("--checkpoint", type=Path, help="a folder, or a GGUF file; default: a random model")
    options = arguments.parse_args()
    rounds = options.rounds or (fewer(ROUNDS) if options.quick else ROUNDS)
    with TemporaryDirectory() as folder:
        lines = chain.from_iterable(
            rows(options.callers, rounds, threads, Path(folder), options.checkpoint) for threads in options.threads
        )
        text = TEXT if options.checkpoint is None else f"The model is {options.checkpoint.name}. {_HOW}"
        publish("Many callers of one model", text, lines, options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
