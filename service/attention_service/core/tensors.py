"""Tensors as such: from and to numpy, between the host and a GPU, entries along a dimension, and grouped heads.

numpy has no bfloat16 of its own: on its side it is that of ml_dtypes, and crosses over as the int16 of the same bits.

From memory that is not pinned the CUDA driver copies to a buffer of its own and waits for each piece. Copies go through
pinned memory here, piece by piece, so that the host's copy and the bus's overlap. PyTorch keeps pinned memory for
reuse, and gives none of it out before the copies that read it have ended (``torch.cuda.CachingHostAllocator``). It
pins powers of two, so one copy pins at most ``MOST_PINNED`` bytes.

Grouped heads: query head h reads key/value head h // (H / Hkv) (Ainslie et al. 2023, section 2.2).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""The dtypes of the wire, by name."""

PIECE = 2**22
"""Bytes of a piece: long enough for the bus to be at its full rate, short beside a body that is worth the trouble."""
MOST_PINNED = 2**26
"""Bytes that one copy pins."""
_NAME_OF_TORCH_DTYPE: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ALLOCATE: ContextVar[Callable[[Sequence[int], torch.dtype], Tensor | None] | None] = ContextVar(
    "allocate", default=None
)
_LATER: ContextVar[list[Tensor] | None] = ContextVar("sums on a GPU that are looked at later", default=None)
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_USUAL: Final = (np.dtype(np.float32), np.dtype(np.float64))


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Return the wire's name of a torch dtype. Raises KeyError for a dtype without one."""
    return _NAME_OF_TORCH_DTYPE[dtype]


