"""What PyTorch executes for a formula, counted from shapes: the operations of a pass, and of its way back.

A formula is gone through with sketches in the place of tensors. A sketch knows its shape, the bytes of an element and
how it lies in memory; nothing is allocated for it. Each of the ``core.steps`` counts what PyTorch starts for it and,
where a sketch is differentiated, says what autograd will do, which ``Tape.back`` goes through in reverse.

A view does no work. Every other operation reads each tensor that it is given once, an expanded dimension as a single
element, and writes its answer; of what it picks by an index it reads what it picks. Sizes may be averages: where
something is done for each of many tiles, its counts are linear in the size in which the tiles differ.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

Number = int | float
Dims = tuple[Number, ...]

ROWS, SPLIT, TURNED, CUT_ROWS, CUT_SPLIT, NARROW_ROWS, NARROW_SPLIT = range(7)
"""How a sketch lies in memory: row by row; ``[B, H, L, W]`` as ``[B, L, H, W]``; the last two dimensions exchanged; and
a part of the first two, cut along the tokens, or along the last dimension."""
INTEGER = 8
"""Bytes of a place or an index."""
BOOL = 1


@dataclass(frozen=True)
class Traffic:
    """What one pass executes."""

    read: int = 0
    """Bytes."""
    written: int = 0
    """Bytes."""
    transcendentals: int = 0
    """Elementary functions (exp, log, tanh, roots, sin, cos, powers that are not whole), by element."""
    operations: int = 0
    """Operations that do work; on a GPU, kernels that are launched."""

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read + other.read,
            self.written + other.written,
            self.transcendentals + other.transcendentals,
            self.operations + other.operations,
        )


class Sketch:
    """A tensor known by its shape."""

    __slots__ = ("bytes", "came", "dims", "gradient", "gradient_lies", "itemsize", "lies", "size", "tracked")

    def __init__(self, dims: Dims, itemsize: int, lies: int = ROWS, *, tracked: bool = False) -> None:
        self.dims, self.itemsize, self.lies, self.tracked = dims, itemsize, lies, tracked
        self.size = prod(dims)
        self.bytes = self.size * itemsize
        self.came = False  # whether some of its gradient has come back
        self.gradient: Number = 0  # elements of that, what is expanded counted once
        self.gradient_lies = ROWS

    def stored(self, elements: Number) -> "Sketch":
        """Itself, a view of so many elements: what is expanded is there once."""
        self.size, self.bytes = elements, elements * self.itemsize
        return self

    @property
    def returned(self) -> Number:
        """Bytes of the gradient that has come back."""
        return self.gradient * self.itemsize


class Tape:
    """Counts the operations of a pass, and keeps what is to be done on the way back."""

    def __init__(self, *, differentiated: bool = False) -> None:
        self.differentiated = differentiated
        self._read: Number = 0
        self._written: Number = 0
        self._functions: Number = 0
        self._operations: Number = 0
        self._times: Number = 1
        self._steps: list[tuple[Number, Sequence[Sketch], Callable[[], None]]] = []

    @property
    def counted(self) -> Traffic:
        """So far."""
        return Traffic(round(self._read), round(self._written), round(self._functions), round(self._operations))

    @contextmanager
    def repeated(self, times: Number) -> Iterator[None]:
        """What is done here is done so many times."""
        before = self._times
        self._times = before * times
        yield
        self._times = before

    def leaf(self, dims: Dims, itemsize: int, lies: int = ROWS, *, tracked: bool = True) -> Sketch:
        """A tensor that is there before."""
        return Sketch(dims, itemsize, lies, tracked=tracked and self.differentiated)

    def does(self, read: Number, written: Number, functions: Number = 0, operations: Number = 1) -> None:
        """An operation, by the bytes that it reads and writes and the elementary functions that it takes."""
        times = self._times
        self._read += times * read
        self._written += times * written
        self._functions += times * functions
        self._operations += times * operations

    def later(self, y: Sketch, step: Callable[[], None]) -> Sketch:
        """Take this step on the way back, if anything comes back to y."""
        self._steps.append((self._times, (y,), step))
        return y

    def later_of_any(self, ys: Sequence[Sketch], step: Callable[[], None]) -> None:
        """The same, if anything comes back to one of them."""
        self._steps.append((self._times, ys, step))

    def give(self, x: Sketch, elements: Number, lies: int = ROWS) -> None:
        """A gradient of x has come back, of so many elements; a second one is added to the first."""
        if not x.tracked:
            return
        if x.came:
            self.does((x.gradient + elements) * x.itemsize, x.bytes)
            x.gradient = x.size
        else:
            x.came, x.gradient, x.gradient_lies = True, elements, lies

    def absorb(self, other: "Tape") -> None:
        """What another tape has counted is done here."""
        self.does(other._read, other._written, other._functions, other._operations)

    def back(self, *outputs: Sketch, lies: int = ROWS) -> Traffic:
        """Everything on the way back from given gradients of the outputs, counted by itself."""
        self._read = self._written = self._functions = self._operations = 0
        for output in outputs:
            output.came, output.gradient, output.gradient_lies = True, output.size, lies
        for times, ys, step in reversed(self._steps):
            if any(y.came for y in ys):
                self._times = times
                step()
        self._times = 1
        return self.counted
