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

_CONVERTING = {getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")}


def most_held(run: Callable[[], None], resident: Iterable[Tensor] = ()) -> int:
    """The most bytes that a pass over meta tensors holds at a time, beside what is ``resident``."""
    account = _Account(resident)
    with torch.inference_mode(mode=False), torch.enable_grad(), account:
        run()
    return account.most


class _Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are alive, now and at most."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to skip a compiler it would be loaded first: a second, and 60 MB."""
        return False

    def __init__(self, resident: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: int = 0
        self.most: int = 0
        self._alive: dict[int, object] = {_key(x): None for x in resident}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = answer(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._come(x)
        if func in _CONVERTING:
            self.most = max(self.most, self.held + _converted(args, out))
        return out

    def _come(self, x: Tensor) -> None:
        key = _key(x)
        if key in self._alive:
            return
        storage = x.untyped_storage()
        size = storage.nbytes()

        def gone(_: object) -> None:
            self.held -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.held += size
        self.most = max(self.most, self.held)


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _converted(args: tuple[Any, ...], out: Any) -> int:
    """What is converted to the dtype of the answer first: a copy on a CPU."""
    others = (x for x in args if isinstance(x, Tensor) and x.ndim and x.dtype != out.dtype)
    return sum(x.numel() * out.itemsize for x in others)
