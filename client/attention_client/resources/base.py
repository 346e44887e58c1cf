"""The base of the groups of calls: each sends its calls by the client that it belongs to."""

from typing import Protocol

from attention_client.calls import Call, ReplyT


class Sender(Protocol):
    """A blocking client."""

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call and return its reply."""
        ...


class AsyncSender(Protocol):
    """An awaited client."""

    async def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call and return its reply."""
        ...


class Resource:
    """A group of calls of a blocking client."""

    def __init__(self, client: Sender) -> None:
        self.send = client.send


class AsyncResource:
    """A group of calls of an awaited client."""

    def __init__(self, client: AsyncSender) -> None:
        self.send = client.send
