"""A pass gone through before it is admitted: on PyTorch's meta device, where a tensor has sizes and no memory.

Every operation is dispatched as it would be on the real device, and autograd keeps and frees what it would keep and
free; of each tensor's storage it is noted when it comes and when it goes. What a CPU's operators take for themselves is
told beside them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention_service.core.cost.answers import answer

_ADD = torch.ops.aten.add.Tensor
_CONVERTING = {getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")}


def most_held(
    run: "Callable[[Account], None]", resident: Iterable[Tensor] = (), *, graph: bool = True
) -> dict[str, int]:
    """The most bytes that a pass over meta tensors holds in each of its phases, beside what is ``resident``.

    ``graph``: autograd keeps what it would for the way back.
    """
    account = Account(resident)
    with torch.inference_mode(mode=False), torch.set_grad_enabled(graph), account:
        run(account)
    return account.most


class Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are alive, now and at most."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to skip a compiler it would be loaded first: a second, and 60 MB."""
        return False

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: dict[str, int] = {}
        """By phase."""
        self._held = 0
        self._phase = ""
        self._alive: dict[int, object] = {_key(x): None for x in resident}

    def begin(self, phase: str) -> None:
        """What is held from now on counts for this phase."""
        self._phase = phase
        self._see(0)

    def _see(self, more: int) -> None:
        self.most[self._phase] = max(self.most.get(self._phase, 0), self._held + more)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _ADD and _accumulates(*args[:2]):
            return args[0].view(args[0].shape)
        out = answer(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._come(x)
        if func in _CONVERTING:
            self._see(_converted(args, out))
        return out

    def _come(self, x: Tensor) -> None:
        key = _key(x)
        if key in self._alive:
            return
        storage = x.untyped_storage()
        size = storage.nbytes()

        def gone(_: object) -> None:
            self._held -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self._held += size
        self._see(0)


def _accumulates(x: Any, y: Any) -> bool:
    """Whether this is autograd adding a gradient to one that nobody else holds.

    It does so in place, but where operations are looked at; of the references to what came first two are then those of
    whom it is shown to.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0 or not isinstance(y, Tensor):
        return False
    node = torch._C._current_autograd_node()
    if node is None or not node.name()[-1].isdigit():  # a backward pass that is written in Python adds for itself
        return False
    alone = x._use_count() == 4 and torch._C._storage_Use_Count(_key(x)) == 2
    return alone and x.shape == y.shape and x.is_contiguous()


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _converted(args: tuple[Any, ...], out: Any) -> int:
    """What is converted to the dtype of the answer first: a copy on a CPU."""
    others = (x for x in args if isinstance(x, Tensor) and x.ndim and x.dtype != out.dtype)
    return sum(x.numel() * out.itemsize for x in others)
