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
        self.of_states = [(number, probe) for number, probe in enumerate(probes) if isinstance(probe, WatchedProbe)]
        """The probes of states, with their numbers."""
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


class _Entry(NamedTuple):
    """A probe of a text that shares a pass."""

    row: int
    watch: TextWatch
    number: int
    """The number of the probe among those of its text."""
    probe: WatchedProbe


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
            for number, probe in watch.of_states:
                entries.setdefault(probe.point, []).append(_Entry(row, watch, number, probe))
    if not entries:
        yield
        return
    scored: list[tuple[list[_Entry], list[float]]] = []

    def reader(own: list[_Entry]) -> Any:
        def read(state: Tensor) -> None:
            scored.append((own, _scores(state, own, ends)))
            for row, watch, _, probe in own if prompt else ():
                if probe.prompt:
                    watch.prompt[probe.id] += probe.scores(state[row].flatten(1)).tolist()

        return read

    with points.changing([(point, reader(own)) for point, own in entries.items()]):
        yield
    for own, scores in scored:
        for (_, watch, number, probe), score in zip(own, scores, strict=True):
            watch.last[number] = score + probe.bias


def _scores(state: Tensor, entries: Sequence[_Entry], ends: Sequence[int] | None) -> list[float]:
    """The scores of probes without their bias: one product of the rows ``[R, d]`` and all probes that differ."""
    rows, first = [entry.row for entry in entries], entries[0].probe
    if ends is None:
        last = state[:, -1] if rows == [*range(len(state))] else state[rows, -1]
    else:
        last = state[rows, [ends[row] for row in rows]]
    x = last.flatten(1).double()
    probes = {entry.probe.id: entry.probe for entry in entries}
    for probe in probes.values():
        check_width(probe, x.shape[1])
    if len(probes) == 1:
        alike: list[float] = (x @ first.weights).tolist()
        return alike
    products = (x @ torch.stack([probe.weights for probe in probes.values()], 1)).tolist()
    place = {name: at for at, name in enumerate(probes)}
    return [row[place[entry.probe.id]] for row, entry in zip(products, entries, strict=True)]
