"""The tokens of an input: those of a text, a batch padded to one length, and what a model reads."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attention_service.models.inputs.patch_grids import Patch
from attention_service.prompts.conversations import ANSWER

Span = tuple[int, int] | None
Seconds = tuple[float, float] | None
"""The part of a sound that a frame is; None behind its end."""


class Tokens(NamedTuple):
    """The tokens of one text."""

    ids: list[int]
    spans: list[Span]
    """The characters of each token."""
    parts: list[str | None] | None = None
    """The field of the request that each token comes from, if there are several; None for a special token."""
    segments: list[int] | None = None
    """The type of each token, of a text whose tokens have several."""
    answer: list[int] | None = None
    """The tokens of an answer in place of the mask tokens; None of a text without one."""


@dataclass(frozen=True)
class Stack:
    """The tokens of one stack: a batch of texts, padded to the same length."""

    ids: Tensor
    """``[B, L]``"""
    mask: Tensor | None
    """Bool ``[B, L]``, True for a token that is no padding; None if none is."""
    spans: list[list[Span]]
    names: list[list[str]] | None = None
    """The tokens for reading, if their ids do not tell."""
    patches: list[list[Patch | None]] | None = None
    """The patch of an image that each token is."""
    parts: list[list[str | None]] | None = None
    """The field of the request that each token comes from, if there are several."""
    segments: Tensor | None = None
    """``[B, L]``: the type of each token, if there are several."""
    seconds: list[list[Seconds]] | None = None
    """The part of a sound that each token is."""
    compressed: tuple[range, ...] = ()
    """The tokens that each of the last entries stands for, in a layer that has keys of several tokens."""
    foreign: int = 0
    """The last entries that are tokens of another text, in a layer whose keys are those of two texts."""
    answers: list[list[int]] | None = None
    """The tokens of the answers in place of the mask tokens; None of texts without."""

    @cached_property
    def length(self) -> int:
        """L."""
        return self.ids.shape[1]

    def repeated(self, times: int) -> "Stack":
        """The same tokens so many times, one batch behind the other."""
        mask = None if self.mask is None else self.mask.repeat(times, 1)
        parts = None if self.parts is None else self.parts * times
        answers = None if self.answers is None else self.answers * times
        ids, spans = self.ids.repeat(times, 1), self.spans * times
        return replace(self, ids=ids, mask=mask, spans=spans, parts=parts, answers=answers)

    def part(self, texts: slice) -> "Stack":
        """Some of the texts, padded as they are."""
        names = ("ids", "mask", "spans", "names", "patches", "parts", "segments", "seconds", "answers")
        own: dict[str, Any] = {name: value[texts] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **own)

    @cached_property
    def host_ids(self) -> NDArray[np.int64]:
        """The ids on the host."""
        host_ids: NDArray[np.int64] = self.ids.cpu().numpy()
        return host_ids

    @cached_property
    def positions(self) -> NDArray[np.float64] | None:
        """The position of each entry in the text ``[L]``: None for its index, NaN for one of another text.

        One that stands for several tokens is at the middle of them.
        """
        if not (self.compressed or self.foreign):
            return None
        middles = [span_middle(tokens) for tokens in self.compressed]
        behind = [*middles, *[float("nan")] * self.foreign]
        return np.array([*range(self.length - len(behind)), *behind])

    @cached_property
    def ends(self) -> list[int]:
        """Behind the last token of each text that is no padding."""
        if self.mask is None:
            return [self.length] * len(self.ids)
        return [int(row.nonzero()[-1]) + 1 for row in self.mask]

    @cached_property
    def real_tokens(self) -> list[range]:
        """The tokens of each text that are no padding."""
        starts = [0] * len(self.ids) if self.starts is None else self.starts.tolist()
        return [range(start, end) for start, end in zip(starts, self.ends, strict=True)]

    @cached_property
    def starts(self) -> NDArray[np.int64] | None:
        """The first token of each text that is no padding; None if it is token 0 of all."""
        if self.mask is None or bool(self.mask[:, 0].all()):
            return None
        starts: NDArray[np.int64] = self.mask.int().argmax(1).cpu().numpy()
        return starts


@dataclass(frozen=True)
class Inputs:
    """The input of one request."""

    several: bool
    """True if the request has a list of texts, so that its reply has a batch dimension."""
    text: Stack
    target: Stack | None
    """The decoder's tokens, of a model with an encoder and a decoder."""
    arguments: dict[str, Tensor]
    """The arguments of the model's ``forward``."""
    media: Stack | None = None
    """The tokens of the layers that see images or hear sounds, beside those of the text. They have a batch
    dimension."""

    @cached_property
    def predicted(self) -> Stack:
        """The tokens whose predictions the model makes."""
        return self.target or self.text

    @cached_property
    def answers(self) -> list[list[int]]:
        """The indices of the tokens of each text's given answer, or target, but for a first token of all.

        Of answers in place of mask tokens, the indices of these.
        """
        stack = self.predicted
        if self.target is not None:
            return [[*range(1, stack.length)]] * len(stack.ids)
        parts = stack.parts or [[]] * len(stack.ids)
        starts = stack.starts if stack.starts is not None else [0] * len(stack.ids)
        return [
            [at for at, part in enumerate(row) if part == ANSWER and (at > start or stack.answers is not None)]
            for row, start in zip(parts, starts, strict=True)
        ]


class SizedImage(NamedTuple):
    """The tokens of an image of some size."""

    text: int
    """In the text; of an encoder, all of the image."""
    crops: int
    length: int
    """Tokens of a crop, in the layers that see it."""
    windows: tuple[int, ...] = ()
    """Tokens of each window, in layers that attend within windows."""
    decoding: int = 0
    """Bytes that it takes to decode it."""


def span_middle(tokens: range) -> float:
    """The position of a key that stands for several tokens: the middle of them."""
    return (tokens.start + tokens.stop - 1) / 2


def parted_answer(read: Tokens, begin: int) -> Tokens:
    """The tokens of a text and of an answer that begins at this character, with their characters in either."""
    parts: list[str | None] = []
    spans: list[Span] = []
    for span in read.spans:
        in_answer = span is not None and span[1] > begin
        parts.append(None if span is None else ANSWER if in_answer else "text")
        spans.append((max(span[0] - begin, 0), span[1] - begin) if span is not None and in_answer else span)
    return read._replace(spans=spans, parts=parts)
