"""Other servers of whole models beside this one: rates, processor time, first tokens, weights, start and memory.

``make bench-model-peers`` installs each apart and writes ``benchmarks/results/model_peers.md``, in about ten minutes
after the installations. ``python -m benchmarks.model_peers --only vLLM`` measures one.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from statistics import median, quantiles
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.callers import CONFIG, NEW, texts_of
from benchmarks.model_peers.servers import MOST, Body, Peer, Start, peers, words
from benchmarks.page import parser, publish
from benchmarks.processes import Running, ServerError, cores_for, free_port, running
from benchmarks.tables import short, table

CALLERS: Final = (1, 4, MOST)
COLUMNS: Final = ("weights", "statistics", "edits", "gradients", "callers share passes", "same bits always")
SHORT: Final = (13, 13)
"""Tokens of the texts whose weights are asked for."""
START_S: Final = 600.0
"""Seconds that a server may take to start: vLLM compiles the model the first time."""
REPEATS: Final = 3
"""Rounds of each measurement in one start."""
TEXT = f"""A Llama of 6 layers of 6 heads and 384 features with random parameters, float32; threads of each server:
{{threads}}, on the same cores. Each caller sends one request a round over a connection of its own: {NEW} greedy tokens
after 10 to 60 tokens, or the weights of every head of a text of 13 tokens. Servers start in turn, {{rounds}} times, and
first answer a request whose tokens must be those of transformers' `generate`. Numbers are medians. `cpu` is the
processor time of the server and its processes, and `first token` the 99th percentile with {MOST} callers. `start` is
the processor time from the start until the first answer, and `memory` the proportional set size of all processes after
the measurements. vLLM's first start compiles the model, which takes minutes; later ones read that from a cache.

`own`: a few lines of the server's own code. A server that batches adds in another order when it has other callers, so
its bits differ; `attention serve` gives the same ones to a request with `"alone": true`.
"""


@dataclass
class Found:
    """Measurements of one server, over all its starts."""

    rates: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Tokens a second, by callers."""
    token_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    weights_ms: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    problem: str = ""


class Callers:
    """Callers of one running server."""

    def __init__(self, peer: Peer, process: Running) -> None:
        self._peer, self._process = peer, process
        self._http = httpx.Client(base_url=process.url, timeout=300, limits=httpx.Limits(max_connections=2 * MOST))
        self._threads = ThreadPoolExecutor(MOST)

    def generated(self, ids: list[int], most: int = NEW) -> tuple[float, str]:
        """Return the seconds until the first token came, and the answer's text or tokens."""
        path, body = self._peer.generate(ids, most)
        began = time.perf_counter()
        if not self._peer.streams:
            return 0.0, words(self._sent(path, body).json()["ids"])
        first, parts = 0.0, []
        with self._http.stream("POST", path, json=body) as answer:
            for line in answer.raise_for_status().iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    parts.append(_token_text(json.loads(line.removeprefix("data: "))))
        return first, " ".join("".join(parts).split())

    def weights(self, ids: list[int]) -> None:
        """Ask for the weights of every head of a text."""
        if self._peer.weights is not None:
            self._sent(*self._peer.weights(ids))

    def _sent(self, path: str, body: Body) -> httpx.Response:
        return self._http.post(path, json=body).raise_for_status()

    def together(self, ask: Any, texts: Sequence[list[int]]) -> tuple[float, float, list[Any]]:
        """Send a request for each text at once; the seconds, those of the processor, and the answers."""
        before, began = self._process.processor_seconds(), time.perf_counter()
        answers = list(self._threads.map(ask, texts))
        return time.perf_counter() - began, self._process.processor_seconds() - before, answers


def _token_text(chunk: dict[str, Any]) -> str:
    if "id" in chunk and isinstance(chunk["id"], int):
        return f"w{chunk['id']} "
    return "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))


