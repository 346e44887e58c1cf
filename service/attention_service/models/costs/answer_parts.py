"""Answers in parts: generators of a pass or two at a time, so that other requests have their turns between.

A generator yields the number of passes over its texts that the next part takes: 1 without a graph, 3 with one, times
the copies of the texts. Nothing that a pass changes in the model, such as a hook, is left there between parts.
"""

import time
from collections.abc import Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")
Passes = Generator[int, None, T]
BACKWARD: Final = 3
"""The passes that a pass and its gradient take as long as."""


class OwnTime:
    """The time that an answer takes, without that of others between its parts."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        """``perf_counter`` seconds at which it would have begun if all of it had run at once."""

    @property
    def took_ms(self) -> float:
        """The time that it took until now, in milliseconds."""
        return 1e3 * (time.perf_counter() - self.began)

    def between(self, passes: int) -> Passes[None]:
        """Let others have their turns. ``passes``: those of the next part."""
        stopped = time.perf_counter()
        yield passes
        self.began += time.perf_counter() - stopped


def at_once(parts: Generator[Any, None, T]) -> T:
    """Return an answer whose parts run one after the other."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
