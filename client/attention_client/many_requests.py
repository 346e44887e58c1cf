"""Many requests by one method, a few at a time."""

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar, cast

import anyio

from attention_contract.errors import AttentionError

AnswerT = TypeVar("AnswerT")
Errors = Literal["raise", "return"]


class Many(Generic[AnswerT]):
    """The requests that are not yet begun, and the answers so far. Workers share it."""

    def __init__(self, requests: Iterable[Mapping[str, Any]], concurrency: int, errors: Errors) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency: expected 1 or more, got {concurrency}")
        if errors not in {"raise", "return"}:
            raise ValueError(f"errors: expected 'raise' or 'return', got {errors!r}")
        self.concurrency = concurrency
        self._requests = enumerate(requests)
        self._errors = errors
        self._answers: dict[int, AnswerT | AttentionError] = {}
        self._ended = False
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Take one request after the other, until there are none or one has failed."""
        while True:
            with self._lock:
                request = None if self._ended else next(self._requests, None)
            if request is None:
                return
            yield request

    def put(self, index: int, answer: AnswerT | AttentionError) -> None:
        """Note an answer. After an error nothing more is begun, unless errors are returned."""
        with self._lock:
            self._answers[index] = answer
            if isinstance(answer, AttentionError) and self._errors == "raise":
                self._ended = True

    def end(self) -> None:
        """Begin nothing more."""
        self._ended = True

    def answers(self) -> list[AnswerT]:
        """Return the answers in the order of their requests. Raises the first error, unless errors are returned."""
        ordered = [self._answers[index] for index in sorted(self._answers)]
        if self._errors == "raise":
            for answer in ordered:
                if isinstance(answer, AttentionError):
                    raise answer
        return cast("list[AnswerT]", ordered)


@contextmanager
def bar(requests: object, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Draw a progress bar on standard error. The value advances it by one."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - drawn rarely
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=len(requests) if isinstance(requests, Sized) else None)
        yield lambda: progress.advance(task)


def in_threads(many: Many[AnswerT], method: Callable[..., AnswerT], advance: Callable[[], None]) -> list[AnswerT]:
    """Answer the requests in as many threads as may run at once."""

    def work() -> None:
        try:
            for index, request in many:
                try:
                    many.put(index, method(**request))
                except AttentionError as error:
                    many.put(index, error)
                advance()
        except BaseException:
            many.end()
            raise

    with ThreadPoolExecutor(many.concurrency, "attention-map") as threads:
        try:
            for worker in [threads.submit(work) for _ in range(many.concurrency)]:
                worker.result()
        finally:
            many.end()
    return many.answers()


async def in_tasks(
    many: Many[AnswerT], method: Callable[..., Awaitable[AnswerT]], advance: Callable[[], None]
) -> list[AnswerT]:
    """Answer the requests in as many tasks as may run at once."""
    crashed: list[Exception] = []

    async def work() -> None:
        try:
            for index, request in many:
                try:
                    many.put(index, await method(**request))
                except AttentionError as error:
                    many.put(index, error)
                advance()
        except Exception as fault:  # raised as it is below: a task group would wrap it
            many.end()
            crashed.append(fault)

    async with anyio.create_task_group() as tasks:
        for _ in range(many.concurrency):
            tasks.start_soon(work)
    for fault in crashed:
        raise fault
    return many.answers()
