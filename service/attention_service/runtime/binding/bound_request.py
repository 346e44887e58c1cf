"""A bound request: its sizes and checked tensors, the input of planning and execution."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attention_contract.errors import InvalidTensor, ShapeMismatch
from attention_contract.tensors import Array, Untyped, dtype_name
from attention_service.core.kv_cache.past import Cached
from attention_service.core.multihead import Sizes
from attention_service.cost.attention import SizedAttention
from attention_service.modules.resident import Module

_MAX_EMPTY = 2**22
"""Limit of the product of a tensor's other sizes if one size is 0: such a tensor costs nothing to send, but positions,
masks and statistics of its sizes would cost memory."""


@dataclass(frozen=True)
class QueryLayout:
    """Dimensions that the query omits, which the reply omits too."""

    batched: bool = True
    headed: bool = True
    """False for a raw ``[Q, D]``: one head without a dimension of its own."""
    merged: bool = False
    """Heads lie side by side in the last dimension: ``[B, L, heads·W]``."""


@dataclass(eq=False, kw_only=True)  # not frozen: that takes four times as long to make
class BoundRequest(SizedAttention):
    """One attention with its sizes known and its arrays batched. Nothing changes it once it is made.

    It is the only description of an attention: kernels and the cost model read it, and what it would hold is found with
    a blank one, whose arrays have shapes alone (``planning.blank_requests``).
    """

    module: Module | None
    layout: QueryLayout
    reply_dtype: str
    """Dtype of the reply: the query's, if it states one."""
    value_is: str
    """The field of the values: value, key or query."""
    learned: dict[str, Array] = field(default_factory=dict, repr=False)
    """Learned tensors of a raw request, or those of a module's parameters that the request replaces, by name."""
    cached: tuple[Cached, ...] | None = None
    """For each sequence its past in the pages of a session, of which ``arrays`` has the shape alone; None without."""

    def replaced(self, **changes: Any) -> "BoundRequest":
        """Return ``dataclasses.replace`` of this, ten times as fast."""
        made = object.__new__(BoundRequest)
        made.__dict__.update(self.__dict__, **changes)
        return made

    @property
    def sizes(self) -> Sizes | None:
        """The module's widths; None for raw attention."""
        return None if self.module is None else self.module.sizes

    @property
    def d_model(self) -> int | None:
        """Width of the model; None for raw attention."""
        return None if self.module is None else self.module.sizes.d_model

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The batched shape of the output."""
        if self.module is not None:
            return (self.batch, self.queries, self.module.sizes.d_model)
        if self.layout.merged:
            return (self.batch, self.queries, self.heads * self.value_dim)
        return (self.batch, self.heads, self.queries, self.value_dim)


def wrong_shape(name: str, words: str, array: Array | None, expected: object = None) -> ShapeMismatch:
    """Return the error for a tensor whose shape does not fit its role, in words and as a fact: the words by default."""
    actual = list(array.shape) if array is not None else None
    expected = words if expected is None else expected
    return ShapeMismatch.at(name, f"expected {words}; got shape {actual}", expected=expected, actual=actual)


def check_empty(arrays: Mapping[str, Array]) -> None:
    """Raise ShapeMismatch for a tensor without elements whose other sizes are too large."""
    for name, array in arrays.items():
        if not array.size and math.prod(max(size, 1) for size in array.shape) > _MAX_EMPTY:
            raise wrong_shape(name, f"sizes of at most {_MAX_EMPTY} elements beside a size of 0", array)


def common_dtype(arrays: Mapping[str, Array]) -> str:
    """Return the dtype of all tensors; float32 if none states one. Raises InvalidTensor if they differ."""
    named = {name: dtype_name(array) for name, array in arrays.items() if not isinstance(array, Untyped)}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{name} is {dtype}" for name, dtype in named.items())
        raise InvalidTensor(f"the tensors differ in dtype: {listed}; send them in one", param=list(named)[-1])
    return next(iter(named.values()), "float32")


def widened(array: Array, layout: QueryLayout) -> Array:
    """Return a tensor of the query's rank with the dimensions that the query's layout omits."""
    if not layout.batched:
        array = array[None]
    return array if layout.headed else array[:, None]


def strip(value: Tensor, layout: QueryLayout, *, heads_axis: bool) -> Tensor:
    """Remove from a batched result the dimensions that the query's layout omits."""
    if not layout.headed and heads_axis:
        value = value[:, 0]
    return value if layout.batched else value[0]
