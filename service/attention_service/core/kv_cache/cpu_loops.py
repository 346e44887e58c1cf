"""Attention of one query a head over runs of a cache on a CPU, in one pass that Numba compiles.

Each key and value is read once for all query heads of its group, in blocks: scores, their running maximum and sum,
weighted values. Products and sums are float32 for every dtype of the cache. The innermost loops are written as vector
instructions: LLVM adds up each dot product by itself, which takes longer than the product where heads are narrow. Here
the sums of sixteen keys are added up together, and the next rows are requested early. Plain loops take 1.2 to 1.9 times
as long. A processor with shorter vectors computes them in parts.

From top to bottom: how numbers are read; operations on rows (``dots``, ``weigh``) and on tiles of several queries
(``transpose``, ``tile_dots``, ``tile_weigh``); the loops over blocks; ``decode``, which is called.

All is in one file, since Numba keeps the machine code on disk until this file changes. ``core.decoding`` calls it.

Source: Milakov & Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers in a vector. Widths of keys and values are a multiple of it."""
ROWS = 16
"""Rows of keys or values that one step reads. It is LANES, so that their sums fill one vector."""

QUERIES = 4
"""Queries of a tile: those that read one vector of keys or values together."""

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_CACHE_LINE = 64
_FUSED = ("contract",)

_ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)

Loader = Callable[..., Any]


def _float32(builder: Any, address: Any, count: int = LANES) -> Any:
    return _loaded(builder, address, _of(_F32, count))


def _bfloat16(builder: Any, address: Any, count: int = LANES) -> Any:
    wide = _of(_I32, count)
    bits = builder.zext(_loaded(builder, address, _of(ir.IntType(16), count)), wide)
    return builder.bitcast(builder.shl(bits, ir.Constant(wide, [16] * count if count > 1 else 16)), _of(_F32, count))


def _float16(builder: Any, address: Any, count: int = LANES) -> Any:
    return builder.fpext(_loaded(builder, address, _of(ir.HalfType(), count)), _of(_F32, count))


def _of(kind: Any, count: int) -> Any:
    return ir.VectorType(kind, count) if count > 1 else kind


def _loaded(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


_STORED: dict[Any, tuple[Loader, int]] = {
    types.float32: (_float32, 4),
    types.uint16: (_bfloat16, 2),
    types.int16: (_float16, 2),
}
"""The loader of a number and its bytes, by the dtype that stands for the cache."""


def _kind(kind: Any) -> tuple[Loader, int]:
    """The loader of the numbers that an array of this type stands for."""
    return _STORED[kind.dtype]


def _dots(*, fetching: bool) -> Any:
    """Make ``dots``, or one for ROWS keys that also starts to load keys of a later step."""

    @intrinsic
    def dots(typing: Any, kind: Any, q: Any, keys: Any, row: Any, last: Any, chunks: Any, out: Any) -> Any:
        """Write the dot products of a query with ROWS keys: float32 at the address ``out``.

        ``q`` is the address of float32 numbers, ``keys`` that of the first key; keys are ``row`` bytes apart and
        ``chunks`` vectors long. The key at the index ``last`` stands for those behind it, too.
        """
        load, size = _kind(kind)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, q, keys, row, last, chunks, out = arguments
            offsets = _offsets(builder, row, None if fetching else last)
            sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(ROWS)]
            for total in sums:
                builder.store(_ZEROS, total)
            with cgutils.for_range(builder, chunks) as loop:
                mine = _float32(builder, _at(builder, q, loop.index, 4 * LANES))
                first = _at(builder, keys, loop.index, size * LANES)
                if fetching:
                    _fetch(builder, keys, row, loop.index, size)
                for offset, total in zip(offsets, sums, strict=True):
                    address = builder.add(first, offset)
                    builder.store(_multiply_add(builder, mine, load(builder, address), builder.load(total)), total)
            found = _sums(builder, [builder.load(total) for total in sums])
            builder.store(found, builder.inttoptr(out, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 6), generate

    return dots


def _weigh(*, fetching: bool) -> Any:
    """Make ``weigh``, or one for ROWS values that also starts to load values of a later step."""

    @intrinsic
    def weigh(typing: Any, kind: Any, weights: Any, values: Any, row: Any, last: Any, chunks: Any, total: Any) -> Any:
        """Add ROWS weighted values to the float32 numbers at the address ``total``; the rest is as for ``dots``."""
        load, size = _kind(kind)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, weights, values, row, last, chunks, total = arguments
            offsets = _offsets(builder, row, None if fetching else last)
            each = [_repeated(builder, _float32(builder, builder.add(weights, _I64(4 * j)), 1)) for j in range(ROWS)]
            with cgutils.for_range(builder, chunks) as loop:
                first = _at(builder, values, loop.index, size * LANES)
                if fetching:
                    _fetch(builder, values, row, loop.index, size)
                place = builder.inttoptr(_at(builder, total, loop.index, 4 * LANES), _VECTOR.as_pointer())
                # Several sums, so that a multiplication does not wait for the one before it.
                sums = [builder.load(place, align=4), _ZEROS, _ZEROS, _ZEROS]
                for j, weight in enumerate(each):
                    address = builder.add(first, offsets[j])
                    sums[j % 4] = _multiply_add(builder, weight, load(builder, address), sums[j % 4])
                found = builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))
                builder.store(found, place, align=4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 6), generate

    return weigh


