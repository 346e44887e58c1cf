"""The results that workers send to one server of vLLM's API, by the ids of asks."""

import asyncio
import os
import uuid
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from attention_contract.errors import AttentionError, InternalError, Unavailable, from_problem
from attention_vllm.door.merged_ranks import merged
from attention_vllm.result_channel import PREFIX, SOCKETS, Message, lengths_of, unpacked

_PATIENCE_S: Final = 10.0
"""Seconds to wait for the attention of a token that vLLM has sent: a worker sends it before."""
_MOST_BYTES: Final = 2**30


TapsOfTokens = tuple[int, int, list[dict[str, Any]]]
"""First and last (exclusive) token of a pass, and the fields of its layers."""


@dataclass(eq=False)
class AwaitedResults:
    """The results of one ask that have come."""

    id: str
    layers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """The fields of the layers, by the position of the token."""
    refused: AttentionError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    taps: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    """The taps of layers, by first and last (exclusive) token."""
    parts: dict[Hashable, dict[int, list[dict[str, Any]]]] = field(default_factory=dict)
    """The fields of ranks, by token or tokens, until all ranks have told of them."""

    def add(self, message: Message) -> None:
        """Take a result."""
        if "refused" in message:
            problem = message["refused"]
            self.refused = from_problem(problem.get("status", 500), problem)
            self.changed.set()
            return
        # A token has a position, and the tokens of a pass have a first and a last (exclusive) one.
        key = message["position"] if "position" in message else (message["first"], message["stop"])
        parts = self.parts.setdefault(key, {})
        parts[message.get("rank", 0)] = message["layers"]
        if len(parts) < message.get("ranks", 1):
            return
        del self.parts[key]
        whole = message["layers"] if len(parts) == 1 else merged([parts[rank] for rank in sorted(parts)])
        if isinstance(key, tuple):
            self.taps[key] = whole
        else:
            self.layers[key] = whole
        self.changed.set()

    async def take(self, position: int) -> list[dict[str, Any]]:
        """Return the layers of the token at a position. Raises the error with which the ask was refused."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while position not in self.layers:
                    await self._next()
        except TimeoutError:
            raise InternalError(f"the attention of the token at position {position} did not come") from None
        return self.layers.pop(position)

    async def take_text(self, length: int) -> list[TapsOfTokens]:
        """Return the taps of all tokens of a text, in order. Raises the error with which the ask was refused."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while (taps := self._of_text(length)) is None:
                    await self._next()
        except TimeoutError:
            raise InternalError(f"the taps of all {length} tokens did not come") from None
        return taps

    def _of_text(self, length: int) -> list[TapsOfTokens] | None:
        """The passes that follow one another up to this length; None if one is missing. Preempted ones come twice."""
        passes, at = list[TapsOfTokens](), 0
        while at < length:
            stop = max((stop for first, stop in self.taps if first == at), default=at)
            if stop == at:
                return None
            passes.append((at, stop, self.taps[at, stop]))
            at = stop
        return passes

    async def refusal(self) -> AttentionError:
        """Wait for the ask to be refused."""
        while self.refused is None:
            self.changed.clear()
            await self.changed.wait()
        return self.refused

    async def _next(self) -> None:
        if self.refused is not None:
            raise self.refused
        self.changed.clear()
        await self.changed.wait()


class ResultInbox:
    """A Unix socket, to which the workers of this server connect."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        """The name of the socket, which asks carry."""
        self._awaited: dict[str, AwaitedResults] = {}
        self._server: asyncio.AbstractServer | None = None
        self._opening = asyncio.Lock()
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen, if it does not yet. Raises Unavailable without a folder for sockets."""
        async with self._opening:
            if self._server is None:
                folder = os.environ.get(SOCKETS)
                if folder is None:
                    raise Unavailable(f"attention needs {SOCKETS}: start vLLM by `attention-vllm serve`")
                self._server = await asyncio.start_unix_server(self._read, Path(folder) / self.name)

    async def close(self) -> None:
        """Listen no longer, and let the workers go."""
        if self._server is not None:
            self._server.close()
            for writer in [*self._writers]:
                writer.close()
            while self._writers:
                await asyncio.sleep(0)

    def expect(self) -> AwaitedResults:
        """Return the place of the results of a new ask."""
        awaited = AwaitedResults(uuid.uuid4().hex)
        self._awaited[awaited.id] = awaited
        return awaited

    def forget(self, awaited: AwaitedResults) -> None:
        """Drop what comes for an ask from now on."""
        self._awaited.pop(awaited.id, None)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head, body = lengths_of(await reader.readexactly(PREFIX))
                if head + body > _MOST_BYTES:
                    break
                message = unpacked(await reader.readexactly(head), await reader.readexactly(body))
                if (awaited := self._awaited.get(message["id"])) is not None:
                    awaited.add(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the worker has ended
        finally:
            self._writers.discard(writer)
            writer.close()
