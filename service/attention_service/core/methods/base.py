"""Protocol of methods: exact or approximate computation of the context from queries, keys and values."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from attention_contract.spec import AttentionSpec, Exact
from attention_service.core.edits import BoundEdit
from attention_service.core.extent import Extent
from attention_service.core.kernels.base import Kernel
from attention_service.core.registry import Registry
from attention_service.core.types import Learned, Problem, Widths

Refusal = tuple[str, str]
"""The invalid field, and the reason."""


@dataclass(frozen=True)
class PassCost:
    """FLOPs of one pass: products with queries and keys, products with values, and elementwise work."""

    scores: int
    values: int
    elementwise: int


@dataclass(frozen=True)
class MethodCost:
    """Cost of an approximation, in place of scores, normalizer and values."""

    forward: PassCost
    backward: PassCost
    steps: int = 0
    """Number of steps of the forward pass, each of which has a start."""
    projections: int = 0
    """FLOPs of products with a module's learned tensors other than the projections, forward."""
    inner: int = 0
    """FLOPs of the forward products without a query or a key as a factor: products of intermediate tensors, or of mixed
    keys and values."""


class Method(Protocol):
    """A computation of the context."""

    def taps(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return the taps of the method in order, without ``output``."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the learned tensors by name."""

    def refuses(self, spec: AttentionSpec) -> Iterator[Refusal]:
        """Yield the parts of the spec that the method cannot honour."""

    def attend(
        self, problem: Problem, kernel: Kernel, taps: Collection[str], edits: Sequence[BoundEdit]
    ) -> dict[str, Tensor]:
        """Compute ``context`` ``[B, H, Q, V]``, and those of the taps, whole, that are in memory anyway."""


@runtime_checkable
class Approximation(Protocol):
    """A method with arithmetic of its own: no kernel computes it, and it has no weights in memory."""

    def cost(self, extent: Extent) -> MethodCost:
        """Return the cost."""

    def orders(self) -> tuple[str, str]:
        """Return time and memory for one head and sequence of n tokens, as in ``n·d²`` and ``n·d``."""

    def letters(self) -> Mapping[str, str]:
        """Return the meaning of letters of ``orders`` that differ from ``cost.letters``."""

    def carried(self, *, module: bool) -> frozenset[str] | None:
        """Return the tensors of a one-query step in place of past keys and values: names as in ``Extent.sent``.

        Empty if a step takes past keys and values, as exact attention does; None if no step continues earlier ones.
        """

    def implied_width(self, head_dim: int) -> int:
        """Return the width of the features whose products are ``implied``; 0 if that is None."""

    def implied(self, problem: Problem, rows: Sequence[int]) -> Tensor | None:
        """Return the weights ``[B, H, len(rows), K]`` that the context implies for these queries.

        None if they are not a distribution.
        """


METHODS = Registry[Method]("method")
APPROXIMATE_TAPS = ("q", "k", "v", "context")


def approximation_of(spec: AttentionSpec) -> Approximation | None:
    """Return the approximation of a spec's method; None if the method is exact."""
    if isinstance(spec.method, Exact):  # fast path: isinstance of a protocol compares all its names
        return None
    method = METHODS.of(spec.method)
    return method if isinstance(method, Approximation) else None
