"""Steps that put elements together, cut them apart, or lay them out anew."""

from collections.abc import Sequence

from attention_service.core.steps.basics import _WHOLE
from attention_service.core.tape import (
    CUT_ROWS,
    CUT_SPLIT,
    NARROW_ROWS,
    NARROW_SPLIT,
    ROWS,
    SPLIT,
    TURNED,
    Dims,
    Number,
    Sketch,
    Tape,
)

_CUT = {ROWS: CUT_ROWS, SPLIT: CUT_SPLIT}


_NARROW = {ROWS: NARROW_ROWS, SPLIT: NARROW_SPLIT}


def cat(tape: Tape, xs: Sequence[Sketch], dim: int, *, reads: Number | None = None) -> Sketch:
    """Beside one another along a dimension; back, parts of the gradient. ``reads``: bytes, where some are expanded."""
    dims = list(xs[0].dims)
    dims[dim] = sum(x.dims[dim] for x in xs)
    y = Sketch(tuple(dims), xs[0].itemsize, tracked=any(x.tracked for x in xs))
    tape.does(sum(x.bytes for x in xs) if reads is None else reads, y.bytes)

    def step() -> None:
        cut = _CUT.get(y.gradient_lies, y.gradient_lies) if dim == 2 and len(xs) > 1 else y.gradient_lies
        for x in xs:
            tape.give(x, x.size, cut)

    return tape.later(y, step) if y.tracked else y


def part(tape: Tape, x: Sketch, dims: Dims) -> Sketch:
    """A slice of x along its last dimension: a view; back, zeros around the gradient."""
    y = Sketch(dims, x.itemsize, _NARROW.get(x.lies, x.lies), tracked=x.tracked)

    def step() -> None:
        tape.does(y.returned, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def view(tape: Tape, x: Sketch, dims: Dims) -> Sketch:
    """X in another shape, which takes nothing."""
    y = Sketch(dims, x.itemsize, tracked=x.tracked)
    return tape.later(y, lambda: tape.give(x, y.gradient)) if y.tracked else y


def copied(tape: Tape, x: Sketch) -> Sketch:
    """X row by row; back, the gradient as it comes."""
    y = Sketch(x.dims, x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, y.bytes)
    return tape.later(y, lambda: tape.give(x, y.gradient, y.gradient_lies)) if y.tracked else y


def for_each_head(tape: Tape, x: Sketch, heads: Number) -> Sketch:
    """``[B, Hkv, K, W]`` to ``[B, H, K, W]``, each repeated; back, summed."""
    y = Sketch((x.dims[0], heads, *x.dims[2:]), x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        if y.size != x.size:
            tape.does(y.returned, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def split_heads(tape: Tape, x: Sketch, heads: Number) -> Sketch:
    """``[B, L, heads·W]`` to ``[B, heads, L, W]``, a view; back, copied where the gradient is not laid out so."""
    batch, length, width = x.dims
    y = Sketch((batch, heads, length, width / heads), x.itemsize, SPLIT, tracked=x.tracked)

    def step() -> None:
        lies, long = y.gradient_lies, batch > 1 and length > 1
        if (
            (lies == ROWS and heads > 1 and length > 1)
            or (lies == CUT_ROWS and (heads > 1 or long))
            or (lies in (TURNED, CUT_SPLIT) and long)
        ):
            tape.does(y.returned, y.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def merge_heads(tape: Tape, x: Sketch) -> Sketch:
    """``[B, heads, L, W]`` to ``[B, L, heads·W]``, copied unless it lies so."""
    batch, heads, length, width = x.dims
    if heads > 1 and (x.lies in _WHOLE or (x.lies != SPLIT and length > 1)):
        x = copied(tape, x)
    y = Sketch((batch, length, heads * width), x.itemsize, tracked=x.tracked)
    return tape.later(y, lambda: tape.give(x, y.gradient, SPLIT)) if y.tracked else y


def pieces(tape: Tape, x: Sketch, lengths: Sequence[tuple[Number, Number]]) -> list[Sketch]:
    """X cut along the tokens, into so many of each length: views; back, put together, zeros where nothing came.

    lengths: of each kind its length, and how often it is there.
    """
    lies = x.lies if len(lengths) == 1 and lengths[0][1] == 1 else _CUT.get(x.lies, x.lies)
    if any(length == x.dims[2] for length, _ in lengths):
        lies = x.lies
    found = [Sketch((*x.dims[:2], length, *x.dims[3:]), x.itemsize, lies, tracked=x.tracked) for length, _ in lengths]

    def step() -> None:
        read: Number = 0
        for each, (_, times) in zip(found, lengths, strict=True):
            if not each.came:
                tape.does(0, times * each.bytes, 0, times)
            read += times * (each.returned if each.came else each.bytes)
        tape.does(read, x.bytes)
        tape.give(x, x.size)

    if x.tracked:
        tape.later_of_any(found, step)
    return found


def picked(tape: Tape, table: Sketch, index: Sketch, dims: Dims) -> Sketch:
    """Entries of a table by their places; back, added to a table of zeros."""
    y = Sketch(dims, table.itemsize, tracked=table.tracked)
    tape.does(y.bytes + index.bytes, y.bytes)

    def step() -> None:
        tape.does(0, table.bytes)
        tape.does(table.bytes + index.bytes + y.returned, table.bytes)
        tape.give(table, table.size)

    return tape.later(y, step) if y.tracked else y


def halves(tape: Tape, x: Sketch, dims: Dims) -> tuple[Sketch, Sketch]:
    """The first and second half of each row; back, put together again."""
    a, b = (Sketch(dims, x.itemsize, x.lies, tracked=x.tracked) for _ in range(2))

    def step() -> None:
        tape.does(a.returned + b.returned, x.bytes)
        tape.give(x, x.size)

    if x.tracked:
        tape.later(a, step)
    return a, b


def expanded(tape: Tape, x: Sketch, dims: Dims) -> Sketch:
    """X repeated along some dimensions without a copy; back, summed over them."""
    y = Sketch(dims, x.itemsize, tracked=x.tracked)

    def step() -> None:
        if y.size != x.size:
            tape.does(y.returned, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y
