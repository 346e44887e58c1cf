"""The keys of attentions that stand for several tokens, or that are those of a window."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn


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


@dataclass(frozen=True, eq=False)
class LayerWindows:
    """The windows of the grid of a layer's tokens, within which it attends."""

    order: Tensor
    """``[W, T]`` on the host: the token that each entry of a window is, counted row by row; -1 for padding."""
    merged: int
    """The patches along a side of the square that is one token."""

    @property
    def pairs(self) -> int:
        """The pairs of queries and keys of one image."""
        return int(self.order.shape[0] * self.order.shape[1] ** 2)
