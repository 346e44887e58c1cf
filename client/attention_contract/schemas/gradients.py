"""Exact gradients. Notation as in ``attention``."""

from typing import Annotated

from pydantic import Field

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel
from attention_contract.schemas.attention import AttentionInputs, Dropout, Ran, RawInputs, Taps, TapsRequest
from attention_contract.tensors import AnyNumber, BoolArray, Encoding, FloatArray


class GradientsRequest(TapsRequest):
    """Exact gradients of L, where ∂L/∂output is given."""

    upstream: FloatArray | None = None
    """∂L/∂output, of the output's shape; default: ones (L is the sum of the output)."""
    tap_upstream: dict[str, FloatArray] | None = Field(default=None, min_length=1, max_length=16)
    """∂L/∂tap of further taps that L depends on, by name (q, k, v, scores, capped_scores, masked_scores, weights,
    context): broadcastable to the tap. L is then Σ output · upstream + Σ tap · tap_upstream."""
    wrt: Listed[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=lambda: ["query"], min_length=1, max_length=256
    )
    """The names to differentiate with respect to: inputs (query, key, value, mask, past_key, past_value, gate, beta,
    initial_state, initial_normalizer), taps (q, k, v, scores, capped_scores, masked_scores, weights, context),
    parameters by name, or ``parameters`` for all of them. With ``directions``, also ``upstream`` and names such as
    ``tap_upstream.weights``. A key or value that was not sent is the query, whose gradient is then the total over its
    roles."""
    check: bool = False
    """Also compare with extrapolated central differences in float64, at a sample of the elements of each name."""
    directions: dict[Annotated[str, Field(max_length=256)], FloatArray] | None = Field(default=None, min_length=1)
    """Also differentiate the gradients, along these directions: for names of ``wrt``, tensors d of their shape. The
    reply then has Hessian-vector products, Σ ∂²L/∂name ∂other · d_other over the others listed here."""


class RawGradientsRequest(RawInputs, GradientsRequest):
    """Exact gradients of a raw attention."""


class GradientCheck(WireModel):
    """A gradient against central differences, both in float64."""

    max_absolute_error: AnyNumber
    max_relative_error: AnyNumber
    """The largest absolute error over the largest magnitude among the compared elements, which counts as 1e-3 at
    least."""
    elements: int
    """The number of compared elements."""
    passed: bool
    """True if the relative error is at most 1e-6, or the estimated error of the differences, if that is at most 1e-4.
    The step of the differences is chosen by convergence."""


class GradientsReply(Taps):
    """∂L/∂name for each requested name, in the shape of that name."""

    gradients: dict[str, FloatArray]
    hessian_products: IfRequested[dict[str, FloatArray]] = ABSENT
    """Product of the Hessian with ``directions``, in the shape of each requested name."""
    dropout_mask: IfRequested[BoolArray] = ABSENT
    """The weights that are kept, as in a forward reply."""
    check: IfRequested[dict[str, GradientCheck]] = ABSENT
    ran: Ran


class PassRequest(AttentionInputs):
    """One forward pass through a module, which is kept for its backward pass."""

    wrt: Listed[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=lambda: ["query"], min_length=1, max_length=256
    )
    """The gradients that the backward pass computes: inputs (query, key, value, mask, past_key, past_value, gate, beta,
    initial_state, initial_normalizer), parameters by name, or ``parameters`` for all of them."""
    dropout: Dropout | None = None
    """Drop weights, the same in both passes; default: none."""


class RawPassRequest(RawInputs, PassRequest):
    """One raw attention, which is kept for its backward pass."""


class PassReply(WireModel):
    """The output, and the id of the kept pass."""

    id: str | None = None
    """Id for the backward pass; null if there was no memory to keep the pass. Send a gradients request instead."""
    output: FloatArray
    """``[B, Lq, d_model]`` of a module; raw attention keeps the query's layout."""
    ran: Ran


class BackwardRequest(WireModel):
    """The backward pass of a kept pass. A kept pass serves one backward pass."""

    upstream: FloatArray | None = None
    """∂L/∂output, of the output's shape; default: ones (L is the sum of the output)."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""
