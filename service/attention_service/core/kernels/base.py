"""The interface of a kernel: how it computes a context, and what the cost model must know about it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.extent import Extent
from attention_service.core.problem import Problem
from attention_service.core.registry import Registry

PAIR_TAPS = frozenset({"scores", "capped_scores", "masked_scores", "weights", "lse"})
"""Taps that a kernel may or may not keep."""


@dataclass(frozen=True)
class Needs:
    """The demands of a request on a kernel, beside the spec."""

    edits: bool = False
    """Some tap is edited."""
    dropout: bool = False
    """Weights are dropped."""
    taps_gradient: bool = False
    """A gradient with respect to a tap other than q, k, v or context is wanted."""
    double_backward: bool = False
    """A gradient of a gradient is wanted."""
    device: str = "cpu"
    """The type of the device."""


@dataclass(frozen=True)
class KernelWork:
    """The part of an attention that a kernel computes."""

    pairs: int
    """Query-key pairs of one head over the batch."""
    blocks: int = 0
    """Parts that it starts from Python, over all sequences."""


class Kernel(ABC):
    """One way to compute the context.

    The class attributes tell the cost model how the kernel works. Their defaults fit a kernel of plain PyTorch
    operations that go over all pairs, one operation after the other.
    """

    keeps: ClassVar[frozenset[str]] = frozenset()
    """Taps of ``PAIR_TAPS`` that it has in memory anyway, and returns if they are asked for."""
    holds: ClassVar[Literal["pairs", "masks", "tiles"]] = "pairs"
    """Its largest tensors: scores of every head and pair, masks laid out for every pair, or one tile at a time."""
    recomputes: ClassVar[bool] = False
    """Its backward pass computes the scores again."""
    automatic: ClassVar[bool] = False
    """The planner may choose it; otherwise it runs only where a request names it."""
    compiled: ClassVar[bool] = False
    """It is compiled for new shapes, so that its times teach the clock nothing and nobody waits for it at the start."""
    single_call: ClassVar[bool] = False
    """For a plain softmax it is one call of PyTorch's scaled dot product attention, which may stand in its place."""

    by_stages: ClassVar[bool] = False
    """It goes through all taps one after the other, and by itself keeps what is not finite from other queries."""

    @abstractmethod
    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute ``context`` ``[B, H, Q, V]``, and those of the taps, whole, that the kernel has in memory anyway."""

    @abstractmethod
    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield each reason why it cannot do what is asked, with q, k and v of this dtype."""

    def executed(self, sizes: Extent) -> KernelWork:
        """Count the pairs that it computes, and the parts that it starts; by default every pair."""
        return KernelWork(sizes.batch * sizes.queries * sizes.keys)

    def rehearsal(self, sizes: Extent) -> "Kernel":
        """Return a kernel that makes, keeps and frees on meta tensors what this one does on real ones.

        By default the kernel itself. A kernel whose operations have no meta implementation returns another one. One of
        many equal parts may stand for all, within ``blocks.REPEATED``.
        """
        return self


KERNELS = Registry[Kernel]("kernel", group="attention_service.kernels")
"""The kernels here, and those that installed packages register."""
