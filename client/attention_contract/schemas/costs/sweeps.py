"""The sizes along which costs are computed: one varies, the others are fixed."""

from typing import Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.modules import MAX_HEADS, MAX_WIDTH

Dimension = Literal[
    "length", "batch", "queries", "keys", "past", "num_heads", "num_kv_heads", "head_dim", "value_dim", "d_model"
]
_WIDTHS: Final = ("head_dim", "value_dim", "d_model")
MAX_SWEEP: Final = 256
"""Sizes of one sweep."""


class Sweep(WireModel):
    """One varied size; the others are fixed."""

    dimension: Dimension = "length"
    """``length`` varies queries and keys together. Widths and heads of a module are varied as if its config had others:
    ``num_kv_heads`` follows ``num_heads`` where they are equal, and ``value_dim`` ``head_dim``; with ``d_model`` go the
    widths of keys and values that equal it, and ``head_dim`` is ``d_model / num_heads`` where the heads make it up. Raw
    attention has no ``d_model``."""
    values: Listed[Index] = Field(min_length=2, max_length=MAX_SWEEP)

    @model_validator(mode="after")
    def _is_possible(self) -> "Sweep":
        most = {"num_heads": MAX_HEADS, "num_kv_heads": MAX_HEADS} | dict.fromkeys(_WIDTHS, MAX_WIDTH)
        if max(self.values) > (limit := most.get(self.dimension, max(self.values))):
            raise at_fault("values", f"expected {self.dimension} of at most {limit}, got {max(self.values)}")
        return self
