"""What every step is made of: sizes, sketches of answers, operations that have no way back, and how memory lies."""

from collections.abc import Sequence
from math import prod

from attention_service.core.tape import (
    CUT_ROWS,
    CUT_SPLIT,
    NARROW_ROWS,
    NARROW_SPLIT,
    ROWS,
    SPLIT,
    Dims,
    Number,
    Sketch,
    Tape,
)

_WHOLE = {CUT_ROWS: ROWS, CUT_SPLIT: SPLIT, NARROW_ROWS: ROWS, NARROW_SPLIT: SPLIT}


def size_of(dims: Dims) -> Number:
    """How many elements."""
    return prod(dims)


def together(*xs: Sketch) -> Dims:
    """The shape that they broadcast to."""
    dims = xs[0].dims
    for x in xs:
        other = x.dims
        if other != dims:
            if len(other) > len(dims):
                dims, other = other, dims
            padded = (1,) * (len(dims) - len(other)) + other
            dims = tuple([a if b == 1 else b for a, b in zip(dims, padded, strict=True)])
    return dims


def like(x: Sketch, itemsize: int | None = None, *, tracked: bool | None = None) -> Sketch:
    """A sketch of the same shape."""
    return Sketch(
        x.dims,
        x.itemsize if itemsize is None else itemsize,
        whole(x),
        tracked=x.tracked if tracked is None else tracked,
    )


def filled(tape: Tape, dims: Dims, itemsize: int) -> Sketch:
    """A tensor filled with a number or with indices."""
    x = Sketch(dims, itemsize)
    tape.does(0, x.bytes)
    return x


def plain(tape: Tape, *xs: Sketch, itemsize: int | None = None, functions: int = 0, dims: Dims | None = None) -> Sketch:
    """One elementwise operation, broadcast unless it is said to what, with no way back."""
    if dims is None:
        dims = xs[0].dims if len(xs) == 1 else together(*xs)
    y = Sketch(dims, xs[0].itemsize if itemsize is None else itemsize, lies_of(dims, xs))
    tape.does(sum([x.bytes for x in xs]), y.bytes, functions * y.size)
    return y


def changed(tape: Tape, x: Sketch, *others: Sketch, functions: int = 0) -> Sketch:
    """One elementwise operation in place, with no way back."""
    tape.does(x.bytes + sum(other.bytes for other in others), x.bytes, functions * x.size)
    return x


def reduced(tape: Tape, x: Sketch, dims: Dims, itemsize: int | None = None, functions: int = 0) -> Sketch:
    """A maximum, sum, count or length along some dimensions, with no way back."""
    y = Sketch(dims, x.itemsize if itemsize is None else itemsize)
    tape.does(x.bytes, y.bytes, functions * y.size)
    return y


def apart(x: Sketch, kv_heads: Number) -> bool:
    """Whether the matrices of x, a key/value head's queries below each other, do not lie one after the other."""
    batch, heads, rows, _ = x.dims
    group = heads > kv_heads
    if x.lies == SPLIT:
        return heads > 1 and rows > 1 and (batch > 1 or group)
    if x.lies == CUT_SPLIT:
        return (batch > 1 and kv_heads > 1) or (group and rows > 1)
    return x.lies == CUT_ROWS and group and rows > 1


def joined(tape: Tape, x: Sketch, y: Sketch, *, alike: bool = False) -> Sketch:
    """The answer of an elementwise operation on two, without a way back; ``alike``: the second is not read again."""
    dims = x.dims if x.dims == y.dims else together(x, y)
    z = Sketch(dims, max(x.itemsize, y.itemsize), lies_of(dims, (x, y)), tracked=x.tracked or y.tracked)
    tape.does(x.bytes + (0 if alike or y is x else y.bytes), z.bytes)
    return z


def lies_of(dims: Dims, xs: Sequence[Sketch]) -> int:
    """How an answer of this shape lies: as the first argument of the same."""
    for x in xs:
        if x.dims == dims:
            return _WHOLE.get(x.lies, x.lies)
    return ROWS


def whole(x: Sketch) -> int:
    """How an elementwise answer of it lies."""
    return dense(x.lies)


def give_reduced(tape: Tape, x: Sketch, z: Sketch, elements: Number, *, computed: bool = False) -> None:
    """A gradient in the shape of z, summed where x was broadcast, be it to more dimensions of one element."""
    if not x.tracked:
        return
    if x.size != z.size or len(x.dims) != len(z.dims):
        tape.does(elements * z.itemsize, x.bytes)
        tape.give(x, x.size)
    else:
        tape.give(x, elements, dense(z.gradient_lies) if computed else z.gradient_lies)


def dense(lies: int) -> int:
    """How the answer of an elementwise operation lies, by how its argument does."""
    return _WHOLE.get(lies, lies)
