"""The scores of tokens by probes, in the passes that make their states or weights; rows of other texts stay."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_contract.schemas.openai import AttentionOfTokens
from attention_service.models.generation.decoding.token_attention import TokenAttention
from attention_service.models.loaded.streams.watched_probes import Watched, WatchedHeads, WatchedProbe, check_width
from attention_service.models.passes.points import Point, Points


class TextWatch:
    """The probes that watch one text, with the scores of its tokens."""

    def __init__(self, probes: Sequence[Watched], tokens: int = 0) -> None:
        """``tokens``: those of the prompt."""
        self.probes, self._tokens = probes, tokens
        self.looks = [
            (number, TokenAttention(_statistics(probe), probe.places, tokens))
            for number, probe in enumerate(probes) if isinstance(probe, WatchedHeads)
        ]  # fmt: skip
        """The reports that probes of heads read, with the numbers of these probes."""
        self.at_points = _at_points(probes)
        """The probes of states by their point."""
        self.last = [0.0] * len(probes)
        """The scores of the last token that was read."""
        self.prompt: dict[str, list[float]] = {probe.id: [] for probe in probes if probe.prompt}
        """The scores of the tokens of the prompt, if they are asked."""

    def fork(self) -> "TextWatch":
        """Return the watch of another choice of the same prompt, which has been read."""
        other = TextWatch(self.probes, self._tokens)
        other.last = [*self.last]
        other.prompt = {probe: [*scores] for probe, scores in self.prompt.items()}
        return other

    def take(self, reports: Mapping[TokenAttention, Sequence[Mapping[str, Any]]]) -> None:
        """Score the last token by what a pass told of its attention."""
        for number, look in self.looks:
            probe = self.probes[number]
            if isinstance(probe, WatchedHeads):
                self.last[number] = probe.score(reports[look])

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


def _statistics(probe: WatchedHeads) -> AttentionOfTokens:
    """The request to tell of the statistics that a probe reads."""
    return AttentionOfTokens(statistics=probe.of.statistics, heads=probe.of.heads)


class _PointProbes:
    """The probes of a text at one point."""

    def __init__(self, numbered: Sequence[tuple[int, WatchedProbe]]) -> None:
        """``numbered``: with their numbers among all probes of the text."""
        self.numbers = [number for number, _ in numbered]
        self.probes = [probe for _, probe in numbered]
        self.ids = tuple(probe.id for probe in self.probes)
        self.biases = [probe.bias for probe in self.probes]
        self._weights: Tensor | None = None

    def weights(self, width: int) -> Tensor:
        """Their weights ``[P, d]``. Raises InvalidRequest if the states have another width."""
        if self._weights is None:
            for probe in self.probes:
                check_width(probe, width)
            self._weights = torch.stack([probe.weights for probe in self.probes])
        return self._weights


def _at_points(probes: Sequence[Watched]) -> dict[Point, _PointProbes]:
    by_point: dict[Point, list[tuple[int, WatchedProbe]]] = {}
    for number, probe in enumerate(probes):
        if isinstance(probe, WatchedProbe):
            by_point.setdefault(probe.point, []).append((number, probe))
    return {point: _PointProbes(numbered) for point, numbered in by_point.items()}


class _Entry(NamedTuple):
    """The probes of a text that shares a pass."""

    row: int
    watch: TextWatch
    own: _PointProbes


@contextmanager
def scoring(
    watches: Sequence[TextWatch | None], points: Points, ends: Sequence[int] | None = None, *, prompt: bool = False
) -> Iterator[None]:
    """Score the last token of each text of the pass that runs in the block.

    ``ends``: the place of this token in each row; None for the last. ``prompt``: the pass is over a part of a prompt.
    """
    entries: dict[Point, list[_Entry]] = {}
    for row, watch in enumerate(watches):
        if watch is not None:
            for point, own in watch.at_points.items():
                entries.setdefault(point, []).append(_Entry(row, watch, own))
    if not entries:
        yield
        return
    scored: list[tuple[list[_Entry], list[list[float]]]] = []

    def reader(at_point: list[_Entry]) -> Any:
        def read(state: Tensor) -> None:
            scored.append((at_point, _scores(state, at_point, ends)))
            for row, watch, own in at_point if prompt else ():
                for probe in own.probes:
                    if probe.prompt:
                        watch.prompt[probe.id] += probe.scores(state[row].flatten(1)).tolist()

        return read

    with points.changing([(point, reader(at_point)) for point, at_point in entries.items()]):
        yield
    for at_point, scores in scored:
        for (_, watch, own), row_scores in zip(at_point, scores, strict=True):
            for number, score, bias in zip(own.numbers, row_scores, own.biases, strict=True):
                watch.last[number] = score + bias


def _scores(state: Tensor, entries: Sequence[_Entry], ends: Sequence[int] | None) -> list[list[float]]:
    """The scores of the probes of each text, without biases: one product of rows ``[R, d]`` and probes that differ."""
    rows = [entry.row for entry in entries]
    if ends is None:
        last = state[:, -1] if rows == [*range(len(state))] else state[rows, -1]
    else:
        last = state[rows, [ends[row] for row in rows]]
    x = last.flatten(1).double()
    unlike = {own.ids: own for _, _, own in entries}
    places, count = dict[tuple[str, ...], slice](), 0
    for ids in unlike:
        places[ids] = slice(count, count := count + len(ids))
    first, *others = [own.weights(x.shape[1]) for own in unlike.values()]
    products = (x @ (torch.cat([first, *others]) if others else first).mT).tolist()
    return [row[places[own.ids]] for row, (_, _, own) in zip(products, entries, strict=True)]
