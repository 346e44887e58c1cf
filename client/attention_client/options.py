"""The keyword arguments of the calls: the contract's request fields, as a caller may write them.

Each class mirrors one request model of ``attention_contract.schemas``, where every field is documented; ``return_``
stands for ``return``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from attention_client.arrays import TensorLike
from attention_contract.schemas.attention import Dropout, Edit, KernelName, Select, Tap
from attention_contract.schemas.complexity import Alternative
from attention_contract.schemas.hopfield import Projections
from attention_contract.spec import AttentionSpec


class InputOptions(TypedDict, total=False):
    """What goes into one attention beside query, key and value."""

    mask: TensorLike | None
    key_mask: TensorLike | None
    key_lengths: TensorLike | None
    global_mask: TensorLike | None
    past_key: TensorLike | None
    past_value: TensorLike | None
    gate: TensorLike | None
    beta: TensorLike | None
    initial_state: TensorLike | None
    initial_normalizer: TensorLike | None
    offsets: TensorLike | None
    positions: TensorLike | None
    version: str | None
    kernel: KernelName | None


class ForwardOptions(InputOptions, total=False):
    """The fields of ForwardRequest."""

    dropout: Dropout | Mapping[str, Any] | None
    return_: Sequence[Tap]
    edits: Sequence[Edit | Mapping[str, Any]]
    select: Select | Mapping[str, Any] | None
    average_heads: bool
    return_state: bool
    report_error: bool


class WeightsOptions(InputOptions, total=False):
    """The fields of WeightsRequest."""

    edits: Sequence[Edit | Mapping[str, Any]]
    top_k: int
    select: Select | Mapping[str, Any] | None
    return_weights: bool
    average_heads: bool
    query_mask: TensorLike | None


class GradientsOptions(ForwardOptions, total=False):
    """The fields of GradientsRequest."""

    upstream: TensorLike | None
    wrt: Sequence[str]
    check: bool
    directions: Mapping[str, TensorLike] | None


class RawOptions(TypedDict, total=False):
    """What raw attention adds: the spec and what belongs to it."""

    spec: AttentionSpec | Mapping[str, Any]
    parameters: Mapping[str, TensorLike]
    num_heads: int | None
    num_kv_heads: int | None


class RawForwardOptions(RawOptions, ForwardOptions, total=False):
    """The fields of RawForwardRequest."""


class RawWeightsOptions(RawOptions, WeightsOptions, total=False):
    """The fields of RawWeightsRequest."""


class RawGradientsOptions(RawOptions, GradientsOptions, total=False):
    """The fields of RawGradientsRequest."""


class CostOptions(TypedDict, total=False):
    """The fields of ComplexityRequest beside shape and sweep."""

    return_: Sequence[Tap]
    kernel: KernelName | None
    memory_bytes: int | None
    hardware: str | None
    compare: Sequence[Alternative | Mapping[str, Any]]
    measure: bool
    version: str | None


class RawCostOptions(CostOptions, total=False):
    """The fields of RawComplexityRequest beside shape, sweep and the sizes of a head."""

    num_kv_heads: int | None
    value_dim: int | None
    key_dim: int | None
    dtype: str
    spec: AttentionSpec | Mapping[str, Any]


class HopfieldOptions(TypedDict, total=False):
    """The fields of HopfieldRequest beside the patterns."""

    beta: TensorLike | None
    steps: int | None
    eps: float | None
    max_steps: int | None
    stored_mask: TensorLike | None
    projections: Projections | Mapping[str, TensorLike] | None
    num_heads: int | None
    return_association: bool
