"""Callers who disconnect before their answer is ready."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from attention_contract.errors import Cancelled, DeadlineExceeded, Draining

ResultT = TypeVar("ResultT")
_WATCHED_AFTER_S = 0.05
"""Most requests are answered sooner than this, behind others too, so they never start the task that watches for a
disconnect. Its work stops within a tenth of a second."""


async def unless_gone(receive: Receive, work: Awaitable[ResultT], deadline: float | None = None) -> ResultT:
    """The result of the work. Cancels the work and raises Cancelled as soon as the caller disconnects.

    Cancels it and raises DeadlineExceeded at the deadline, in seconds of ``time.monotonic``.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    watches: list[asyncio.Task[None]] = []
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    timer = loop.call_later(_WATCHED_AFTER_S, lambda: watches.append(loop.create_task(watch())))
    try:
        return await (work if deadline is None else in_time(work, deadline))
    except asyncio.CancelledError:
        if gone and task is not None:
            task.uncancel()
            raise Cancelled("the caller disconnected before the reply was ready") from None
        # The server cancels what still runs at the end of its drain time.
        raise Draining(
            "the server stopped before the reply was ready; send the request to another server, or again later"
        ) from None
    finally:
        timer.cancel()
        for waiting_task in watches:
            waiting_task.cancel()


async def in_time(work: Awaitable[ResultT], deadline: float | None) -> ResultT:
    """The result of the work. Cancels it and raises DeadlineExceeded at the deadline, in ``time.monotonic``."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout_at(deadline):  # the loop's clock is the monotonic one
            return await work
    except TimeoutError:
        raise DeadlineExceeded(
            "the caller's deadline passed before the reply was ready; allow more time, or ask for less"
        ) from None
