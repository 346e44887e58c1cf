"""Steps that do the same to every element, and sums of elements."""

from attention_service.core.steps.basics import dense, give_reduced, joined, like, together
from attention_service.core.tape import BOOL, Dims, Sketch, Tape


def cast(tape: Tape, x: Sketch, itemsize: int) -> Sketch:
    """X in a dtype of so many bytes, itself where it has them."""
    if x.itemsize == itemsize:
        return x
    y = like(x, itemsize)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(y.returned, y.gradient * x.itemsize)
        tape.give(x, y.gradient, dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def scale(tape: Tape, x: Sketch, functions: int = 0) -> Sketch:
    """X times or divided by a number: the same on the way back."""
    y = like(x)
    tape.does(x.bytes, y.bytes, functions * x.size)

    def step() -> None:
        tape.does(y.returned, y.returned)
        tape.give(x, y.gradient, dense(y.gradient_lies))

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
        tape.give(x, x.size, dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def square(tape: Tape, x: Sketch) -> Sketch:
    """x²; back, x¹, twice that, times the gradient."""
    y = like(x)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(2 * x.bytes, 2 * x.bytes, 0, 2)
        tape.does(y.returned + x.bytes, x.bytes)
        tape.give(x, x.size, dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def rsqrt(tape: Tape, x: Sketch) -> Sketch:
    """1/√x; back, the answer cubed, times −½ of the gradient."""
    y = like(x)
    tape.does(x.bytes, y.bytes, y.size)

    def step() -> None:
        tape.does(y.returned, x.bytes)
        tape.does(y.bytes, x.bytes)
        tape.does(2 * x.bytes, x.bytes)
        tape.give(x, x.size, dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


def add(tape: Tape, x: Sketch, y: Sketch, *, minus: bool = False, alike: bool = False) -> Sketch:
    """X + y or x − y; ``alike``: they are two names of one tensor, which is read once."""
    z = joined(tape, x, y, alike=alike)

    def step() -> None:
        give_reduced(tape, x, z, z.gradient)
        if y.tracked:
            if minus:
                tape.does(z.returned, z.returned)
            give_reduced(tape, y, z, z.gradient, computed=minus)

    return tape.later(z, step) if z.tracked else z


def multiply(tape: Tape, x: Sketch, y: Sketch) -> Sketch:
    """X · y, element by element."""
    z = joined(tape, x, y)

    def step() -> None:
        for one, other in ((x, y), (y, x)):
            if one.tracked:
                tape.does(z.returned + other.bytes, z.bytes)
                give_reduced(tape, one, z, z.size, computed=True)

    return tape.later(z, step) if z.tracked else z


def divide(tape: Tape, x: Sketch, y: Sketch) -> Sketch:
    """X / y, element by element; back, ∂x = ∂z / y and ∂y = −∂z · x/y/y."""
    z = joined(tape, x, y)

    def step() -> None:
        if x.tracked:
            tape.does(z.returned + y.bytes, z.bytes)
            give_reduced(tape, x, z, z.size, computed=True)
        if y.tracked:
            tape.does(z.returned, z.returned)
            tape.does(x.bytes + y.bytes, z.bytes)
            tape.does(z.bytes + y.bytes, z.bytes)
            tape.does(z.returned + z.bytes, z.bytes)
            give_reduced(tape, y, z, z.size, computed=True)

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
                give_reduced(tape, part, z, z.size, computed=True)

    return tape.later(z, step) if z.tracked else z


def quotient(tape: Tape, x: Sketch, functions: int = 0) -> Sketch:
    """An operation whose way back is one on the gradient and on what went in: log, and elu with its exponential."""
    y = like(x)
    tape.does(x.bytes, y.bytes, y.size)

    def step() -> None:
        tape.does(y.returned + x.bytes, x.bytes, functions * x.size)
        tape.give(x, x.size, dense(y.gradient_lies))

    return tape.later(y, step) if y.tracked else y


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


def total(tape: Tape, x: Sketch, dims: Dims, *, mean: bool = False) -> Sketch:
    """A sum along some dimensions; back, the gradient expanded, and divided for a mean."""
    y = Sketch(dims, x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        if mean:
            tape.does(y.returned, x.bytes)
        tape.give(x, x.size if mean else y.gradient)

    return tape.later(y, step) if y.tracked else y