def to_torch(array: NDArray[Any]) -> Tensor:
    """The array as a tensor on the host, of the same shape and dtype.

    The memory is shared, also that of a read-only array: write to the tensor only if the array is writable. A
    byte order that is not the machine's and a negative stride cost a copy.
    """
    if type(array) is np.ndarray and array.dtype in _USUAL and array.flags.carray:  # as most are
        return torch.from_numpy(array)
    plain = np.asarray(array)  # a subclass may not be passed on
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    if any(stride < 0 for stride in plain.strides):
        plain = plain.copy()
    if plain.dtype == _BFLOAT16:
        return torch.from_numpy(_writable(plain.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(_writable(plain))


class _Claim:
    """Exposes an array's memory to numpy as writable; the new array keeps this object alive, and this the old array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself, or a view of its read-only memory about which torch does not warn.

    Filtering that warning instead would change the filters of every thread.
    """
    return array if array.flags.writeable else np.asarray(_Claim(array))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array, of the same shape and dtype; shares the memory of a tensor that is on the host."""
    host = tensor if tensor.device.type == "cpu" else to_host(tensor)
    if host.requires_grad:
        host = host.detach()
    if host.dtype == torch.bfloat16:
        bits: NDArray[Any] = host.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    plain: NDArray[Any] = host.numpy()
    return plain


def wide(x: Tensor, *, copy: bool = False) -> Tensor:
    """Return floats in float32, or in float64 if they are that wide; ``copy``: always other memory."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=copy)


def to_device(host: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device, in this dtype or its own; it may still be on its way, which only the device notices.

    It is converted on the way: the device holds it once.
    """
    dtype = dtype or host.dtype
    if host.dtype == dtype and host.device == device:
        return host
    if device.type == "meta":
        return torch.empty(host.shape, dtype=dtype, device=device)  # its own strides: of a blank request they are 0
    if device.type != "cuda" or host.device.type != "cpu" or not host.numel():
        return host.to(device, dtype)
    placed = torch.empty(host.shape, dtype=dtype, device=device)
    numbers = max(1, PIECE // dtype.itemsize)
    pieces = zip(torch.split(host.reshape(-1), numbers), torch.split(placed.view(-1), numbers), strict=True)
    for index, (source, target) in enumerate(pieces, 1):
        pinned = torch.empty(source.shape, dtype=dtype, pin_memory=True)
        target.copy_(pinned.copy_(source), non_blocking=True)
        if not index % (MOST_PINNED // PIECE):  # the next pieces take the same memory
            torch.cuda.current_stream(device).synchronize()
    return placed


def constant(numbers: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """These numbers on the device. A GPU is not waited for, as it is where they are made on it."""
    return to_device(torch.tensor(numbers, dtype=dtype), device)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, all of it there. Unless it is large, the device wrote it to pinned memory by itself."""
    return all_to_host([tensor])[0]


def all_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, as ``to_host`` has them. The device is waited for once, unless they are large."""
    hosts, free_bytes = [], MOST_PINNED
    for tensor in tensors:
        if tensor.device.type != "cuda" or not 0 < tensor.nbytes <= free_bytes:
            hosts.append(tensor.cpu())
            continue
        free_bytes -= tensor.nbytes
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        hosts.append(pinned.copy_(tensor, non_blocking=True))
    if free_bytes < MOST_PINNED:
        torch.cuda.current_stream(next(x.device for x in tensors if x.is_cuda)).synchronize()
    return hosts


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The tensor of which these are parts along a dimension, one behind the other in memory; None if they are not."""
    first, storage = parts[0], parts[0].untyped_storage()._cdata
    end = first.storage_offset()
    for part in parts:
        others = part.shape[:dim] + part.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :]
        if others or part.stride() != first.stride() or part.dtype != first.dtype:
            return None
        if part.storage_offset() != end or part.untyped_storage()._cdata != storage:
            return None
        end += part.shape[dim] * part.stride(dim)
    sizes = list(first.shape)
    sizes[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(sizes, first.stride(), first.storage_offset())


def pick(x: Tensor, dim: int, index: Sequence[int]) -> Tensor:
    """The listed entries of one dimension, in the order of the list; a view of a single one and of a range."""
    if len(index) == 1:
        return x.narrow(dim, index[0], 1)
    if isinstance(index, range) and index.step == 1:
        return x.narrow(dim, index.start, len(index))
    return x.index_select(dim, constant(index, x.device))


def product(x: Tensor, y: Tensor) -> Tensor:
    """The matrix product by head, x ``[B, H, Q, N]`` times y ``[B, Hkv, N, M]``, to ``[B, H, Q, M]``."""
    batch, heads, queries, inner = x.shape
    kv_heads, outer = y.shape[1], y.shape[3]
    if heads == kv_heads:
        return x @ y
    # Stack the queries of one group, so that y is never copied per query head.
    stacked = x.reshape(batch, kv_heads, heads // kv_heads * queries, inner)
    return (stacked @ y).reshape(batch, heads, queries, outer)


def product_backward(x: Tensor, upstream: Tensor, kv_heads: int) -> Tensor:
    """The gradient ``[B, Hkv, N, M]`` of y in ``product(x, y)``, from x ``[B, H, Q, N]`` and that of the product."""
    batch, heads, queries, inner = x.shape
    rows = heads // kv_heads * queries
    return x.reshape(batch, kv_heads, rows, inner).mT @ upstream.reshape(batch, kv_heads, rows, upstream.shape[3])


def head_read_by(head: int, heads: int, kv_heads: int) -> int:
    """The key/value head that a query head reads."""
    return head // (heads // kv_heads)


def heads_read_by(chosen: Sequence[int], heads: int, kv_heads: int) -> Sequence[int]:
    """Return one key/value head for each of the query heads; of a range that reads whole ones, each of them once."""
    group = heads // kv_heads
    if isinstance(chosen, range) and chosen and (chosen.start % group == 0 or len(chosen) < group):
        read = range(chosen.start // group, (chosen.stop - 1) // group + 1)
        if len(read) == 1 or len(chosen) == len(read) * group:
            return read
    return [head // group for head in chosen]


def one_for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, K, W]`` to ``[B, H, K, W]``, each key/value head repeated for the queries that read it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Sum a gradient ``[B, H, K, W]`` over the query heads that read one key/value head."""
    batch, heads, keys, width = x.shape
    return x if heads == kv_heads else x.reshape(batch, kv_heads, heads // kv_heads, keys, width).sum(2)


# ── memory of results ────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def results_in(allocate: Callable[[Sequence[int], torch.dtype], Tensor | None]) -> Iterator[None]:
    """Have large results of a CPU made in memory that ``allocate`` gives out, None for any other, within the block."""
    before = _ALLOCATE.set(allocate)
    try:
        yield
    finally:
        _ALLOCATE.reset(before)


def empty_result(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of a result, without any numbers yet."""
    allocate = _ALLOCATE.get()
    placed = None if allocate is None or like.device.type != "cpu" else allocate(shape, like.dtype)
    return like.new_empty(shape) if placed is None else placed


# ── sums on a GPU that nobody waits for ──────────────────────────────────────────────────────────────────────────────


@contextmanager
def assumed_finite() -> Iterator[list[Tensor]]:
    """Take sums on a GPU for finite within the block, without waiting for them; the list has those to be looked at."""
    sums: list[Tensor] = []
    before = _LATER.set(sums)
    try:
        yield sums
    finally:
        _LATER.reset(before)


def assumed_sums() -> list[Tensor] | None:
    """Return the sums that were taken for finite and not looked at; None outside ``assumed_finite``."""
    return _LATER.get()


def is_finite(tensor: Tensor) -> bool:
    """True if no number is NaN or infinite; found without a copy of the tensor."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    least, most = torch.aminmax(tensor.detach())
    return bool(least.isfinite() & most.isfinite())


def are_finite(*sums: Tensor) -> bool:
    """Return True if all are finite, or taken for finite."""
    if (later := _LATER.get()) is None or not sums[0].is_cuda:
        return math.isfinite(sum(sums[1:], sums[0]))
    later += sums
    return True
