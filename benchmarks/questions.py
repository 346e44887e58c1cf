"""Processor seconds of the questions to a whole model, on a quiet machine and beside programs that burn its cores.

``python -m benchmarks.questions --lengths 1000,2000,4000`` prints the table; ``--output FILE`` writes it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, get_args

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from attention_client import Client
from attention_contract.schemas.weights import NEEDS_NEEDLE, NEEDS_PAIRS, OF_SOME_ATTENTIONS, StatisticName
from benchmarks.page import parser, publish
from benchmarks.processes import Running, cores_for, free_port, running, surroundings
from benchmarks.tables import short, table

LENGTHS, QUICK = (1000, 2000, 4000), (256,)
CONFIG: Final = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
STATISTICS: Final = tuple(
    name
    for name in get_args(StatisticName)
    if name not in {"classes", *OF_SOME_ATTENTIONS, *NEEDS_NEEDLE, *NEEDS_PAIRS}
)
EAGER: Final = "eager, weights"
TEXT = """A Llama of 4 layers, 8 heads and 256 features with random parameters, float32, tokens in. `s` are the
processor seconds (user and system) of the server and of the model's process together, and `wall` the seconds that the
client waited. `eager, weights` is `model(…, output_attentions=True)` with transformers' eager attention, in a process
of its own that keeps the weights. Every process has its default settings. The questions take turns; each number is a
median. The `busy` rounds run beside one program for each core that computes all the time."""


@dataclass(frozen=True)
class Measured:
    """One question, and the processes that answer it."""

    name: str
    ask: Callable[[], object]
    seconds: Callable[[], float]
    """Processor seconds of those processes until now."""
    found: dict[bool, list[tuple[float, float]]] = field(default_factory=lambda: {False: [], True: []})
    """Processor seconds and wall seconds of each round, quiet and busy."""

    def measure(self, *, busy: bool) -> None:
        """Ask once."""
        before, started = self.seconds(), time.perf_counter()
        self.ask()
        wall = time.perf_counter() - started
        self.found[busy].append((self.seconds() - before, wall))

    def median(self, *, busy: bool) -> tuple[float, float]:
        """The medians of processor and wall seconds."""
        used, waited = zip(*self.found[busy], strict=True)
        return median(used), median(waited)


def rows(lengths: Sequence[int], rounds: int, folder: Path) -> Iterator[str]:
    """The table: each question at each length, line by line."""
    yield table(["question", "s", "wall", "of weights", "of eager", "busy s", "wall", "of quiet"], [])
    model(folder / "models" / "llama")
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(folder / "models")]
    port = free_port()
    with (
        running([*command, "--port", str(port)], port, "/health/ready", cores_for(2)[0], {}, folder / "log") as server,
        Client(f"http://127.0.0.1:{port}", timeout=600) as client,
        _eager(folder / "models" / "llama") as eager,
        burning() as busy,
    ):
        client.models.weights("llama", tokens=[1, 2, 3])
        for length in lengths:
            ids = torch.randint(CONFIG["vocab_size"], (length,), generator=torch.Generator().manual_seed(0)).tolist()
            every = questions(client, server, ids)
            every.append(Measured(EAGER, partial(eager.ask, ids), eager.seconds))
            for one in every:
                one.ask()
            for _ in range(rounds):
                for state in (False, True):
                    with busy(state):
                        for one in every:
                            one.measure(busy=state)
            yield from _lines(every, length)


def questions(client: Client, server: Running, ids: Sequence[int]) -> list[Measured]:
    """The questions to the server."""
    family = [psutil.Process(each.pid) for each in server.family()]

    def seconds() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in family)

    weights = partial(client.models.weights, "llama", tokens=ids)
    computations: dict[str, Callable[[], object]] = {
        "forward": partial(client.models.forward, "llama", tokens=ids),
        "weights": weights,
        "statistics": partial(weights, return_weights=False),
        "entropy": partial(weights, return_weights=False, statistics=["entropy"]),
        "every statistic": partial(weights, return_weights=False, statistics=STATISTICS),
    }
    return [Measured(name, ask, seconds) for name, ask in computations.items()]


def _lines(every: Sequence[Measured], length: int) -> Iterator[str]:
    by_name = {one.name: one.median(busy=False)[0] for one in every}
    for one in every:
        (quiet, wall), (used, waited) = one.median(busy=False), one.median(busy=True)
        ratios = [f"{quiet / by_name[base]:.2f}" for base in ("weights", EAGER)]
        cells = [f"{one.name}, {length:,} tokens", short(quiet), short(wall), *ratios, short(used), short(waited)]
        yield f"| {' | '.join([*cells, f'{used / quiet:.2f}'])} |"


def model(folder: Path) -> None:
    """Write the model's checkpoint."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    made.save_pretrained(folder)


# ── transformers' own pass ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Eager:
    pool: ProcessPoolExecutor
    process: psutil.Process

    def ask(self, ids: Sequence[int]) -> None:
        self.pool.submit(_run_eager, ids).result()

    def seconds(self) -> float:
        used = self.process.cpu_times()
        return float(used.user + used.system)


@contextmanager
def _eager(folder: Path) -> Iterator[_Eager]:
    """Start a process that runs the model eagerly."""
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(surroundings())  # without settings of threads
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=_load_eager, initargs=(str(folder),)) as pool:
            yield _Eager(pool, psutil.Process(pool.submit(os.getpid).result()))
    finally:
        os.environ.clear()
        os.environ.update(kept)


_LOADED: list[torch.nn.Module] = []
"""The model of the eager process."""


def _load_eager(folder: str) -> None:
    _LOADED.append(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())


@torch.no_grad()
def _run_eager(ids: Sequence[int]) -> None:
    _LOADED[0](torch.tensor([ids]), output_attentions=True, use_cache=False)


# ── a busy machine ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def burning() -> Iterator[Callable[[bool], object]]:
    """Start a program for each core that computes all the time. Yields the context in which they run, if they do."""
    cores = cores_for(2)[0]
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]

    def send(number: signal.Signals) -> None:
        for each in programs:
            each.send_signal(number)

    @contextmanager
    def busy(state: bool) -> Iterator[None]:
        if state:
            send(signal.SIGCONT)
        try:
            yield
        finally:
            send(signal.SIGSTOP)

    send(signal.SIGSTOP)
    try:
        yield busy
    finally:
        send(signal.SIGKILL)
        for each in programs:
            each.wait()


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__, 5)
    arguments.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")], help="tokens")
    options = arguments.parse_args()
    lengths = options.lengths or (QUICK if options.quick else LENGTHS)
    with TemporaryDirectory() as folder:
        lines = rows(lengths, options.rounds or (3 if options.quick else 5), Path(folder))
        publish("Questions to a whole model", TEXT, lines, options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
