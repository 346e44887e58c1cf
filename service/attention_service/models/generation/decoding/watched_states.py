"""The scores of tokens by probes, in the passes that make their states; rows of other texts are not touched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attention_service.models.loaded.streams.watched_probes import WatchedProbe, check_width
from attention_service.models.passes.points import Point, Points


class TextWatch:
    """The probes that watch one text, with the scores of its tokens."""

    def __init__(self, probes: Sequence[WatchedProbe]) -> None:
        self.probes = probes
        self.last = [0.0] * len(probes)
        """The scores of the last token that was read."""
        self.prompt: dict[str, list[float]] = {probe.id: [] for probe in probes if probe.prompt}
        """The scores of the tokens of the prompt, if they are asked."""

    def fork(self) -> "TextWatch":
        """Return the watch of another choice of the same prompt, which has been read."""
        other = TextWatch(self.probes)
        other.last = [*self.last]
        other.prompt = {probe: [*scores] for probe, scores in self.prompt.items()}
        return other

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the last token by probe."""
        return {probe.id: score for probe, score in zip(self.probes, self.last, strict=True)}

    def stopped(self, generated: int) -> dict[str, Any] | None:
        """The reason to end a text of so many generated tokens: the fields of ``StopReason``; None to go on."""
        for probe, score in zip(self.probes, self.last, strict=True):
            stop = probe.stop
            if stop is not None and generated > stop.after and score > stop.above:
                return {"probe": probe.id, "score": score, "token": generated - 1}
        return None


Entry = tuple[int, TextWatch, int]
"""A row of a pass, its watch, and the number of one of its probes."""


@contextmanager
def scoring(
    watches: Sequence[TextWatch | None], points: Points, ends: Sequence[int] | None = None, *, prompt: bool = False
) -> Iterator[None]:
    """Score the last token of each text of the pass that runs in the block.

    ``ends``: the place of this token in each row; None for the last. ``prompt``: the pass is over a part of a prompt.
    """
    entries: dict[Point, list[Entry]] = {}
    for row, watch in enumerate(watches):
        if watch is not None:
            for number, probe in enumerate(watch.probes):
                entries.setdefault(probe.point, []).append((row, watch, number))
    if not entries:
        yield
        return
    scored: list[tuple[list[Entry], Tensor]] = []

    def reader(own: list[Entry]) -> Any:
        def read(state: Tensor) -> None:
            rows = [row for row, _, _ in own]
            at = [-1] * len(rows) if ends is None else [ends[row] for row in rows]
            probes = [watch.probes[number] for _, watch, number in own]
            x = state[rows, at].flatten(1).double()  # [R, d]
            for probe in probes:
                check_width(probe, x.shape[1])
            first = probes[0].weights
            same = all(probe.weights is first for probe in probes)
            weights = first if same else torch.stack([probe.weights for probe in probes])
            scored.append((own, (x * weights).sum(-1)))
            for row, watch, number in own if prompt else ():
                if (probe := watch.probes[number]).prompt:
                    watch.prompt[probe.id] += probe.scores(state[row].flatten(1)).tolist()

        return read

    with points.changing([(point, reader(own)) for point, own in entries.items()]):
        yield
    for own, scores in scored:
        for (_, watch, number), score in zip(own, scores.tolist(), strict=True):
            watch.last[number] = score + watch.probes[number].bias
