"""Counts of the operations that PyTorch runs: traffic by the cost model's convention, FLOPs by the operators' own.

The arithmetic of an operator is that of its definition: one operation an element for a sum, a product or an elementary
function, n·log n comparisons for a sort. Comparisons, masks and copies are no arithmetic. A fused kernel counts as the
products and the softmax that it replaces.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil, log2
from typing import Any

import torch
from tests.cost.peaks import filled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from attention_service.core.attention import attend
from attention_service.core.inputs import make_problem
from attention_service.core.kernels import query_blocks
from attention_service.core.kernels.query_blocks import PositionLayout
from attention_service.core.masks.visibility import EVERYTHING
from attention_service.core.methods.linear import running
from attention_service.core.multihead import learned_of, project, project_out
from attention_service.core.problem import Problem, Selection
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import Traffic
from attention_service.cost.operation_counter import OperationCounter
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations import compute

BY_RESULT = {
    **dict.fromkeys(["add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "sqrt", "reciprocal", "clamp"], 1),
    **dict.fromkeys(["exp", "log", "tanh", "sin", "cos", "maximum", "minimum"], 1),
    **{"addcmul": 2, "sigmoid": 4, "sigmoid_backward": 3, "_softmax": 5, "_softmax_backward_data": 4},
}
"""Operations for each element of the result."""
BY_INPUT = {"sum": 1, "mean": 1, "amax": 1, "logsumexp": 3, "cumsum": 1, "linalg_vector_norm": 2}
"""Operations for each element of the argument."""
FUSED = "_scaled_dot_product_flash_attention_for_cpu"


class Counting(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._counter = OperationCounter[str]()
        self._counter.enter("all")
        self.matmul = self.arithmetic = 0

    @property
    def traffic(self) -> Traffic:
        return self._counter.counted["all"]

    @property
    def flops(self) -> int:
        return self.matmul + self.arithmetic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._counter.count(func, args, kwargs, out)
        name = func._schema.name.removeprefix("aten::")
        if func._overloadpacket in flop_registry:
            self.matmul += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        elif name == FUSED:
            self._count_fused(*args[:3], causal=len(args) > 4 and args[4], products=1, of_pair=6)
        elif name == f"{FUSED}_backward":
            self._count_fused(*args[1:4], causal=args[7], products=2.5, of_pair=6)
        else:
            self.arithmetic += arithmetic(name.removesuffix("_"), args, out)
        return out

    def _count_fused(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, products: float, of_pair: int) -> None:
        rows = (min(row + 1, k.shape[2]) if causal else k.shape[2] for row in range(q.shape[2]))
        pairs = q.shape[0] * q.shape[1] * sum(rows)
        self.matmul += int(products * 2 * pairs * (q.shape[3] + v.shape[3]))
        self.arithmetic += of_pair * pairs


def arithmetic(name: str, args: Any, out: Any) -> int:
    """Operations of one operator that is no matrix product."""
    x = next((x for x in (out, *args) if isinstance(x, Tensor)), None)
    if x is None or not x.is_floating_point():
        return 0
    if name == "sort":
        return args[0].numel() * ceil(log2(max(args[0].shape[-1], 1)))
    if name in BY_INPUT:
        return BY_INPUT[name] * args[0].numel()
    return BY_RESULT.get(name, 0) * x.numel()


def executed(
    bound: BoundRequest, kernel: str, taps: Collection[str] = ("output",), selection: Selection = EVERYTHING
) -> tuple[Counting, Counting]:
    """Count a real pass over random tensors, and the way back to every input and parameter."""
    real = filled(bound)
    uploaded = compute.upload(real, torch.device("cpu"))
    tensors, parameters, dtype = uploaded.tensors, dict(uploaded.parameters), TORCH_DTYPES[bound.dtype]
    if bound.padded:
        tensors["key_mask"] = tensors["key_mask"].clone()
        tensors["key_mask"][-1, -1] = bound.sequence_keys == 1  # padding hides no whole tile
    floats = [x for name, x in tensors.items() if x.is_floating_point() and name != "mask"]
    leaves = [*floats, *parameters.values()]

    def run(taps: Collection[str]) -> Tensor:
        problem = problem_of(real, tensors, parameters)
        found = attend(problem, {*taps} - {"output"}, selection, kernel=kernel)
        _ = [x.to(dtype) for x in found.taps.values()]  # as the reply has them
        return found.context if real.module is None else project_out(parameters, found.context)

    with _keys_are_found_uncounted():
        with torch.no_grad(), Counting() as forward:
            run(taps)
        for x in leaves:
            x.requires_grad_()
        output = run(())
        upstream = torch.ones_like(output)
        with Counting() as backward:
            found = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
            _ = [x.to(dtype) for x in found if x is not None]
    return forward, backward


def problem_of(bound: BoundRequest, tensors: dict[str, Tensor], parameters: dict[str, Tensor]) -> Problem:
    """The attention inside the request."""
    sizes = bound.sizes

    def by_head(*three: Tensor) -> tuple[Tensor, ...]:
        return three if sizes is None else project(parameters, sizes, *three)

    apart = None if sizes is None or not bound.apart else partial(project, parameters, sizes, by="global")
    learned = {name: parameters[name] for name in learned_of(bound.spec, bound.widths)}
    prepared = make_problem(bound.spec, tensors, learned, by_head, projected=sizes is not None, apart=apart)
    tokens = tensors.get("key", tensors["query"])
    given = running(bound.spec, tensors, parameters, tokens, wanted="return_state" in bound.sent)
    return replace(prepared, recurrent=given, dropout=bound.dropout)


@contextmanager
def _keys_are_found_uncounted() -> Iterator[None]:
    """Leave out of the account how a host finds the keys of each block."""

    def uncounted(find: Callable[..., Any], *args: Any) -> Any:
        with _disable_current_modes():
            return find(*args)

    kinds, firsts, real_in_any = PositionLayout.kinds, query_blocks.firsts, query_blocks.real_in_any
    PositionLayout.kinds = lambda *args: uncounted(kinds, *args)  # type: ignore[method-assign]
    query_blocks.firsts, query_blocks.real_in_any = partial(uncounted, firsts), partial(uncounted, real_in_any)
    try:
        yield
    finally:
        PositionLayout.kinds = kinds  # type: ignore[method-assign]
        query_blocks.firsts, query_blocks.real_in_any = firsts, real_in_any
