"""The messages between the server and the process of a model about one request."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from attention_contract.errors import AttentionError
from attention_service.models.worker_messages import Piece, WorkerMessage

log = logging.getLogger(__name__)


class Peer(Protocol):
    """A process, as the messages about one request see it."""

    limit: int
    """Bytes that it may take."""

    async def send(self, kind: str, facts: dict[str, Any], body: Sequence[Piece] = ()) -> None:
        """Send it a message."""

    def await_more(self, more: int) -> None:
        """Note that somebody more, or less, waits for what it says next."""

    async def fault(self) -> AttentionError:
        """Wait for its end, and return the reason."""


class Exchange:
    """The messages about one request, in both directions."""

    def __init__(self, peer: Peer, number: int) -> None:
        """``number``: the one by which the process and the server speak of the request; 0 for the load."""
        self.number = number
        self.runs = False
        """True once the process was told to go."""
        self._peer = peer
        self._incoming: asyncio.Queue[WorkerMessage | None] = asyncio.Queue()
        self._allowed = 0
        self._is_cancelled = False

    def allow(self, size: int) -> None:
        """Let the process take so many bytes for this request, in place of those before."""
        self._peer.limit += size - self._allowed
        self._allowed = size

    async def ask(self, facts: dict[str, Any], body: Sequence[Piece]) -> None:
        """Send the request."""
        await self._peer.send("ask", {"request": self.number, **facts}, body)

    async def go(self, facts: dict[str, Any]) -> None:
        """Tell the process that the memory of the request is admitted; ``facts``: those of its reply."""
        self.runs = True
        await self._peer.send("go", {"request": self.number, **facts})

    async def cancel(self) -> None:
        """Tell the process that nobody waits for the request any more."""
        if not self._is_cancelled:
            self._is_cancelled = True
            await self._peer.send("cancel", {"request": self.number})

    def put(self, message: WorkerMessage | None) -> None:
        """Add a message of the process; None once it has ended."""
        self._incoming.put_nowait(message)

    async def receive(self) -> WorkerMessage:
        """Wait for the next message. Raises ``Peer.fault`` if the process has ended."""
        self._peer.await_more(1)
        try:
            message = await self._incoming.get()
        finally:
            self._peer.await_more(-1)
        if message is None:
            self.put(None)
            raise await self._peer.fault()
        if (cause := message.facts.pop("traceback", None)) is not None:
            log.error("a model failed: %s", cause)
        return message