@intrinsic
def transpose(typing: Any, kind: Any, keys: Any, row: Any, chunks: Any, out: Any) -> Any:
    """Write ROWS keys in float32, each number of all keys as one vector, and start to load keys of a later step.

    ``out`` is the address of ``[D, ROWS]``; the rest is as for ``dots``.
    """
    load, size = _kind(kind)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, keys, row, chunks, out = arguments
        with cgutils.for_range(builder, chunks) as loop:
            first = _at(builder, keys, loop.index, size * LANES)
            _fetch(builder, keys, row, loop.index, size)
            found = [load(builder, builder.add(first, builder.mul(row, _I64(j)))) for j in range(ROWS)]
            place = _at(builder, out, loop.index, 4 * LANES * ROWS)
            for j, vector in enumerate(_transposed(builder, found)):
                address = builder.add(place, _I64(4 * LANES * j))
                builder.store(vector, builder.inttoptr(address, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 4), generate


@intrinsic
def tile_dots(typing: Any, q: Any, width: Any, keys: Any, out: Any, step: Any) -> Any:
    """Write the dot products of QUERIES queries with ROWS transposed keys.

    ``q`` and ``keys`` are the addresses of ``[QUERIES, D]`` and ``[D, ROWS]``; the results of two queries are ``step``
    bytes apart.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        q, width, keys, out, step = arguments
        sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(2)] for _ in range(QUERIES)]
        for pair in sums:
            for total in pair:
                builder.store(_ZEROS, total)
        with cgutils.for_range(builder, builder.udiv(width, _I64(2))) as loop:
            for part in range(2):  # two sums, so that a multiplication does not wait for the one before it
                key = _float32(builder, _at(builder, builder.add(keys, _I64(4 * LANES * part)), loop.index, 8 * LANES))
                for r, pair in enumerate(sums):
                    mine = builder.add(builder.add(q, _I64(4 * part)), builder.mul(width, _I64(4 * r)))
                    number = _repeated(builder, _float32(builder, _at(builder, mine, loop.index, 8), 1))
                    builder.store(_multiply_add(builder, number, key, builder.load(pair[part])), pair[part])
        for r, (even, odd) in enumerate(sums):
            place = builder.inttoptr(builder.add(out, builder.mul(step, _I64(r))), _VECTOR.as_pointer())
            builder.store(builder.fadd(builder.load(even), builder.load(odd)), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def tile_weigh(typing: Any, kind: Any, weights: Any, step: Any, values: Any, row: Any, chunks: Any, total: Any) -> Any:
    """Add ROWS values, weighted for each of QUERIES queries, to ``[QUERIES, V]`` at the address ``total``.

    The weights of two queries are ``step`` bytes apart; the rest is as for ``weigh``.
    """
    load, size = _kind(kind)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, weights, step, values, row, chunks, total = arguments
        with cgutils.for_range(builder, chunks) as loop:
            first = _at(builder, values, loop.index, size * LANES)
            _fetch(builder, values, row, loop.index, size)
            width = builder.mul(chunks, _I64(4 * LANES))
            starts = [
                _at(builder, builder.add(total, builder.mul(width, _I64(r))), loop.index, 4 * LANES)
                for r in range(QUERIES)
            ]
            sums = [_float32(builder, start) for start in starts]
            for j in range(ROWS):
                value = load(builder, builder.add(first, builder.mul(row, _I64(j))))
                for r in range(QUERIES):
                    place = builder.add(builder.add(weights, builder.mul(step, _I64(r))), _I64(4 * j))
                    weight = _repeated(builder, _float32(builder, place, 1))
                    sums[r] = _multiply_add(builder, weight, value, sums[r])
            for start, found in zip(starts, sums, strict=True):
                builder.store(found, builder.inttoptr(start, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), generate


dots, dots_ahead = _dots(fetching=False), _dots(fetching=True)
weigh, weigh_ahead = _weigh(fetching=False), _weigh(fetching=True)


@intrinsic
def power_of_two(typing: Any, exponent: Any) -> Any:
    """Return 2ⁿ as float32, for a whole int32 n from −126 to 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        biased = builder.add(arguments[0], _I32(127))
        return builder.bitcast(builder.shl(biased, _I32(23)), _F32)

    return types.float32(types.int32), generate


@intrinsic
def largest_of(typing: Any, scores: Any, chunks: Any, least: Any) -> Any:
    """Return the largest of ``least`` and of float32 vectors at an address. Among others a NaN may be passed over."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, chunks, least = arguments
        found = cgutils.alloca_once_value(builder, _repeated(builder, least))
        with cgutils.for_range(builder, chunks) as loop:
            each = _float32(builder, _at(builder, scores, loop.index, 4 * LANES))
            builder.store(_larger(builder, each, builder.load(found)), found)
        vector, width = builder.load(found), LANES
        while width > 1:
            width //= 2
            other = _shuffled(builder, vector, vector, [(i + width) % LANES for i in range(LANES)])
            vector = _larger(builder, vector, other)
        return builder.extract_element(vector, _I32(0))

    return types.float32(types.int64, types.int64, types.float32), generate


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _at(builder: Any, address: Any, index: Any, step: int) -> Any:
    return builder.add(address, builder.mul(index, _I64(step)))


def _offsets(builder: Any, row: Any, last: Any | None) -> list[Any]:
    """Return the bytes from the first of ROWS rows to each; with ``last``, none is behind that row."""
    indices = [_I64(j) for j in range(ROWS)]
    if last is not None:
        indices = [builder.select(builder.icmp_signed("<", index, last), index, last) for index in indices]
    return [builder.mul(row, index) for index in indices]


def _fetch(builder: Any, rows: Any, row: Any, chunk: Any, size: int) -> None:
    """Start to load the lines that stand, two steps of ROWS rows ahead, for a chunk of this step.

    The address may lie behind the end of the memory. The processor's own prefetching does not follow so many rows.
    """
    byte, lines = ir.IntType(8).as_pointer(), ROWS * LANES * size // _CACHE_LINE
    kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    first = _at(builder, builder.add(rows, builder.mul(row, _I64(2 * ROWS))), chunk, lines * _CACHE_LINE)
    for line in range(lines):
        address = builder.inttoptr(builder.add(first, _I64(line * _CACHE_LINE)), byte)
        builder.call(function, [address, _I32(0), _I32(3), _I32(1)])


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=_FUSED), z, flags=_FUSED)


def _repeated(builder: Any, x: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, _I32(0))
    return _shuffled(builder, one, one, [0] * LANES)


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """Add up the numbers of each of LANES vectors, to one vector of the sums.

    Each round adds the halves of every part of a vector, and puts the results of two vectors side by side.
    """
    width = LANES
    while len(vectors) > 1:
        lower = [part * width + i for part in range(LANES // width) for i in range(width // 2)]
        upper = [i + width // 2 for i in lower]
        vectors = [
            builder.fadd(
                _shuffled(builder, x, y, lower + [LANES + i for i in lower]),
                _shuffled(builder, x, y, upper + [LANES + i for i in upper]),
            )
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    return vectors[0]


def _transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Transpose a square of LANES vectors: exchange the blocks beside its diagonal, from large ones to single lanes."""
    found = list(vectors)
    for distance in (8, 4, 2, 1):
        for i in range(LANES):
            if not i & distance:
                x, y = found[i], found[i | distance]
                upper = [LANES + (lane ^ distance) if lane & distance else lane for lane in range(LANES)]
                lower = [LANES + lane if lane & distance else lane ^ distance for lane in range(LANES)]
                found[i], found[i | distance] = _shuffled(builder, x, y, upper), _shuffled(builder, x, y, lower)
    return found


def _shuffled(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


BLOCK = 128
"""Keys to a block: their scores for one group of heads, and the values, stay in the first caches."""
_TILED = 8
"""Queries of a group from which on to transpose the keys costs less than to add up each dot product."""
_EXACT = {"contract", "reassoc", "nsz", "arcp"}
"""Freedoms of the compiler: it may reorder sums, and must keep NaN and infinity."""
F = np.float32
_LOWEST = F(-3e38)
KEYS, VALUES, LENGTH, KEY_HEAD, VALUE_HEAD, KEY_ROW, VALUE_ROW, COLUMNS = range(8)
"""Columns of the table of runs: two addresses, a number of slots, and four strides in bytes."""


@njit(inline="always", fastmath=_EXACT)
def _exponential(x: Any) -> Any:
    """exp(x) for x ≤ 0, to 2e-7 of itself (Cephes, expf)."""
    x = F(-87) if x < F(-87) else x
    n = np.floor(x * F(1.4426950408889634) + F(0.5))
    r = x - n * F(0.693359375)
    r = r - n * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    p = p * r * r + r + F(1)
    return p * power_of_two(np.int32(n))


@njit(inline="always", fastmath=_EXACT)
def _score_block(
    kind: Any, q: Any, width: Any, key: Any, row: Any, count: Any, scores: Any, few: Any, tile: Any
) -> None:
    """Write the scores of the group's queries, the first of which is at the address ``q``, and of a block of keys."""
    group, chunks, whole = len(scores), width // LANES, count // ROWS * ROWS
    out, step = scores.ctypes.data, 4 * scores.shape[1]
    tiled = group // QUERIES * QUERIES if group >= _TILED else 0
    for j in range(0, whole, ROWS):
        if tiled:
            transpose(kind, key + j * row, row, chunks, tile.ctypes.data)
            for r in range(0, tiled, QUERIES):
                tile_dots(q + 4 * width * r, width, tile.ctypes.data, out + r * step + 4 * j, step)
        else:
            dots_ahead(kind, q, key + j * row, row, ROWS - 1, chunks, out + 4 * j)
        for r in range(max(tiled, 1), group):
            dots(kind, q + 4 * width * r, key + j * row, row, ROWS - 1, chunks, out + r * step + 4 * j)
    if count > whole:
        for r in range(group):
            dots(kind, q + 4 * width * r, key + whole * row, row, count - whole - 1, chunks, few.ctypes.data)
            scores[r, whole:count] = few[: count - whole]


@njit(inline="always", fastmath=_EXACT)
def _soften(scores: Any, count: Any, before: Any) -> Any:
    """Replace scores by exp(score − largest); return the largest so far, the sum and what fades older sums."""
    largest: Any = largest_of(scores.ctypes.data, count // LANES, before)
    for j in range(count // LANES * LANES, count):
        largest = scores[j] if scores[j] > largest else largest
    added = F(0)
    for j in range(count):
        weight = _exponential(scores[j] - largest)
        scores[j] = weight
        added += weight
    return largest, added, _exponential(before - largest)


@njit(inline="always", fastmath=_EXACT)
def _weigh_block(kind: Any, scores: Any, value: Any, row: Any, count: Any, total: Any, few: Any) -> None:
    """Add the weighted values of a block."""
    group, width, whole = len(scores), total.shape[1], count // ROWS * ROWS
    sums, chunks = total.ctypes.data, width // LANES
    weights, step, tiled = scores.ctypes.data, 4 * scores.shape[1], group // QUERIES * QUERIES
    for j in range(0, whole, ROWS):
        for r in range(0, tiled, QUERIES):
            into = sums + 4 * r * width
            tile_weigh(kind, weights + r * step + 4 * j, step, value + j * row, row, chunks, into)
        if tiled == 0:
            weigh_ahead(kind, weights + 4 * j, value + j * row, row, ROWS - 1, chunks, sums)
        for r in range(max(tiled, 1), group):
            weigh(kind, weights + r * step + 4 * j, value + j * row, row, ROWS - 1, chunks, sums + 4 * r * width)
    if count > whole:
        few[:] = F(0)
        for r in range(group):
            few[: count - whole] = scores[r, whole:count]
            last, into = count - whole - 1, sums + 4 * r * width
            weigh(kind, few.ctypes.data, value + whole * row, row, last, chunks, into)


def compiled(*, on_disk: bool) -> Callable[..., None]:
    """Return ``decode`` to be compiled at its first call for each dtype of the cache.

    ``on_disk`` keeps the machine code beside this file, or in the user's cache folder; raises RuntimeError if neither
    can be written.
    """
    loops: Callable[..., None] = njit(cache=on_disk, nogil=True, fastmath=_EXACT, error_model="numpy")(decode)
    return loops


def decode(
    kind: Any, q: Any, runs: Any, starts: Any, scale: Any, kv_heads: Any, out: Any, lse: Any, first: Any, last: Any
) -> None:
    """Attend from one query of each head to the runs of its sequence.

    q ``[S, H, D]`` and out ``[S, H, V]``, float32; lse ``[S, H]``; runs ``[R, COLUMNS]``, those of sequence s from
    ``starts[s]`` up to ``starts[s + 1]``. Computes the units from ``first`` up to ``last``; unit u is key/value head
    u mod Hkv of sequence u div Hkv. D and V are multiples of LANES. ``kind`` is empty; its dtype says how the cache is
    stored: float32, uint16 for bfloat16, int16 for float16.
    """
    heads, width, value_width = q.shape[1], q.shape[2], out.shape[2]
    group = heads // kv_heads
    scores, total = np.empty((group, BLOCK), np.float32), np.empty((group, value_width), np.float32)
    largest, divisor, few = np.empty(group, np.float32), np.empty(group, np.float32), np.empty(ROWS, np.float32)
    queries, tile = np.empty((group, width), np.float32), np.empty((width, ROWS), np.float32)
    for unit in range(first, last):
        sequence, head = unit // kv_heads, unit % kv_heads
        queries[:] = q[sequence, head * group : (head + 1) * group] * scale
        total[:] = F(0)
        largest[:] = _LOWEST
        divisor[:] = F(0)
        for index in range(starts[sequence], starts[sequence + 1]):
            run = runs[index]
            keys, values = run[KEYS] + head * run[KEY_HEAD], run[VALUES] + head * run[VALUE_HEAD]
            for start in range(0, run[LENGTH], BLOCK):
                count = min(BLOCK, run[LENGTH] - start)
                key, value = keys + start * run[KEY_ROW], values + start * run[VALUE_ROW]
                _score_block(kind, queries.ctypes.data, width, key, run[KEY_ROW], count, scores, few, tile)
                for r in range(group):
                    largest[r], added, fade = _soften(scores[r], count, largest[r])
                    divisor[r] = divisor[r] * fade + added
                    total[r] *= fade
                _weigh_block(kind, scores, value, run[VALUE_ROW], count, total, few)
        for r in range(group):
            out[sequence, head * group + r] = total[r] / divisor[r]
            lse[sequence, head * group + r] = largest[r] + F(math.log(divisor[r]))
