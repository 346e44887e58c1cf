"""Steps of a formula on sketches: what PyTorch does for each, forward and on the way back.

Those that take a number (scale, shift) take it for free; what is made for the way back is held by autograd and not
counted again. Shapes are those of the tensors: see ``core.tape``.
"""

from collections.abc import Sequence
from math import prod

from attention_service.core.tape import (
    BOOL,
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
        _whole(x),
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
    y = Sketch(dims, xs[0].itemsize if itemsize is None else itemsize, _lies(dims, xs))
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


def cast(tape: Tape, x: Sketch, itemsize: int) -> Sketch:
    """X in a dtype of so many bytes, itself where it has them."""
    if x.itemsize == itemsize:
        return x
    y = like(x, itemsize)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(y.returned, y.gradient * x.itemsize)
        tape.give(x, y.gradient, _dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def scale(tape: Tape, x: Sketch, functions: int = 0) -> Sketch:
    """X times or divided by a number: the same on the way back."""
    y = like(x)
    tape.does(x.bytes, y.bytes, functions * x.size)

    def step() -> None:
        tape.does(y.returned, y.returned)
        tape.give(x, y.gradient, _dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def shift(tape: Tape, x: Sketch) -> Sketch:
    """X and a number: nothing to be done on the way back."""
    y = like(x)
    tape.does(x.bytes, y.bytes)
    return tape.later(y, lambda: tape.give(x, y.gradient, y.gradient_lies)) if y.tracked else y


def saved(tape: Tape, x: Sketch, functions: int = 1) -> Sketch:
    """An operation whose way back is another one on the gradient and the answer: tanh, sigmoid, softmax, exp."""
    y = like(x)
    tape.does(x.bytes, y.bytes, functions * y.size)

    def step() -> None:
        tape.does(y.returned + y.bytes, x.bytes)
        tape.give(x, x.size, _dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def square(tape: Tape, x: Sketch) -> Sketch:
    """x²; back, x¹, twice that, times the gradient."""
    y = like(x)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(2 * x.bytes, 2 * x.bytes, 0, 2)
        tape.does(y.returned + x.bytes, x.bytes)
        tape.give(x, x.size, _dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def rsqrt(tape: Tape, x: Sketch) -> Sketch:
    """1/√x; back, the answer cubed, times −½ of the gradient."""
    y = like(x)
    tape.does(x.bytes, y.bytes, y.size)

    def step() -> None:
        tape.does(y.returned, x.bytes)
        tape.does(y.bytes, x.bytes)
        tape.does(2 * x.bytes, x.bytes)
        tape.give(x, x.size, _dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def add(tape: Tape, x: Sketch, y: Sketch, *, minus: bool = False, alike: bool = False) -> Sketch:
    """X + y or x − y; ``alike``: they are two names of one tensor, which is read once."""
    z = _joined(tape, x, y, alike=alike)

    def step() -> None:
        _give_reduced(tape, x, z, z.gradient)
        if y.tracked:
            if minus:
                tape.does(z.returned, z.returned)
            _give_reduced(tape, y, z, z.gradient, computed=minus)

    return tape.later(z, step) if z.tracked else z


def multiply(tape: Tape, x: Sketch, y: Sketch) -> Sketch:
    """X · y, element by element."""
    z = _joined(tape, x, y)

    def step() -> None:
        for one, other in ((x, y), (y, x)):
            if one.tracked:
                tape.does(z.returned + other.bytes, z.bytes)
                _give_reduced(tape, one, z, z.size, computed=True)

    return tape.later(z, step) if z.tracked else z


def divide(tape: Tape, x: Sketch, y: Sketch) -> Sketch:
    """X / y, element by element; back, ∂x = ∂z / y and ∂y = −∂z · x/y/y."""
    z = _joined(tape, x, y)

    def step() -> None:
        if x.tracked:
            tape.does(z.returned + y.bytes, z.bytes)
            _give_reduced(tape, x, z, z.size, computed=True)
        if y.tracked:
            tape.does(z.returned, z.returned)
            tape.does(x.bytes + y.bytes, z.bytes)
            tape.does(z.bytes + y.bytes, z.bytes)
            tape.does(z.returned + z.bytes, z.bytes)
            _give_reduced(tape, y, z, z.size, computed=True)

    return tape.later(z, step) if z.tracked else z


def hide(tape: Tape, x: Sketch, where: Sketch) -> Sketch:
    """X with a number wherever the mask says so, and its gradient with zeros there; row by row."""
    y = Sketch(x.dims if x.size >= where.size else together(x, where), x.itemsize, tracked=x.tracked)
    tape.does(x.bytes + where.bytes, y.bytes)

    def step() -> None:
        tape.does(y.returned + where.bytes, y.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def choose(tape: Tape, where: Sketch, x: Sketch, y: Sketch | None = None) -> Sketch:
    """X where the mask says so, y (or a number) elsewhere."""
    parts = (x,) if y is None else (x, y)
    z = Sketch(together(where, *parts), x.itemsize, x.lies, tracked=any(part.tracked for part in parts))
    number = x.itemsize if y is None else 0
    if y is None:
        tape.does(0, number)  # the number as a tensor
    tape.does(where.bytes + number + sum(part.bytes for part in parts), z.bytes)

    def step() -> None:
        for part in parts:
            if part.tracked:
                tape.does(0, x.itemsize)
                tape.does(where.bytes + z.returned + x.itemsize, z.bytes)
                _give_reduced(tape, part, z, z.size, computed=True)

    return tape.later(z, step) if z.tracked else z


def quotient(tape: Tape, x: Sketch, functions: int = 0) -> Sketch:
    """An operation whose way back is one on the gradient and on what went in: log, and elu with its exponential."""
    y = like(x)
    tape.does(x.bytes, y.bytes, y.size)

    def step() -> None:
        tape.does(y.returned + x.bytes, x.bytes, functions * x.size)
        tape.give(x, x.size, _dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def total(tape: Tape, x: Sketch, dims: Dims, *, mean: bool = False) -> Sketch:
    """A sum along some dimensions; back, the gradient expanded, and divided for a mean."""
    y = Sketch(dims, x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        if mean:
            tape.does(y.returned, x.bytes)
        tape.give(x, x.size if mean else y.gradient)

    return tape.later(y, step) if y.tracked else y


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


def linear(tape: Tape, x: Sketch, weight: Sketch, bias: Sketch | None) -> Sketch:
    """``[B, L, in]`` times a weight ``[out, in]``, and a bias."""
    out = Sketch(
        (*x.dims[:-1], weight.dims[0]), x.itemsize, tracked=x.tracked or weight.tracked or bool(bias and bias.tracked)
    )
    tape.does(x.bytes + weight.bytes + (bias.bytes if bias else 0), out.bytes)

    def step() -> None:
        if x.tracked:
            tape.does(out.bytes + weight.bytes, x.bytes)
        if weight.tracked:
            tape.does(out.bytes + x.bytes, weight.bytes)
            tape.give(weight, weight.size)
        if bias is not None and bias.tracked:
            tape.does(out.bytes, bias.bytes)
            tape.give(bias, bias.size)
        tape.give(x, x.size)

    return tape.later(out, step) if out.tracked else out


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


def product(tape: Tape, x: Sketch, y: Sketch, *, turned: bool = False) -> Sketch:
    """The matrix product by head, x ``[B, H, Q, N]`` times y ``[B, Hkv, N, M]`` (``turned``: ``[B, Hkv, M, N]``).

    Each factor is copied first where its heads do not lie one after the other.
    """
    batch, heads, rows, _ = x.dims
    kv_heads = y.dims[1]
    if apart(x, kv_heads):
        x = copied(tape, x)
    if _whole(y) == SPLIT and kv_heads > 1 and (y.dims[2] > 1 or y.lies == CUT_SPLIT) and batch > 1:
        y = copied(tape, y)
    z = Sketch((batch, heads, rows, y.dims[2 if turned else 3]), x.itemsize, tracked=x.tracked or y.tracked)
    tape.does(x.bytes + y.bytes, z.bytes)

    def step() -> None:
        if z.gradient != z.size or apart(Sketch(z.dims, z.itemsize, z.gradient_lies), kv_heads):
            tape.does(z.returned, z.bytes)
        if y.tracked:
            tape.does(z.bytes + x.bytes, y.bytes)
            tape.give(y, y.size, TURNED if turned else ROWS)
        if x.tracked:
            tape.does(z.bytes + y.bytes, x.bytes)
            tape.give(x, x.size)

    return tape.later(z, step) if z.tracked else z


def mixed(tape: Tape, weight: Sketch, x: Sketch) -> Sketch:
    """A weight ``[R, L]`` of all heads times x ``[B, H, L, W]``.

    Where the weight is differentiated, all heads and widths are put into one matrix, whose product lies turned.
    """
    batch, heads, length, width = x.dims
    dims = batch, heads, weight.dims[0], width
    if not weight.tracked:
        if _whole(x) == SPLIT and heads > 1 and length > 1 and batch > 1:
            x = copied(tape, x)
        z = Sketch(dims, x.itemsize, tracked=x.tracked)
        tape.does(weight.bytes + x.bytes, z.bytes)
        return z
    folded = copied(tape, x) if length > 1 else x
    z = Sketch(dims, x.itemsize, TURNED, tracked=True)
    tape.does(weight.bytes + x.bytes, z.bytes)

    def step() -> None:
        if z.gradient_lies != TURNED and weight.dims[0] > 1 and batch * heads > 1:
            tape.does(z.returned, z.bytes)
        tape.does(z.bytes + x.bytes, weight.bytes)
        tape.give(weight, weight.size)
        if x.tracked:
            tape.does(z.bytes + weight.bytes, x.bytes)
            tape.give(folded, x.size, TURNED)

    return tape.later(z, step)


def by_matrix(tape: Tape, x: Sketch, matrix: Sketch) -> Sketch:
    """X ``[B, H, L, N]`` times the transpose of a matrix ``[M, N]`` without a gradient.

    What lies row by row is one matrix for it, and so must its gradient be; else each head has its own product.
    """
    batch, heads, length, _ = x.dims
    folded = x.lies == ROWS
    if _whole(x) == SPLIT and batch > 1 and heads > 1 and length > 1:
        x = copied(tape, x)
    y = Sketch((batch, heads, length, matrix.dims[0]), x.itemsize, tracked=x.tracked)
    tape.does(x.bytes + matrix.bytes, y.bytes)

    def step() -> None:
        if folded and y.gradient_lies == TURNED and length > 1 and batch * heads > 1:
            tape.does(y.returned, y.bytes)
        tape.does(y.bytes + matrix.bytes, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def outer(tape: Tape, x: Sketch, y: Sketch) -> Sketch:
    """``xᵀ y`` by head, x ``[B, H, L, N]`` and y ``[B, H, L, M]``."""
    x, y = (copied(tape, each) if apart(each, each.dims[1]) else each for each in (x, y))
    z = Sketch((*x.dims[:2], x.dims[3], y.dims[3]), x.itemsize, tracked=x.tracked or y.tracked)
    tape.does(x.bytes + y.bytes, z.bytes)

    def step() -> None:
        if y.tracked:
            tape.does(z.bytes + x.bytes, y.bytes)
            tape.give(y, y.size)
        if x.tracked:
            tape.does(z.bytes + y.bytes, x.bytes)
            tape.give(x, x.size, TURNED)

    return tape.later(z, step) if z.tracked else z


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


def by_weight(tape: Tape, x: Sketch, weight: Sketch, dims: Dims) -> Sketch:
    """X ``[B, H, L, N]`` times a weight ``[H, ...]`` of each head, which is copied for each sequence."""
    batch = x.dims[0]
    if _whole(x) == SPLIT and x.dims[1] > 1 and x.dims[2] > 1 and batch > 1:
        x = copied(tape, x)
    size = batch * weight.bytes
    if batch > 1 and weight.dims[0] > 1:
        tape.does(weight.bytes, size)
    else:
        size = weight.bytes  # of one head, it is the same for all sequences
    y = Sketch(dims, x.itemsize, tracked=x.tracked or weight.tracked)
    tape.does(x.bytes + size, y.bytes)

    def step() -> None:
        if y.gradient_lies == SPLIT and batch > 1 and y.dims[1] > 1 and y.dims[2] > 1:
            tape.does(y.returned, y.bytes)
        if weight.tracked:
            tape.does(x.bytes + y.bytes, batch * weight.bytes)
            tape.does(batch * weight.bytes, weight.bytes)
            tape.give(weight, weight.size)
        if x.tracked:
            tape.does(y.bytes + size, x.bytes)
            tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


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


def clamped(tape: Tape, x: Sketch) -> Sketch:
    """X cut off at a number; back, zeros where it was."""
    y = like(x)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(0, x.itemsize)
        tape.does(x.bytes, x.size * BOOL)
        tape.does(y.returned + x.size * BOOL + x.itemsize, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def expanded(tape: Tape, x: Sketch, dims: Dims) -> Sketch:
    """X repeated along some dimensions without a copy; back, summed over them."""
    y = Sketch(dims, x.itemsize, tracked=x.tracked)

    def step() -> None:
        if y.size != x.size:
            tape.does(y.returned, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def _joined(tape: Tape, x: Sketch, y: Sketch, *, alike: bool = False) -> Sketch:
    dims = x.dims if x.dims == y.dims else together(x, y)
    z = Sketch(dims, max(x.itemsize, y.itemsize), _lies(dims, (x, y)), tracked=x.tracked or y.tracked)
    tape.does(x.bytes + (0 if alike or y is x else y.bytes), z.bytes)
    return z


def _lies(dims: Dims, xs: Sequence[Sketch]) -> int:
    for x in xs:
        if x.dims == dims:
            return _WHOLE.get(x.lies, x.lies)
    return ROWS


def apart(x: Sketch, kv_heads: Number) -> bool:
    """Whether the matrices of x, a key/value head's queries below each other, do not lie one after the other."""
    batch, heads, rows, _ = x.dims
    group = heads > kv_heads
    if x.lies == SPLIT:
        return heads > 1 and rows > 1 and (batch > 1 or group)
    if x.lies == CUT_SPLIT:
        return (batch > 1 and kv_heads > 1) or (group and rows > 1)
    return x.lies == CUT_ROWS and group and rows > 1


def _whole(x: Sketch) -> int:
    return _dense(x.lies)


def _give_reduced(tape: Tape, x: Sketch, z: Sketch, elements: Number, *, computed: bool = False) -> None:
    """A gradient in the shape of z, summed where x was broadcast, be it to more dimensions of one element."""
    if not x.tracked:
        return
    if x.size != z.size or len(x.dims) != len(z.dims):
        tape.does(elements * z.itemsize, x.bytes)
        tape.give(x, x.size)
    else:
        tape.give(x, elements, _dense(z.gradient_lies) if computed else z.gradient_lies)


def _dense(lies: int) -> int:
    """How the answer of an elementwise operation lies, by how its argument does."""
    return _WHOLE.get(lies, lies)
