"""Attention over runs of a cache by the compiled loops: on a CPU, where no key is hidden from any of the queries."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_service.core.kv_cache.partial import Run, Slots

_LOG = logging.getLogger(__name__)
_LANES = 16
"""Widths of keys and values are a multiple of this."""
_STORED = {
    torch.float32: np.empty(0, np.float32),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
}
"""The empty array by which the loops know how a cache is stored."""
_THREAD_SLOTS = 2**14
"""Keys, times query heads, that are worth a thread of their own: 50 µs."""


def prepare(dtype: torch.dtype) -> None:
    """Compile the loops for a cache of this dtype now, rather than at the first step.

    It takes 3 to 6 s, or half a second if the machine code is on disk. Later calls return at once.
    """
    if dtype in _STORED:
        _loops(dtype)


def loops_take(q: Tensor, run: Run[Slots]) -> bool:
    """Return True if the loops can attend from these queries ``[..., D]`` to keys and values such as these.

    They read memory by addresses, where the numbers of a key, and of a value, are adjacent.
    """
    keys, values = run.slab.keys, run.slab.values
    return (
        q.device.type == "cpu"
        and q.dtype in _STORED
        and q.shape[-1] % _LANES == 0
        and values.shape[2] % _LANES == 0
        and keys.stride(2) == values.stride(2) == 1
        and _loops(q.dtype) is not None
    )


def decode(q: Tensor, runs: Sequence[Sequence[Run[Slots]]], scale: float) -> tuple[Tensor, Tensor]:
    """Attend from the queries of each sequence, q ``[S, H, Q, D]``, to all keys of its runs.

    Return the contexts ``[S, H, Q, V]`` and their log-sum-exp ``[S, H, Q]``, both float32.
    """
    attend, context, lse = set_up(q, runs, scale)
    attend()
    return context, lse


def set_up(q: Tensor, runs: Sequence[Sequence[Run[Slots]]], scale: float) -> tuple[Callable[[], None], Tensor, Tensor]:
    """Return what ``decode`` calls, and the results that this call will fill."""
    loops = _loops(q.dtype)
    if loops is None:
        raise RuntimeError("the compiled loops need Numba; ask `loops_take` first")
    slab = runs[0][0].slab
    kv_heads, _, width = slab.values.shape
    sequences, heads, count, _ = q.shape
    rows = sequences, heads * count, -1  # several queries of a head are to the loops as many heads
    query = np.ascontiguousarray(q.float().numpy()).reshape(rows)
    context = np.empty((sequences, heads, count, width), np.float32)
    lse = np.empty((sequences, heads, count), np.float32)
    table, starts = _table(runs), np.array([0, *accumulate(map(len, runs))])
    into = context.reshape(rows), lse.reshape(rows[:2])
    loop = partial(loops, _STORED[slab.keys.dtype], query, table, starts, np.float32(scale), kv_heads, *into)
    units, threads = sequences * kv_heads, torch.get_num_threads()
    if threads > 1:
        slots = int(table[:, 2].sum()) * rows[1]
        threads = min(threads, units, slots // _THREAD_SLOTS)
    return partial(_on_threads, loop, units, threads), torch.from_numpy(context), torch.from_numpy(lse)


def _on_threads(loop: Callable[[int, int], None], units: int, threads: int) -> None:
    """Run a loop over units of work, on so many threads; on this one if they are fewer than two."""
    if threads <= 1:
        loop(0, units)
    else:
        ends = [units * index // threads for index in range(threads + 1)]
        list(_pool(torch.get_num_threads()).map(loop, ends[:-1], ends[1:]))


def _table(runs: Sequence[Sequence[Run[Slots]]]) -> NDArray[np.int64]:
    """The table of runs, sequence after sequence."""
    places: dict[int, tuple[int, ...]] = {}
    rows = []
    for each in runs:
        for run in each:
            place = places.get(id(run.slab))
            if place is None:
                place = places[id(run.slab)] = _place(run.slab)
            keys, values, key_head, value_head, key_row, value_row = place
            first = keys + run.start * key_row, values + run.start * value_row
            rows.append((*first, run.tokens, key_head, value_head, key_row, value_row))
    return np.array(rows)


def _place(slab: Slots) -> tuple[int, ...]:
    """The addresses of a slab's keys and values, and the bytes from head to head and from token to token of each."""
    keys, values = slab.keys, slab.values
    key, value, size = keys.stride(), values.stride(), keys.element_size()
    return keys.data_ptr(), values.data_ptr(), key[0] * size, value[0] * size, key[1] * size, value[1] * size


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "decoding")


@cache
def _loops(dtype: torch.dtype) -> Callable[..., None] | None:
    """The compiled loops for a cache of this dtype; None without Numba. Imported here, since Numba takes 0.5 s."""
    try:
        from attention_service.core.kv_cache import cpu_loops  # noqa: PLC0415
    except ImportError:
        return None
    try:
        return _warm(cpu_loops.compiled(on_disk=True), dtype)
    except Exception:  # whatever is wrong with the files: without them it only takes longer
        _LOG.warning("Numba cannot keep machine code on disk; it compiles anew in each process", exc_info=True)
        return _warm(cpu_loops.compiled(on_disk=False), dtype)


def _warm(loops: Callable[..., None], dtype: torch.dtype) -> Callable[..., None]:
    """Compile by a call without work."""
    query, lse, runs = np.zeros((1, 1, _LANES), np.float32), np.zeros((1, 1), np.float32), np.zeros((1, 7), np.int64)
    loops(_STORED[dtype], query, runs, np.zeros(2, np.int64), np.float32(1), 1, query.copy(), lse, 0, 0)
    return loops
