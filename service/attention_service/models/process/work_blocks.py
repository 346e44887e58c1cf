"""Work each of whose parts runs within a block of its own, such as one that has an adapter on."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.served import Answer, Parts, PricedRun


def within_blocks(
    work: PricedRun, block: Callable[[], AbstractContextManager[None]], check: Callable[[Answer], None] = lambda _: None
) -> PricedRun:
    """Return work that runs within a block, and so does each of its parts; its answer is checked there too."""

    def run() -> Any:
        with block():
            return after(work.run())

    def after(answer: Any) -> Any:
        if isinstance(answer, PricedRun):
            return within_blocks(answer, block, check)
        if isinstance(answer, Answer):
            check(answer)
        return parts(answer) if isinstance(answer, Generator) else answer

    def parts(given: Parts) -> Parts:
        while True:
            with block():
                try:
                    seconds = next(given)
                except StopIteration as end:
                    return after(end.value)  # type: ignore[no-any-return]
            yield seconds

    return work._replace(run=run)


def with_adapter(loaded: LoadedModel, adapter: Adapter, call: Callable[[], PricedRun]) -> PricedRun:
    """The work that a call returns, with an adapter on in the call and in all that follows."""
    block = partial(loaded.adapters.using, adapter)
    with block():
        return within_blocks(call(), block)
