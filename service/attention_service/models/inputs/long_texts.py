"""Long texts, which take a tokenizer seconds. A thread beside the loop of a process reads them, so that nobody waits.

A request that meets one is given up (``LongText``), and run again once the text is read.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

T = TypeVar("T")
_LONG: Final = 16_384
"""Characters that a tokenizer reads at once, in some hundredths of a second."""


@dataclass
class TextsRead:
    """The long texts of a request that were read."""

    results: dict[Hashable, Callable[[], Any]] = field(default_factory=dict)
    """A function for the arguments of each reading that returns its result or raises its fault."""
    may_wait: bool = False
    """True while the request can be given up, to be run again."""


_CURRENT: ContextVar[TextsRead | None] = ContextVar("texts_read", default=None)


class LongText(Exception):
    """A text is to be read beside the loop before its request can run."""

    def __init__(self, texts: TextsRead, key: Hashable, read: Callable[[], Any]) -> None:
        super().__init__()
        self._texts, self._key, self._read = texts, key, read

    def read(self) -> None:
        """Read it, and keep the result for the request."""
        try:
            result = self._read()
        except Exception as fault:
            self._texts.results[self._key] = _raising(fault)
        else:
            self._texts.results[self._key] = lambda: result


def read_beside(key: Hashable, characters: int, read: Callable[[], T]) -> T:
    """Return what ``read`` does. Raises LongText for a long text that is still to be read.

    ``key``: equal for readings of one request that give the same.
    """
    texts = _CURRENT.get()
    if texts is None or characters <= _LONG:
        return read()
    if key in texts.results:
        result: T = texts.results[key]()
        return result
    if not texts.may_wait:
        return read()
    raise LongText(texts, key, read)


@contextmanager
def reading_beside(texts: TextsRead) -> Iterator[None]:
    """Let the request of a block be given up for a long text."""
    before = _CURRENT.set(texts)
    texts.may_wait = True
    try:
        yield
    finally:
        texts.may_wait = False
        _CURRENT.reset(before)


@contextmanager
def reading_here() -> Iterator[None]:
    """Let the request of a block read its long texts itself, as in a process of several that take the same steps."""
    before = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def _raising(fault: Exception) -> Callable[[], Any]:
    def again() -> Any:
        raise fault

    return again
