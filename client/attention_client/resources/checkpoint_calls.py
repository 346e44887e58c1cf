"""Checkpoints of the server's model repository: listing, describing and fetching them."""

from typing import Unpack

from attention_client.calls import CallOptions, call
from attention_client.resources.base import AsyncResource, Resource
from attention_contract import operations
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply


class Checkpoints(Resource):
    """Calls about checkpoints."""

    def list(self, **options: Unpack[CallOptions]) -> CheckpointList:
        """List every checkpoint of the model repository: family, layers, widths and bytes. Nothing is loaded."""
        return self.send(call(operations.list_checkpoints, locals()))

    def get(self, path: str, **options: Unpack[CallOptions]) -> CheckpointReply:
        """Describe a checkpoint: the name, config and spec of each attention layer that could be imported.

        Raises CheckpointNotFound, or InvalidCheckpoint for files that cannot be read.
        """
        return self.send(call(operations.get_checkpoint, locals()))

    def fetch(self, repository: str, *, revision: str | None = None, **options: Unpack[CallOptions]) -> CheckpointReply:
        """Let the server fetch a repository of the Hugging Face hub, such as ``openai-community/gpt2``.

        Raises Forbidden unless the server's operator allows it, CheckpointNotFound, and Unavailable if the hub cannot
        be reached.
        """
        return self.send(call(operations.fetch_checkpoint, locals()))


class AsyncCheckpoints(AsyncResource):
    """The same calls as ``Checkpoints``, awaited."""

    async def list(self, **options: Unpack[CallOptions]) -> CheckpointList:
        """List every checkpoint of the model repository: family, layers, widths and bytes. Nothing is loaded."""
        return await self.send(call(operations.list_checkpoints, locals()))

    async def get(self, path: str, **options: Unpack[CallOptions]) -> CheckpointReply:
        """Describe a checkpoint: the name, config and spec of each attention layer that could be imported.

        Raises CheckpointNotFound, or InvalidCheckpoint for files that cannot be read.
        """
        return await self.send(call(operations.get_checkpoint, locals()))

    async def fetch(
        self, repository: str, *, revision: str | None = None, **options: Unpack[CallOptions]
    ) -> CheckpointReply:
        """Let the server fetch a repository of the Hugging Face hub, such as ``openai-community/gpt2``.

        Raises Forbidden unless the server's operator allows it, CheckpointNotFound, and Unavailable if the hub cannot
        be reached.
        """
        return await self.send(call(operations.fetch_checkpoint, locals()))
