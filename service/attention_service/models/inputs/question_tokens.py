"""The global tokens of texts that Longformers with heads for questions read, as transformers chooses them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from torch import Tensor, arange
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_service.models.folders.head_kinds import head_kind

_SEPARATORS: Final = 3
"""Separators of a question and a text: two between them, and one behind them."""


@dataclass(frozen=True)
class QuestionTokens:
    """The rule by which a model chooses the global tokens of a question and a text.

    Other heads need none: the first token is global for a class of the text, and none is for the others.
    Source: ``transformers.models.longformer``, ``_compute_global_attention_mask``.
    """

    separator: int
    behind: bool
    """True if the tokens behind the separators are global, in place of those of the question before them."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Return the rule of a model; None if it has none, or chooses without reading the tokens."""
        kind, config = head_kind(type(model).__name__), model.config
        if config.model_type != "longformer" or kind is None or kind.unit not in {"span", "choice"}:
            return None
        return cls(int(config.sep_token_id), kind.unit == "choice")

    def check(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest for tokens that are no question and text."""
        if (count := ids.count(self.separator)) != _SEPARATORS:
            raise InvalidRequest.at(
                param,
                f"expected a question and a text with {_SEPARATORS} separators (token {self.separator}), by which this "
                f"model chooses the tokens that all others look at; got {count}. Send text and text_pair",
                expected=_SEPARATORS,
                actual=count,
            )

    def mask(self, ids: Tensor) -> Tensor:
        """Return 1 for each global token of ``ids`` ``[B, L]``, else 0; without separators the first token's."""
        place = arange(ids.shape[1], device=ids.device)
        first = (ids == self.separator).int().argmax(1, keepdim=True)
        return ((place > first + 1) if self.behind else (place < first.clamp_min(1))).long()
