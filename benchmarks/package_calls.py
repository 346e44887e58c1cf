"""Weights and surveys of a small model over HTTP, beside the calls of transformers that a package makes itself.

``python -m benchmarks.package_calls`` prints the table; ``--output FILE`` writes it.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AlbertConfig, AutoModelForMaskedLM, PreTrainedModel

from attention_client import Client
from attention_contract.schemas.weights import StatisticName
from benchmarks.generation import letters
from benchmarks.page import IN_TURN, fewer, parser, publish
from benchmarks.processes import cores_for, free_port, running
from benchmarks.tables import short, table

ROUNDS: Final = 15
TOKENS: Final = 80
SURVEYED: Final = 64
LAYER, HEAD = 10, 5
STATISTICS: Final[Sequence[StatisticName]] = ("entropy", "max_weight", "mean_distance", "first_key", "own_position")
CONFIG: Final[dict[str, Any]] = {
    "vocab_size": 591, "embedding_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_hidden_groups": 1, "inner_group_num": 1, "max_position_embeddings": 512,
    "hidden_act": "gelu",
}  # fmt: skip
TEXT: Final = f"""An ALBERT of 12 layers of 8 heads and 256 features, the shape of a package that maps the atoms of
chemical reactions, with random parameters, float32, tokens in. A text has {TOKENS} tokens, and those of a survey 40 to
120. The package's way is a pass of `output_attentions=True` with eager attention in one process, whose weights become
numpy arrays; for a survey it is a pass over as many padded texts as a request has, and the statistics of each text in
numpy. Both have one thread. Milliseconds are those of the processor: of the server and the model's process together,
without the client, and of the package's process.

{IN_TURN}
"""
Ids = list[int]


def texts_of(seed: int, lengths: Sequence[int]) -> list[Ids]:
    """Random texts, the same at each call."""
    chance = random.Random(seed)  # noqa: S311
    return [[chance.randrange(5, CONFIG["vocab_size"]) for _ in range(length)] for length in lengths]


class Package:
    """The model as a package calls it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def weights(self, texts: Sequence[Ids]) -> NDArray[np.float32]:
        """All weights ``[12, texts, 8, L, L]`` of texts that are filled up at the end."""
        longest = max(map(len, texts))
        ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts])
        found = self._model(ids, attention_mask=mask, output_attentions=True).attentions
        return np.stack([weights.numpy() for weights in found])

    def survey(self, texts: Sequence[Ids], batch: int) -> dict[str, NDArray[np.float64]]:
        """Five statistics ``[texts, 12, 8]`` of every head."""
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        rows: dict[int, list[NDArray[np.float64]]] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            weights = self.weights([texts[at] for at in chosen])
            for row, at in enumerate(chosen):
                size = len(texts[at])
                rows[at] = statistics_of(weights[:, row, :, :size, :size])
        stacked = [np.stack([rows[at][number] for at in range(len(texts))]) for number in range(len(STATISTICS))]
        return dict(zip(STATISTICS, stacked, strict=True))


def statistics_of(weights: NDArray[np.float32]) -> list[NDArray[np.float64]]:
    """The means of ``STATISTICS`` of one text ``[12, 8]``, of weights ``[12, 8, L, L]``."""
    places = np.arange(weights.shape[-1])
    distances = np.abs(places[:, None] - places).astype(weights.dtype)
    logs = np.log(np.maximum(weights, np.finfo(weights.dtype).tiny))
    rows = [
        -np.einsum("lhqk,lhqk->lhq", weights, logs),
        weights.max(-1),
        np.einsum("lhqk,qk->lhq", weights, distances),
        weights[..., 0],
        weights[..., places, places],
    ]
    return [each.mean(-1, dtype=np.float64) for each in rows]


Measured = tuple[str, int, Callable[[int], object], Callable[[int], object]]
"""A question, how often it is asked in a round, the request, and the package's call. Both take a number of texts."""


def cases(client: Client, package: Package) -> Iterator[Measured]:
    """Questions over HTTP, beside the package's own calls."""

    def texts(count: int, number: int) -> list[Ids]:
        return texts_of(number, [TOKENS] * count)

    def ask(count: int, number: int, **more: Any) -> object:
        return client.models.weights("albert", tokens=texts(count, number), statistics=[], **more)

    def one_head(number: int) -> object:
        return ask(1, number, layers=[LAYER], select={"heads": [HEAD]})

    yield "one text, one head's weights", 20, one_head, lambda number: package.weights(texts(1, number))[LAYER][:, HEAD]
    yield "one text, all weights", 20, partial(ask, 1), lambda number: package.weights(texts(1, number))
    yield "16 texts, all weights", 2, partial(ask, 16), lambda number: package.weights(texts(16, number))
    chance = random.Random(0)  # noqa: S311
    lengths = [chance.randint(40, 120) for _ in range(SURVEYED)]

    def surveyed(number: int) -> object:
        rows = sorted(texts_of(number, lengths), key=len)
        parts = [rows[at : at + 16] for at in range(0, SURVEYED, 16)]
        return [
            client.models.weights("albert", tokens=part, statistics=STATISTICS, return_weights=False) for part in parts
        ]

    name = f"survey of {len(STATISTICS)} statistics, {SURVEYED} texts"
    yield name, 1, surveyed, lambda number: package.survey(texts_of(number, lengths), 16)


def rows(rounds: int, folder: Path) -> Iterator[str]:
    """The table, line by line."""
    yield table(["asked", "of the package's", "ms", "package, ms"], [])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made: Any = AutoModelForMaskedLM
    model = made.from_config(AlbertConfig(**CONFIG), attn_implementation="eager").eval()
    model.save_pretrained(folder / "models" / "albert")
    letters().save_pretrained(folder / "models" / "albert")
    command = [str(Path(sys.executable).with_name("attention")), "serve", "--models-dir", str(folder / "models")]
    port = free_port()
    # A spare process would import for seconds beside the first requests.
    one = {"ATTENTION_THREADS": "1", "OMP_NUM_THREADS": "1", "ATTENTION_SPARE_MODEL_PROCESS": "false"}
    with (
        running([*command, "--port", str(port)], port, "/health/ready", cores_for(2)[0], one, folder / "log") as server,
        Client(server.url, timeout=600) as client,
    ):
        client.models.weights("albert", tokens=[5, 6, 7])
        for name, repeats, ask, call in cases(client, Package(model)):
            found: list[tuple[float, float]] = []
            for number in range(rounds + 1):  # the first warms up
                before = server.processor_seconds()
                for again in range(repeats):
                    ask(number * repeats + again)
                ours, before = server.processor_seconds() - before, time.process_time()
                for again in range(repeats):
                    call(number * repeats + again)
                found += [(ours / repeats, (time.process_time() - before) / repeats)] if number else []
            yield _row(name, found)


def _row(name: str, found: Sequence[tuple[float, float]]) -> str:
    ratios = [ours / theirs for ours, theirs in found]
    tenths = quantiles(ratios, n=10, method="inclusive")
    ours, theirs = (short(1e3 * median(each)) for each in zip(*found, strict=True))
    return f"| {name} | {median(ratios):.2f} ({tenths[0]:.2f}–{tenths[-1]:.2f}) | {ours} | {theirs} |"


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, ROUNDS).parse_args()
    count = options.rounds or (fewer(ROUNDS) if options.quick else ROUNDS)
    with TemporaryDirectory() as folder:
        publish("A package's own calls", TEXT, rows(count, Path(folder)), options.output, ("torch", "transformers"))


if __name__ == "__main__":
    main()
