"""The base of the groups of calls: each sends its calls by the client that it belongs to."""

from typing import Protocol

from attention_client.calls import Call, ReplyT
from attention_client.connection_settings import StreamSettings


class Sender(Protocol):
    """A blocking client."""

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call and return its reply."""
        ...

    def stream_settings(self) -> StreamSettings:
        """Return address, headers and policy of the streams that belong to this client."""
        ...


class AsyncSender(Protocol):
    """An awaited client."""

    async def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call and return its reply."""
        ...

    def stream_settings(self) -> StreamSettings:
        """Return address, headers and policy of the streams that belong to this client."""
        ...


class Resource:
    """A group of calls of a blocking client."""

    def __init__(self, client: Sender) -> None:
        self.send = client.send
        self._settings = client.stream_settings


class AsyncResource:
    """A group of calls of an awaited client."""

    def __init__(self, client: AsyncSender) -> None:
        self.send = client.send
        self._settings = client.stream_settings