def measure(peer: Peer, process: Running, found: Found, expected: str, probe: list[int]) -> None:
    """Measure a server that was started. Raises ServerError for wrong tokens."""
    callers = Callers(peer, process)
    answer = callers.generated(probe, 8)[1]
    found.start_s.append(process.processor_seconds())
    if answer.split() != expected.split():
        raise ServerError(f"answers {answer!r}, and not {expected!r}")
    for count in CALLERS:
        for number in range(REPEATS + 1):  # the first warms up
            seconds, used, answers = callers.together(callers.generated, texts_of(number, (10, 60), count))
            if number:
                found.rates[count].append(count * NEW / seconds)
                found.token_ms[count].append(1e3 * used / (count * NEW))
                if count == MOST and peer.streams:
                    found.first_s += [first for first, _ in answers]
        if peer.weights is not None:
            callers.together(callers.weights, texts_of(0, SHORT, count))
            rounds = [callers.together(callers.weights, texts_of(each, SHORT, count)) for each in range(8 * REPEATS)]
            found.weights_ms[count].append(1e3 * sum(used for _, used, _ in rounds) / (count * len(rounds)))
    found.bytes.append(sum(each.memory_full_info().pss for each in process.family()))


def compare(chosen: Sequence[Peer], folder: Path, rounds: int, threads: int) -> dict[str, Found]:
    """Start each server in turn, another one first in each round, and measure it."""
    probe = list(range(300, 320))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(torch.tensor([probe]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = words(made[0, len(probe) :].tolist())
    del model
    results = {peer.name: Found() for peer in chosen}
    for number in range(rounds):
        for peer in (*chosen[number % len(chosen) :], *chosen[: number % len(chosen)]):
            found, port = results[peer.name], free_port()
            if found.problem:
                continue
            environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | dict(peer.environment)
            log = folder.parent.parent / f"{peer.name.replace(' ', '-')}.log"
            try:
                command = peer.command(Start(folder, port, threads))
                with running(command, port, peer.ready, cores_for(2)[0], environment, log, START_S) as process:
                    measure(peer, process, found, expected, probe)
            except (ServerError, OSError, HTTPException, httpx.HTTPError, CalledProcessError) as fault:
                found.problem = str(fault)[:300] or type(fault).__name__
    return results


def lines(chosen: Sequence[Peer], folder: Path, rounds: int, threads: int) -> Iterator[str]:
    """The tables, once all is measured."""
    results = compare(chosen, folder, rounds, threads)
    rates = [f"tokens/s of {count}" for count in CALLERS]
    heads = ["server", *rates, f"cpu ms a token of {MOST}", "first token, s", "weights, cpu ms of 1", f"of {MOST}"]
    rows = []
    for peer in chosen:
        found = results[peer.name]
        cells = [_median(found.rates[count]) for count in CALLERS] + [_median(found.token_ms[MOST])]
        late = f"{quantiles(found.first_s, n=100)[98]:.2f}" if len(found.first_s) > 1 else "–"
        weights = [_median(found.weights_ms[count]) for count in (1, MOST)]
        start = [_median(found.start_s), _median([each / 2**20 for each in found.bytes])]
        if found.rates:
            rows.append([peer.name, *cells, late, *weights, *start])
    yield table([*heads, "start, cpu s", "memory, MiB"], rows)
    yield ""
    yield table(["server", *COLUMNS], [[peer.name, *peer.returns.split()] for peer in chosen], left=7)
    for name, found in results.items():
        if found.problem:
            yield f"\n{name} could not be measured to the end: {found.problem}"


def _median(values: Sequence[float]) -> str:
    return short(median(values)) if values else "–"


def save_model(folder: Path) -> None:
    """Save the model, and a tokenizer whose tokens are the words ``w0``, ``w1``, …."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).eval().save_pretrained(folder)
    vocabulary = {f"w{token}": token for token in range(CONFIG["vocab_size"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 2)
    arguments.add_argument("--threads", type=int, default=1, help="of each server")
    arguments.add_argument("--only", help="a part of a server's name")
    options = arguments.parse_args()
    rounds = options.rounds or 2
    with TemporaryDirectory() as root:
        folder = Path(root) / "models" / "llama"
        save_model(folder)
        chosen = [peer for peer in peers(folder) if (options.only or "") in peer.name]
        text = TEXT.format(threads=options.threads, rounds=rounds)
        found = lines(chosen, folder, rounds, options.threads)
        publish("Whole models, beside other servers", text, found, options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
