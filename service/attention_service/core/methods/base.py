"""What a method is: a way from queries, keys and values to the context, exact or approximate."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from attention_contract.spec import AttentionSpec, Exact
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import Kernel
from attention_service.core.registry import Registry
from attention_service.core.types import Learned, Problem, Widths

Refusal = tuple[str, str]
"""The field at fault, and what to say about it."""


@dataclass(frozen=True)
class Extent:
    """The sizes on which a method's cost and abilities depend; letters as in ``core.types``."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    reach: int
    """Query i sees the keys up to i + reach; K and more where there is no mask."""
    padded: bool = False
    """Whether a key mask or key lengths say which keys are real."""
    sent: frozenset[str] = frozenset()
    """Which tensors of a running state the request brings, and ``return_state`` where it wants it back."""
    fine_gate: bool = False
    """Whether the gate has a number for each feature."""
    d_model: int | None = None
    """Of a module; None for raw attention."""
    new_keys: int = 0
    """Keys that the request brings."""


@dataclass(frozen=True)
class PassCost:
    """FLOPs of one pass: products with queries and keys, products with values, and what is elementwise."""

    scores: int
    values: int
    elementwise: int


@dataclass(frozen=True)
class MethodCost:
    """What an approximation costs in place of scores, normalizer and values."""

    forward: PassCost
    backward: PassCost
    steps: int = 0
    """How many pieces the forward pass is done in, each of which has its start."""
    projections: int = 0
    """FLOPs of products with what a module learns beside its projections, forward."""
    inner: int = 0
    """Those of the FLOPs of the forward pass's products that no query and no key takes part in alone: of what stands
    between them, or of keys and values that are mixed."""


class Method(Protocol):
    """A way to the context."""

    def taps(self, spec: AttentionSpec) -> tuple[str, ...]:
        """The points that it passes, in order, ``output`` left out."""

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Its learned tensors by name."""

    def refuses(self, spec: AttentionSpec) -> Iterator[Refusal]:
        """What of the rest of the spec it cannot honour."""

    def attend(
        self, problem: Problem, kernel: Kernel, taps: Collection[str], edits: Sequence[BoundEdit]
    ) -> dict[str, Tensor]:
        """``context`` ``[B, H, Q, V]``, and those of the taps, whole, that it has in memory anyway."""


@runtime_checkable
class Approximation(Protocol):
    """A method with arithmetic of its own: no kernel computes it, and it has no weights in memory."""

    def cost(self, extent: Extent) -> MethodCost:
        """What it costs."""

    def orders(self) -> tuple[str, str]:
        """Time and memory for one head and sequence of n tokens, as in ``n·d²`` and ``n·d``."""

    def letters(self) -> Mapping[str, str]:
        """What the letters of ``orders`` stand for that mean something else here than in ``cost.letters``."""

    def carried(self, *, module: bool) -> frozenset[str] | None:
        """What a step of one query is sent, and gives back, in place of past keys and values: as in ``Extent.sent``.

        Empty where it takes those, as exact attention does; None where no step continues what was before.
        """

    def implied_width(self, head_dim: int) -> int:
        """The width of the features whose products ``implied`` takes; 0 where it gives None."""

    def implied(self, problem: Problem, rows: Sequence[int]) -> Tensor | None:
        """The weights ``[B, H, len(rows), K]`` that its context amounts to for these queries.

        None where they are no distribution.
        """


METHODS = Registry[Method]("method")
APPROXIMATE_TAPS = ("q", "k", "v", "context")


def approximation_of(spec: AttentionSpec) -> Approximation | None:
    """What computes a spec's method where that is not exact."""
    if isinstance(spec.method, Exact):  # told quickly: a protocol is looked up by all its names
        return None
    method = METHODS.of(spec.method)
    return method if isinstance(method, Approximation) else None
