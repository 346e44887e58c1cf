"""Integrated gradients: the rule of the path from a baseline to the embeddings of an input, and how well it sums up.

Source: Sundararajan et al. 2017. L is the number that is differentiated, B texts of L tokens.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from attention_contract.base import WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.tensors import FloatArray

PathRule = Literal["log_gauss", "gauss", "midpoint"]


class BaselineToken(WireModel):
    """The embedding of one token at every place, such as the mask or the padding token."""

    token: Index | Annotated[str, Field(min_length=1, max_length=256)]
    """Its id, or a text that is one token, such as ``[MASK]``."""


class IntegratedGradients(WireModel):
    """The path along which gradients are averaged: from a baseline straight to the embeddings of the input."""

    steps: int = Field(ge=1, le=512)
    """The number of points on the path."""
    rule: PathRule | None = None
    """``gauss``: Gauss-Legendre quadrature; ``midpoint``: points in the middle of equal parts; ``log_gauss``, for a
    baseline of zeros alone: Gauss-Legendre over the logarithm of the scale, since norms make L change by its order of
    magnitude. Default: ``log_gauss`` from zeros, ``gauss`` from another baseline."""
    baseline: Literal["zeros", "mean"] | BaselineToken | None = None
    """The states that the path begins with: ``zeros``, the default; ``mean``, the mean embedding of the vocabulary; or
    an object with ``token``."""
    baseline_embeddings: FloatArray | None = None
    """The same as numbers: ``[d_model]``, ``[L, d_model]`` or ``[B, L, d_model]``."""

    @property
    def from_zeros(self) -> bool:
        """True if the path begins with zeros."""
        return self.baseline in {None, "zeros"} and self.baseline_embeddings is None

    @model_validator(mode="after")
    def _one_path(self) -> "IntegratedGradients":
        if self.baseline is not None and self.baseline_embeddings is not None:
            raise at_fault("baseline_embeddings", "expected one baseline; leave this or baseline out")
        if self.rule == "log_gauss" and not self.from_zeros:
            raise at_fault("rule", "log_gauss scales embeddings from zeros; take gauss or midpoint from this baseline")
        return self


class IntegratedCompleteness(WireModel):
    """The sum of the attributions of all tokens against the change of L that they explain: ``[B]`` each."""

    attributed: FloatArray
    """The sum of gradient · (embedding − baseline)."""
    expected: FloatArray
    """L of the input minus L of the baseline."""
    gap: FloatArray
    """``attributed`` − ``expected``; it goes to zero as ``steps`` grow."""
    relative_gap: FloatArray
    """``gap`` / |``expected``|; NaN if ``expected`` is 0."""
