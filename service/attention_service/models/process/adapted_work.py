"""The work of a request whose passes have an adapter, which the model has on for each of its parts alone."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from attention_service.models.loaded.adapters import Adapter
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.served import Parts, PricedRun


def with_adapter(loaded: LoadedModel, adapter: Adapter, call: Callable[[], PricedRun]) -> PricedRun:
    """The work that a call returns, with an adapter on in the call and in all that follows."""

    def within(run: Callable[[], Any]) -> Any:
        with loaded.adapters.using(adapter):
            answer = run()
        if isinstance(answer, PricedRun):
            return answer._replace(run=partial(within, answer.run))
        return parts_within(answer) if isinstance(answer, Generator) else answer

    def parts_within(parts: Parts) -> Parts:
        while True:
            with loaded.adapters.using(adapter):
                try:
                    seconds = next(parts)
                except StopIteration as end:
                    last = end.value
                    break
            yield seconds
        return within(lambda: last)  # type: ignore[no-any-return]

    work: PricedRun = within(call)
    return work
