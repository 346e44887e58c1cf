"""Recordings on the server: storing, listing, and reading them in parts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention_client.calls import Call, ReplyT, call
from attention_client.recording.recorded import Indices, Recording, query_of
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.operations import Operation
from attention_contract.schemas.recordings import RecordingFile, RecordingInfo, RecordingList
from attention_contract.validation import validate
from attention_contract.wire import JSON, SAFETENSORS

RecordingLike = Recording | RecordingFile | Mapping[str, Any] | str | Path
"""A recording, its model of the contract or a dict of that, or the path of its file."""


class Recordings(Resource):
    """Calls that store and read recordings."""

    def create(self, recording: RecordingLike) -> RecordingInfo:
        """Store a recording. The same content is stored once.

        Raises StoreFull if the server keeps too many, and TooLarge if it exceeds the server's limit alone.
        """
        return self.send(_stored(operations.create_recording, recording))

    def list(self) -> RecordingList:
        """List every stored recording, the newest first."""
        return self.send(call(operations.list_recordings, {}))

    def get(self, id: str) -> RecordingInfo:  # noqa: A002
        """Return model, text, tokens, attentions and tensors of a recording. Raises RecordingNotFound."""
        return self.send(_described(operations.get_recording, id))

    def read(
        self, id: str, layer: str | int | None = None, tensor: str | None = None, *,  # noqa: A002
        heads: Indices | None = None, queries: Indices | None = None, keys: Indices | None = None,
    ) -> RecordingInfo:  # fmt: skip
        """Return a recording with a tensor, or a part of it, as ``value``.

        The arguments are those of ``Recording.read``. The dimensions stay: one head gives ``[1, Lq, Lk]``. Raises
        RecordingNotFound and InvalidRequest.
        """
        return self.send(_part(operations.get_recording, locals()))

    def download(self, id: str) -> Recording:  # noqa: A002
        """Return a whole recording, its tensors in memory. Raises RecordingNotFound."""
        return Recording.of(self.send(_whole(operations.get_recording, id)))

    def delete(self, id: str) -> None:  # noqa: A002
        """Remove a recording. Raises RecordingNotFound."""
        return self.send(call(operations.delete_recording, locals()))


class AsyncRecordings(AsyncResource):
    """The same calls as ``Recordings``, awaited."""

    async def create(self, recording: RecordingLike) -> RecordingInfo:
        """Store a recording. The same content is stored once.

        Raises StoreFull if the server keeps too many, and TooLarge if it exceeds the server's limit alone.
        """
        return await self.send(_stored(operations.create_recording, recording))

    async def list(self) -> RecordingList:
        """List every stored recording, the newest first."""
        return await self.send(call(operations.list_recordings, {}))

    async def get(self, id: str) -> RecordingInfo:  # noqa: A002
        """Return model, text, tokens, attentions and tensors of a recording. Raises RecordingNotFound."""
        return await self.send(_described(operations.get_recording, id))

    async def read(
        self, id: str, layer: str | int | None = None, tensor: str | None = None, *,  # noqa: A002
        heads: Indices | None = None, queries: Indices | None = None, keys: Indices | None = None,
    ) -> RecordingInfo:  # fmt: skip
        """Return a recording with a tensor, or a part of it, as ``value``.

        The arguments are those of ``Recording.read``. The dimensions stay: one head gives ``[1, Lq, Lk]``. Raises
        RecordingNotFound and InvalidRequest.
        """
        return await self.send(_part(operations.get_recording, locals()))

    async def download(self, id: str) -> Recording:  # noqa: A002
        """Return a whole recording, its tensors in memory. Raises RecordingNotFound."""
        return Recording.of(await self.send(_whole(operations.get_recording, id)))

    async def delete(self, id: str) -> None:  # noqa: A002
        """Remove a recording. Raises RecordingNotFound."""
        return await self.send(call(operations.delete_recording, locals()))


def _stored(operation: Operation[ReplyT], recording: RecordingLike) -> Call[ReplyT]:
    """Build the call that stores a recording."""
    if isinstance(recording, str | Path):
        recording = Recording.load(recording)
    if isinstance(recording, Recording):
        recording = recording.file()
    file = recording if isinstance(recording, RecordingFile) else validate(RecordingFile, recording)
    return Call(operation, request=file)


def _described(operation: Operation[ReplyT], recording: str) -> Call[ReplyT]:
    """Build the call for the description alone: in JSON, since the other form is the file."""
    return replace(call(operation, {"id": recording}), request=None, headers={"Accept": JSON})


def _part(operation: Operation[ReplyT], arguments: Mapping[str, Any]) -> Call[ReplyT]:
    """Build the call for a part of a tensor, from the arguments of ``read``."""
    asked = {name: arguments[name] for name in ("layer", "tensor", "heads", "queries", "keys")}
    return call(operation, {"id": arguments["id"]} | query_of(**asked).model_dump(exclude_unset=True))


def _whole(operation: Operation[Any], recording: str) -> Call[RecordingFile]:
    """Build the call for the whole file."""
    path = _described(operation, recording).path
    return Call(replace(operation, reply=RecordingFile), path, headers={"Accept": SAFETENSORS})
