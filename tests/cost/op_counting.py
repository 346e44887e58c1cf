"""Counts what PyTorch executes, operation by operation: the independent account that the cost model is held against.

A view, an allocation and a look at a shape do no work. Every other operation reads each tensor that it is given once
(the same one in two places counts once, a dimension of stride 0 as a single element) and writes what it gives back, or
what it changes in place.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

IDLE = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "lift_fresh", "is_same_size",
    "_local_scalar_dense", "resize_", "promote_types",
}  # fmt: skip
FILLS = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
"""Given a tensor for its shape alone."""
PICKS = {"index_select", "index", "gather", "embedding"}
OVERWRITES = {"fill_", "zero_", "copy_", "random_", "normal_"}
"""In place, without looking at what was there."""
ELEMENTARY = {
    "exp", "exp_", "exp2", "exp2_", "log", "log_", "tanh", "tanh_", "sqrt", "sqrt_", "rsqrt", "sin", "cos", "erf",
    "sigmoid", "sigmoid_", "elu",
}  # fmt: skip
"""One elementary function for each element of the answer."""


@dataclass
class Counted:
    read: int = 0
    written: int = 0
    transcendentals: int = 0
    operations: int = 0
    matmul: int = 0
    names: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)


class Counting(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {id(x): extent(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **kwargs)
        self._count(func, args, kwargs, out, before)
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, before: dict[int, int]) -> None:
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in IDLE:
            return
        given = {alias(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given.values()}
        inplace = name.endswith("_") and not name.endswith("__")
        if name == "copy_" and alias(args[0]) == alias(args[1]):
            return  # onto itself, as ``x[i] += y`` ends
        if not inplace and "out" not in kwargs and made and all(x.untyped_storage()._cdata in known for x in made):
            return  # a view after all, as reshape gives where it can
        read = 0 if name in FILLS else sum(extent(x) for x in given.values())
        if name in PICKS:  # what is picked of the first tensor, not all of it
            read += extent(made[0]) - extent(args[0])
        if inplace and name in OVERWRITES:
            read -= extent(args[0])
        if "out" in kwargs and alias(kwargs["out"]) not in {
            alias(x) for x in tree_leaves(args) if isinstance(x, Tensor)
        }:
            read -= extent(kwargs["out"])
        counted = self.counted
        written = sum(extent(x) for x in made)
        counted.read += read
        counted.written += written
        counted.operations += 1
        functions = transcendentals(name, args, made)
        counted.transcendentals += functions
        packet = func._overloadpacket
        matmul = 0
        if packet in flop_registry:
            matmul = flop_registry[packet](*args, **kwargs, out_val=out)
            counted.matmul += matmul
        counted.names[name] += 1
        shapes = [f"{tuple(x.shape)}" for x in given.values()]
        counted.log.append(f"{name:34s} r{read:<8d} w{written:<8d} t{functions:<6d} {' '.join(shapes)}")


def transcendentals(name: str, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Elementary functions of one operation, by element."""
    if name in ELEMENTARY:
        return made[0].numel()
    if name == "_softmax":
        return made[0].numel()
    if name == "logsumexp":
        return args[0].numel() + made[0].numel()
    if name == "elu_backward":  # of what went in, the exponential once more
        return made[0].numel()
    if name == "log_sigmoid_forward":  # an exponential and a logarithm
        return 2 * made[0].numel()
    if name == "linalg_vector_norm":
        return made[0].numel()
    if name in {"pow", "pow_"}:
        exponent = args[1]
        whole = isinstance(exponent, int | float) and float(exponent).is_integer()
        return 0 if whole else made[0].numel()
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _pairs(args[0], args[1], causal=len(args) > 4 and args[4])
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _pairs(args[1], args[2], causal=args[7])
    return 0


def _pairs(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """Pairs whose weights a fused kernel finds: where it is told that they are causal, those up to the diagonal."""
    rows = (min(row + 1, k.shape[2]) if causal else k.shape[2] for row in range(q.shape[2]))
    return q.shape[0] * q.shape[1] * sum(rows)


def extent(x: Tensor) -> int:
    """Bytes of a tensor, what is expanded counted once."""
    return prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size) * x.element_size()


def alias(x: Tensor) -> tuple[Any, ...]:
    """The same for two names of one tensor."""
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


def count(run: Callable[[], Any]) -> tuple[Any, Counted]:
    """What a function gives, and what was executed for it."""
    with Counting() as mode:
        found = run()
    return found, mode.counted
