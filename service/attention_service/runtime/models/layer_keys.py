"""The keys of attentions that have others than the tokens of one text: compressed ones, or those of two texts."""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from attention_service.runtime.models.model_inputs import Span, Stack


@dataclass(frozen=True)
class Compression:
    """Keys behind those of the tokens, each of which stands for several tokens.

    Source: ``transformers.models.deepseek_v4``, compressed sparse and heavily compressed attention.
    """

    rate: int
    """The tokens between one such key and the next."""
    overlaps: bool
    """True if a key stands for as many tokens before its own too."""

    @classmethod
    def of(cls, attention: nn.Module) -> Self | None:
        """Return that of an attention module; None for one that compresses nothing."""
        compressor: Any = getattr(attention, "compressor", None)
        rate = getattr(compressor, "compress_rate", None)
        if not isinstance(rate, int):
            return None
        return cls(rate, int(compressor.kv_proj.out_features) > int(compressor.head_dim))

    def count(self, tokens: int) -> int:
        """The keys that so many tokens give: a span that is not full gives none."""
        return tokens // self.rate

    def spans(self, tokens: int) -> tuple[range, ...]:
        """The tokens that each key stands for."""
        begins = range(0, self.count(tokens) * self.rate, self.rate)
        return tuple(range(max(0, at - self.rate * self.overlaps), at + self.rate) for at in begins)

    def extended(self, stack: Stack) -> Stack:
        """Return the tokens, and behind them the keys that stand for several."""
        spans = self.spans(stack.length)
        if not spans:
            return stack
        own = stack.ids.new_full((len(stack.ids), len(spans)), -1)
        mask = stack.mask
        if mask is not None:
            real = torch.stack([mask[:, each.start : each.stop].any(1) for each in spans], 1)
            mask = torch.cat([mask, real], 1)
        return replace(
            stack,
            ids=torch.cat([stack.ids, own], 1),
            mask=mask,
            spans=[[*row, *(_covered(row, each) for each in spans)] for row in stack.spans],
            patches=None if stack.patches is None else [[*row, *[None] * len(spans)] for row in stack.patches],
            compressed=spans,
        )


def _covered(row: list[Span], tokens: range) -> Span:
    """The characters of several tokens, from the first to the last."""
    known = [span for span in row[tokens.start : tokens.stop] if span is not None]
    return (known[0][0], known[-1][1]) if known else None


def joined(decoder: Stack, encoder: Stack) -> Stack:
    """Return the tokens of the decoder, and behind them those of the encoder."""
    mask = None
    if decoder.mask is not None or encoder.mask is not None:
        mask = torch.cat([_mask(decoder), _mask(encoder)], 1)
    names = None
    if decoder.names is not None and encoder.names is not None:
        names = [[*own, *read] for own, read in zip(decoder.names, encoder.names, strict=True)]
    return Stack(
        torch.cat([decoder.ids, encoder.ids], 1),
        mask,
        [[*own, *read] for own, read in zip(decoder.spans, encoder.spans, strict=True)],
        names,
        foreign=encoder.length,
    )


def _mask(stack: Stack) -> Tensor:
    return torch.ones_like(stack.ids, dtype=torch.bool) if stack.mask is None else stack.mask
