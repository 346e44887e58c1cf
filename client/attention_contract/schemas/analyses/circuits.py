"""Circuits of a module: what each head's projections compute together, whatever the tokens are.

Notation for shapes: H selected heads, L heads of a later module, k singular values. A head's score of two tokens x and
y is xᵀ W_QK y, and it writes W_OV y of a token y that it attends to, both without biases.

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, Listed, WireModel, at_fault
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import MAX_INDICES, Ran
from attention_contract.schemas.drawable_replies import DrawableReply
from attention_contract.schemas.modules import ModuleName
from attention_contract.tensors import Encoding, FloatArray, IntArray

CircuitPart = Literal["qk", "ov", "spectra"]
"""The parts of a reply."""
MAX_SINGULAR_VALUES: Final = 16_384
"""The most singular values of one matrix in a reply."""


def every_part() -> list[CircuitPart]:
    """The parts that a request returns by default."""
    return ["qk", "ov", "spectra"]


class CircuitsRequest(WireModel):
    """Ask for the circuits of a module's heads, and for the spectra of its parameters.

    Everything is computed in float64. Biases, position encodings, norms of queries and keys and a softcap are no part
    of a circuit; the reply names those that the module has.
    """

    heads: Listed[Index] | None = Field(default=None, min_length=1, max_length=MAX_INDICES)
    """Query heads, in the order given; default: all. Grouped heads share their key/value head."""
    parts: Listed[CircuitPart] = Field(default_factory=every_part, min_length=1, max_length=3)
    """The circuits to return, and ``spectra`` of all parameters; default: all three. ``qk`` needs a score that is a
    product of a query and a key: dot, scaled_dot or bilinear."""
    top: int | None = Field(default=None, ge=1, le=MAX_SINGULAR_VALUES)
    """The number of largest singular values to return for each matrix. Default: all for a circuit, and ``head_dim`` for
    a parameter. Norms and ranks use all singular values."""
    vectors: bool = False
    """Return the singular vectors of the circuits too."""
    with_: ModuleName | None = Field(default=None, alias="with")
    """The name of a later module: return composition scores of each of its heads with each head of this one."""
    with_version: str | None = None
    """The version that the later module must have; default: any."""
    version: str | None = None
    """The version that the module must have; default: any."""
    encoding: Encoding = "list"
    """The form of tensors in a JSON reply."""

    @model_validator(mode="after")
    def _returns_something(self) -> "CircuitsRequest":
        if self.vectors and set(self.parts) == {"spectra"}:
            raise at_fault("vectors", "they are those of qk and ov; add one to parts, or leave it out")
        return self


class Circuit(WireModel):
    """One matrix a head, by its singular value decomposition W = Σ σ u vᵀ."""

    singular_values: FloatArray
    """``[H, k]``: σ, largest first."""
    norm: FloatArray
    """``[H]``: the Frobenius norm, √(Σ σ²)."""
    effective_rank: FloatArray
    """``[H]``: exp(−Σ p ln p) with p = σ / Σ σ; 0 of a zero matrix. Source: Roy & Vetterli 2007."""
    stable_rank: FloatArray
    """``[H]``: Σ σ² / σ₁²; 0 of a zero matrix. Source: Rudelson & Vershynin 2007."""
    left: IfRequested[FloatArray] = ABSENT
    """``[H, k, d_model]``: u of each σ. Of W_QK, a direction of queries; of W_OV, one that the head writes. The largest
    element of u is positive."""
    right: IfRequested[FloatArray] = ABSENT
    """``[H, k, width]``: v of each σ. Of W_QK, a direction of keys; of W_OV, one of the values that the head reads."""


class OutputCircuit(Circuit):
    """W_OV = W_O W_V of each head."""

    copying: IfRequested[FloatArray] = ABSENT
    """``[H]``: Σ λ / Σ |λ| over the eigenvalues of W_OV, from −1 to 1. It is near 1 for a head that writes what it
    reads, near −1 for one that writes its negative, and 0 of a zero matrix. Absent if values and output differ in
    width."""


class Spectrum(WireModel):
    """The singular values of one parameter.

    A parameter with one dimension is a matrix of one row, and one with three is a matrix for each head.
    """

    name: str
    shape: list[int]
    norm: FloatArray
    """``[]`` or ``[heads]``: the Frobenius norm."""
    effective_rank: FloatArray
    """The rank that ``Circuit`` defines."""
    stable_rank: FloatArray
    """The rank that ``Circuit`` defines."""
    singular_values: FloatArray
    """``[k]`` or ``[heads, k]``, largest first."""


class Composition(WireModel):
    """Composition scores of the heads of this module with those of a later one: ``[H, L]`` each, from 0 to 1.

    A score is ‖W W_OV‖ / (‖W‖ ‖W_OV‖) in Frobenius norms, W_OV of this module and W of the later one; 0 if one of them
    is zero. It is absent if the widths do not fit, and ``q`` and ``k`` also if the later score is no product.
    """

    module: ModuleName
    """The later module."""
    version: str
    """Its version."""
    q: IfRequested[FloatArray] = ABSENT
    """W = W_QKᵀ: the head's output in the queries of the later head."""
    k: IfRequested[FloatArray] = ABSENT
    """W = W_QK: in its keys."""
    v: IfRequested[FloatArray] = ABSENT
    """W = W_OV: in its values."""
    baseline: float
    """1 / √d_model: the root mean square of a score if this head's outputs were rotated at random."""


class CircuitsReply(DrawableReply):
    """The circuits of a module."""

    heads: IntArray
    """``[H]``: the numbers of the heads."""
    qk: IfRequested[Circuit] = ABSENT
    """W_QK = f · W_Qᵀ W_K ``[d_model, key_width]`` with the factor f of the score: the scale of ``scaled_dot``, 1 of
    ``dot``. A bilinear score has W_Qᵀ W W_K."""
    ov: IfRequested[OutputCircuit] = ABSENT
    """W_OV = W_O W_V ``[d_model, value_width]``."""
    spectra: IfRequested[list[Spectrum]] = ABSENT
    """Every parameter, in the order of the computation."""
    composition: IfRequested[Composition] = ABSENT
    """Composition with the later module."""
    left_out: list[str]
    """The parts of the module's spec and parameters that act on queries, keys, values or scores but are not in a
    circuit, such as ``position rope`` and ``q_proj.bias``."""
    ran: Ran


EXAMPLE_CIRCUITS: Final[dict[str, Any]] = {"heads": [0], "top": 2}
"""One head, and the two largest singular values of each matrix."""
