"""The memory of a body for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from attention_service.runtime.scheduling.budget import BodyMemory, Budget


@contextmanager
def body_of(budget: Budget) -> Iterator[BodyMemory]:
    """Count a body until the block ends."""
    body = BodyMemory(budget)
    try:
        yield body
    finally:
        body.give_back()
