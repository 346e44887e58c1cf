"""Matrix products."""

from attention_service.core.steps.basics import apart, whole
from attention_service.core.steps.shapes import copied
from attention_service.core.tape import CUT_SPLIT, ROWS, SPLIT, TURNED, Dims, Sketch, Tape


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


def product(tape: Tape, x: Sketch, y: Sketch, *, turned: bool = False) -> Sketch:
    """The matrix product by head, x ``[B, H, Q, N]`` times y ``[B, Hkv, N, M]`` (``turned``: ``[B, Hkv, M, N]``).

    Each factor is copied first where its heads do not lie one after the other.
    """
    batch, heads, rows, _ = x.dims
    kv_heads = y.dims[1]
    if apart(x, kv_heads):
        x = copied(tape, x)
    if whole(y) == SPLIT and kv_heads > 1 and (y.dims[2] > 1 or y.lies == CUT_SPLIT) and batch > 1:
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
        if whole(x) == SPLIT and heads > 1 and length > 1 and batch > 1:
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
    if whole(x) == SPLIT and batch > 1 and heads > 1 and length > 1:
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


def by_weight(tape: Tape, x: Sketch, weight: Sketch, dims: Dims) -> Sketch:
    """X ``[B, H, L, N]`` times a weight ``[H, ...]`` of each head, which is copied for each sequence."""
    batch = x.dims[0]
    if whole(x) == SPLIT and x.dims[1] > 1 and x.dims[2] > 1 and batch > 1:
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
