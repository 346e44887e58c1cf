"""The wait of a caller beside long requests of another to the same model: of a sentence, and of each token of a text.

``python -m benchmarks.waiting`` prints a row for each kind of long request.
"""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from benchmarks.page import parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import table

MODEL: Final = "tiny"
WORDS: Final = "The cat sat on the mat, and looked at the old dog. "
LONG: Final[dict[str, tuple[int, str, dict[str, Any]]]] = {
    "16 integrated gradients of 256 steps, 100 tokens": (
        16, f"/v1/models/{MODEL}/gradients", {"text": WORDS * 5, "integrated": 256},
    ),
    "8 requests for the sources of an answer": (
        8, f"/v1/models/{MODEL}/context",
        {"text": "\n".join([WORDS] * 12), "split": "sentences", "answer": WORDS * 3,
         "return": ["attention", "gradient", "hidden", "removed", "lookback"]},
    ),
    "4 fits of a lens over 4 texts": (
        4, f"/v1/models/{MODEL}/lenses", {"texts": [WORDS * each for each in (9, 8, 7, 6)], "skip_first": 4},
    ),
    "4 texts of 990 kB to be tokenized": (
        4, "/v1/tokenize", {"model": MODEL, "prompt": (WORDS * 20_000)[:990_000]},
    ),
    "8 requests for the weights of 32 texts of 500 tokens": (
        8, f"/v1/models/{MODEL}/weights", {"text": [WORDS * 31] * 32, "return_weights": False},
    ),
    "8 sweeps over all heads and keys": (
        8, f"/v1/models/{MODEL}/effects",
        {"text": WORDS * 5, "sweep": {"tap": "weights", "over": ["layers", "heads", "keys"], "set": 0}},
    ),
}  # fmt: skip
TOKENS: Final = 8
SECONDS: Final = 8.0
START_S: Final = 1.5
"""Seconds in which the process of key ``a`` has begun to send."""
SPAWN: Final = multiprocessing.get_context("spawn")
TEXT: Final = f"""The shipped model on all cores. Key `a` sends the long requests at once; meanwhile key `b` asks a
sentence
(`forward`, 7 tokens) and has {TOKENS} tokens generated, again and again, for at most {SECONDS:g} s. Each figure is the
longest of all, in milliseconds; the first row is without requests of `a`."""


def waits(b: httpx.Client, until: Callable[[], bool]) -> tuple[float, float]:
    """The longest times of a sentence and of a token, in milliseconds, of rounds until then."""
    sentence = token = 0.0
    while True:
        began = time.perf_counter()
        asked = {"text": "The cat sat on the mat.", "top_k": 1}
        b.post(f"/v1/models/{MODEL}/forward", json=asked).raise_for_status()
        sentence = max(sentence, time.perf_counter() - began)
        began = time.perf_counter()
        body = {"model": MODEL, "prompt": "The cat", "max_tokens": TOKENS, "stream": True}
        with b.stream("POST", "/v1/completions", json=body) as events:
            events.raise_for_status()
            for line in events.iter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    token, began = max(token, now - began), now
        if until():
            return sentence * 1e3, token * 1e3


def rows(url: str, keys: dict[str, str], seconds: float) -> Iterator[list[str]]:
    """The row of each kind of long request."""
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    with httpx.Client(base_url=url, headers=headers["b"], timeout=300) as b:
        waits(b, lambda: True)
        alone = time.monotonic() + 1
        yield ["nothing", *(f"{each:.0f}" for each in waits(b, lambda: time.monotonic() > alone)), ""]
        for name, (count, path, body) in LONG.items():
            bodies = [body | _apart(path, body, number) for number in range(count)]
            statuses: Queue[int] = SPAWN.Queue()
            sender = SPAWN.Process(target=_send, args=(url + path, headers["a"], bodies, statuses), daemon=True)
            sender.start()
            time.sleep(START_S)
            end = time.monotonic() + seconds
            found = waits(b, lambda: time.monotonic() > end or not sender.is_alive())  # noqa: B023
            ended = [statuses.get() for _ in range(statuses.qsize())]
            sender.kill()
            sender.join()
            yield [name, *(f"{each:.0f}" for each in found), f"{len(ended)} of {count} {sorted({*ended})}"]


def _send(url: str, headers: dict[str, str], bodies: list[dict[str, Any]], statuses: "Queue[int]") -> None:
    """Send all requests at once, in a process of its own."""

    def send(body: dict[str, Any]) -> None:
        statuses.put(httpx.post(url, json=body, headers=headers, timeout=300).status_code)

    with ThreadPoolExecutor(len(bodies)) as pool:
        [*pool.map(send, bodies)]


def _apart(path: str, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Fields that make each fit another one; equal fits would be one."""
    return {"texts": [f"{number} {each}" for each in body["texts"]]} if path.endswith("lenses") else {}


def lines(*, quick: bool) -> Iterator[str]:
    """The table."""
    with TemporaryDirectory() as made:
        models, port = Path(made) / "models", free_port()
        attention = str(Path(sys.executable).with_name("attention"))
        keys = {name: _key(attention, models, name) for name in "ab"}
        command = [attention, "serve", "--models-dir", str(models), "--port", str(port), "--require-keys", "true"]
        with running(command, port, "/health/live", cores_for(2)[0], {}, Path(made) / "log") as server:
            found = rows(server.url, keys, 2 if quick else SECONDS)
            yield table(["beside", "sentence, ms", "token, ms", "ended meanwhile"], [*found])


def _key(attention: str, models: Path, name: str) -> str:
    """Make a key that may do all but manage."""
    command = [attention, "keys", "create", name, "--models-dir", str(models)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return made.stdout.split()[-1]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, 1).parse_args()
    publish("A caller beside another's long requests", TEXT, lines(quick=options.quick), options.output)


if __name__ == "__main__":
    main()
