"""The events of a generation between the model, which does not wait for their reader, and that reader."""

import asyncio

from attention_service.runtime.scheduling.budget import UNCOUNTED, Budget


class UnreadEvents:
    """Events that wait for their reader, counted as a reply until each is sent.

    A model answers one request at a time, so a slow reader does not hold it back: he takes memory of the host, as the
    readers of other replies do, and within the same limit.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._events: asyncio.Queue[memoryview | None] = asyncio.Queue()
        self._unread = self._counted = self._sending = 0

    def put(self, event: memoryview) -> None:
        """Add an event. Raises NoRoom if so much may not wait for readers."""
        self._count(self._unread + len(event))
        self._events.put_nowait(event)

    def end(self) -> None:
        """Let ``get`` return None after the last event."""
        self._events.put_nowait(None)

    async def get(self) -> memoryview | None:
        """Return the next event, now that the one before it is sent; None at the end."""
        self._count(self._unread - self._sending)
        self._sending = 0
        event = await self._events.get()
        self._sending = 0 if event is None else len(event)
        return event

    def close(self) -> None:
        """Forget the events, and give their memory back."""
        self._events = asyncio.Queue()
        self._count(0)

    def _count(self, unread: int) -> None:
        counted = unread if unread > UNCOUNTED else 0
        more = counted - self._counted
        if more > 0:
            self._budget.check_reply(more, held=self._counted)
        self._unread, self._counted = unread, counted
        self._budget.replies += more
        if more < 0:
            self._budget.wake()
