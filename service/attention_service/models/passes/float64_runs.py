"""Models that compute in float64, also where their code asks for less.

The code of transformers names float32 in norms, rotations, softmax, residuals and gates, whatever the dtype of a model.
``Float64`` gives it float64 there. The mode is one of a thread, and is entered at each call of a module of a float64
model from outside: other models, other threads, and this package's own code keep what they ask for.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from threading import local
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

_WIDE: Final = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
"""The dtype that is computed in, for each one that is asked for."""
_CASTS: Final = {
    Tensor.float: Tensor.double, Tensor.half: Tensor.double, Tensor.bfloat16: Tensor.double,
}  # fmt: skip
_OF_BITS: Final = frozenset({Tensor.view, torch.frombuffer})
"""Functions to which a dtype says what bits mean, and not what numbers become."""
_DRAWN: Final = frozenset({torch.rand, torch.randn, torch.normal, torch.from_numpy})
"""Functions whose narrow result is widened, since a second call gives others, or takes no dtype."""
_ENTERED: Final = local()


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute in float64 until the block ends, and give it its own parameters back then.

    Norms and rotations ask for float32 by name, whatever the dtype of the model; they get float64 too. Experts run one
    by one, since PyTorch's grouped products have no float64.
    """
    experts: Any = getattr(model.config, "_experts_implementation", None)
    every = (*model.parameters(), *model.buffers())
    held = [getattr(x, "_local_tensor", x) for x in every if x.is_floating_point()]  # the part on this device
    former = [tensor.data for tensor in held]
    try:
        model.set_experts_implementation("eager")
        for tensor in held:
            tensor.data = tensor.data.double()
        with float64():
            yield
    finally:
        model.set_experts_implementation(experts)
        for tensor, data in zip(held, former, strict=True):
            tensor.data = data


@contextmanager
def made_in_float64() -> Iterator[None]:
    """Let transformers make the models of a block in float64, and the numbers that no checkpoint holds.

    The frequencies of rotations are such numbers; their code rounds them to float32, whatever the dtype of the model.
    """
    kind: Any = PreTrainedModel
    contexts, initialize = vars(kind)["get_init_context"], kind._initialize_missing_keys

    def wide_contexts(made: Any, *args: Any, **options: Any) -> list[Any]:
        return [*contexts.__func__(made, *args, **options), float64()]

    def initialized(model: Any, *args: Any, **options: Any) -> None:
        with float64():
            initialize(model, *args, **options)

    kind.get_init_context, kind._initialize_missing_keys = classmethod(wide_contexts), initialized
    try:
        yield
    finally:
        kind.get_init_context, kind._initialize_missing_keys = contexts, initialize


def compute_in_float64(model: PreTrainedModel) -> None:
    """Let each module of a float64 model compute in float64 throughout, whoever calls it, from now on."""
    model.set_experts_implementation("eager")  # PyTorch's grouped products have no float64
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):  # which keep the dtype that they are given
            wide = partial(_called, module.forward)
            module.forward = update_wrapper(wide, module.forward)  # with its signature


def copied_module(module: nn.Module) -> nn.Module:
    """A copy of a module, with its parameters and none of its hooks, that computes in float64 if the module does."""
    copied = copy.copy(module)
    copied._parameters, copied._buffers = dict(module._parameters), dict(module._buffers)
    copied._forward_hooks, copied._forward_pre_hooks = OrderedDict(), OrderedDict()
    if (wide := vars(copied).pop("forward", None)) is not None:  # that of the module itself
        copied.forward = update_wrapper(partial(_called, copied.forward), wide)
    return copied


def _called(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if getattr(_ENTERED, "depth", 0):
        return forward(*args, **options)
    with float64():
        return forward(*args, **options)


@contextmanager
def float64() -> Iterator[None]:
    """Compute in float64 in this thread until the block ends, also where code asks for less."""
    _ENTERED.depth = getattr(_ENTERED, "depth", 0) + 1
    try:
        with Float64():
            yield
    finally:
        _ENTERED.depth -= 1


class Float64(TorchFunctionMode):
    """Puts float64 in the place of every smaller float that a function is asked for, or makes of integers."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        if function not in _OF_BITS:
            function = _CASTS.get(function, function)
            args = [_WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args]
            kwargs = {
                name: _WIDE.get(arg, arg) if isinstance(arg, torch.dtype) else arg
                for name, arg in (kwargs or {}).items()
            }
        if function is torch.where:  # which makes float32 of two numbers
            args = [torch.tensor(arg, dtype=torch.float64) if isinstance(arg, float) else arg for arg in args]
        options = kwargs or {}
        if function is torch.full and "dtype" not in options:
            # XGLM fills a mask with float64's least number, which float32 does not have.
            filled = options["fill_value"] if "fill_value" in options else args[1]
            options = {**options, "dtype": torch.float64} if isinstance(filled, float) else options
        result = function(*args, **options)
        if not isinstance(result, Tensor) or result.dtype not in _WIDE or function in _OF_BITS:
            return result
        given = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        return result if any(x.dtype in _WIDE for x in given) else _made_wide(function, args, options, given, result)


def _made_wide(
    function: Any, args: Sequence[Any], options: Mapping[str, Any], given: Sequence[Tensor], result: Tensor
) -> Tensor:
    """The narrow result of a function of integers, or of no tensor, as the function makes it in float64."""
    if function in _DRAWN:
        return result.double()
    wide: Tensor
    try:
        if not given:
            wide = function(*args, **options, dtype=torch.float64)
        else:
            wide = function(*tree_map_only(Tensor, Tensor.double, list(args)), **options)
    except (TypeError, RuntimeError):
        return result.double()
    return wide
