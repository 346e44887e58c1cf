"""A model that computes in float64 for a while, also where its code asks for less."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_LESS: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
_CASTS: Final = {
    Tensor.float: Tensor.double, Tensor.half: Tensor.double, Tensor.bfloat16: Tensor.double,
}  # fmt: skip


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute in float64 until the block ends, and give it its own parameters back then.

    Norms and rotations ask for float32 by name, whatever the dtype of the model; they get float64 too. Experts run one
    by one, since PyTorch's grouped products have no float64.
    """
    experts: Any = getattr(model.config, "_experts_implementation", None)
    held = [each for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
    former = [each.data for each in held]
    try:
        model.set_experts_implementation("eager")
        for each in held:
            each.data = each.data.double()
        with Float64():
            yield
    finally:
        model.set_experts_implementation(experts)
        for each, data in zip(held, former, strict=True):
            each.data = data


class Float64(TorchFunctionMode):
    """Puts float64 in the place of every smaller float that a function is asked for."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function = _CASTS.get(function, function)
        wide = [torch.float64 if isinstance(each, torch.dtype) and each in _LESS else each for each in args]
        named = {
            name: torch.float64 if isinstance(each, torch.dtype) and each in _LESS else each
            for name, each in (kwargs or {}).items()
        }
        return function(*wide, **named)
