"""A pass gone through before it is admitted: on PyTorch's meta device, where a tensor has sizes and no memory.

Every operation is dispatched as it would be on the real device, and autograd keeps and frees what it would keep and
free; of each tensor's storage it is noted when it comes and when it goes. What a CPU's operators take for themselves is
told beside them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_service.core.blocks import REPEATED
from attention_service.core.slices import rehearsed_on
from attention_service.cost import cuda_kernels
from attention_service.cost.meta_results import answer
from attention_service.cost.operation_counter import OperationCounter, Traffic
from attention_service.cost.operator_memory import workspace_bytes

_ADD = torch.ops.aten.add.Tensor


Bytes = dict[str, int]
"""Bytes by the name of their tensors."""
Section = tuple[str, str]
"""A phase, and the name of the tensors that were made."""
ROUNDING = 4096
LARGEST = 2**46
"""Bytes that no device has: nothing of such sizes is rehearsed."""


@dataclass(frozen=True)
class Seen:
    """The memory that a pass held, and its operations."""

    phases: Mapping[str, Bytes]
    """The most that is held at a time in each phase, by the names of the tensors."""
    sections: Mapping[Section, Traffic]
    """The operations while tensors of a name were made, by phase and name."""
    results: int = 0
    """Bytes of the results, which are copied to the host."""

    @cached_property
    def peak_bytes(self) -> int:
        """The most that is held, and a page for what is too small to count: scalars, indices, flags of rows."""
        return max((sum(held.values()) for held in self.phases.values()), default=0) + ROUNDING

    def total(self) -> Traffic:
        """All operations."""
        return Traffic.sum(self.sections.values())

    def of(self, phase: str, name: str | None = None) -> Traffic:
        """The operations of a phase, or of one name in it."""
        return Traffic.sum(x for at, x in self.sections.items() if at[0] == phase and name in {None, at[1]})

    def scaled(self, times: Mapping[str, float]) -> "Seen":
        """With so many times the operations of each of these phases."""
        if not times:
            return self
        return replace(self, sections={at: x.times(times.get(at[0], 1)) for at, x in self.sections.items()})


def rehearse(
    run: Callable[[], object],
    resident: Iterable[Tensor] = (),
    *,
    pairs: tuple[int, int] | None = None,
    threads: int = 1,
    first: str = "inputs",
) -> Seen:
    """Go through a pass over meta tensors, whose results are held to the end, beside the ``resident`` tensors.

    pairs: the last two sizes of what has a number for each query and key. ``threads``: those of a CPU; 0 for a GPU,
    of whose operators only those of attention take something for themselves. ``first``: the name of the first phase.
    """
    account = Account(resident, pairs, threads)
    repeated = REPEATED.set(account.counter.repeated)
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), rehearsed_on(threads), account:
            account.begin(first)
            account.call("inputs")
            results = run()
            size = sum(x.nbytes for x in tree_leaves(results) if isinstance(x, Tensor))
            del results  # all of them stay to the end
    finally:
        REPEATED.reset(repeated)
    phases = {phase: {name: size for name, size in held.items() if size} for phase, held in account.most.items()}
    return Seen(phases, account.counter.counted, size)


class Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are alive, now and at most, and the operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to skip a compiler it would be loaded first: a second, and 60 MB."""
        return False

    def __init__(self, resident: Iterable[Tensor], pairs: tuple[int, int] | None, threads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = OperationCounter[Section]()
        self.most: dict[str, Bytes] = {}
        """Bytes by phase."""
        self._largest = -1
        self._total = 0
        self._held: Bytes = {}
        self._pairs, self._threads = pairs, threads
        self._phase, self._name, self._over_pairs = "", "made", "pairs"
        self._alive: dict[int, object] = {_key(x): None for x in resident}

    def begin(self, phase: str) -> None:
        """Begin a phase. Its name is used once."""
        self._phase, self._largest = phase, -1
        self.take(0)

    def call(self, name: str, over_pairs: str | None = None) -> None:
        """Name the tensors made from now on; ``over_pairs`` names those with a number for each query and key."""
        self._name, self._over_pairs = name, over_pairs or name
        self.counter.enter((self._phase, name))

    def take(self, more: int) -> None:
        """Note this many bytes of workspace, beside what is held."""
        if self._total + more > self._largest:
            self._largest = self._total + more
            self.most[self._phase] = self._held | {"workspace": more}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        accumulated = func is _ADD and _accumulates(*args[:2])
        out = args[0].view(args[0].shape) if accumulated else answer(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        self.counter.count(func, args, kwargs, out)
        if accumulated:
            return out
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._come(x)
        if size := self._workspace_bytes(func, args, kwargs, out):
            self.take(size)
        return out

    def _workspace_bytes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        if self._threads:
            return workspace_bytes(func, args, out, self._threads)
        name = func._schema.name.removeprefix("aten::")
        return cuda_kernels.Called(name, args, kwargs).workspace_bytes if name in cuda_kernels.KERNELS else 0

    def _come(self, x: Tensor) -> None:
        key = _key(x)
        if key in self._alive:
            return
        storage = x.untyped_storage()
        size = storage.nbytes()
        name = self._over_pairs if x.shape[-2:] == self._pairs else self._name

        def gone(_: object) -> None:
            self._total -= size
            self._held[name] -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self._total += size
        self._held[name] = self._held.get(name, 0) + size
        self.take(0)


def _accumulates(x: Any, y: Any) -> bool:
    """Return True if autograd adds a gradient to one that nobody else holds.

    Autograd does so in place, except under a dispatch mode; two references to the first tensor are then the mode's.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0 or not isinstance(y, Tensor):
        return False
    node = torch._C._current_autograd_node()
    if node is None or not node.name()[-1].isdigit():  # a backward pass that is written in Python adds for itself
        return False
    alone = x._use_count() == 4 and torch._C._storage_Use_Count(_key(x)) == 2
    return alone and x.shape == y.shape and _dense(x)


def _dense(x: Tensor) -> bool:
    """Return True if the tensor has no gaps, in any order of dimensions."""
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
