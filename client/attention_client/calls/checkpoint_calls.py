"""Checkpoints of the server's model repository: listing, describing and fetching them."""

from typing import Unpack

from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Group, WayT, method
from attention_contract import operations
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply


class Checkpoints(Group[WayT]):
    """Calls about checkpoints."""

    @method
    def list(self, **options: Unpack[CallOptions]) -> Call[CheckpointList]:
        """List every checkpoint of the model repository: family, layers, widths and bytes. Nothing is loaded."""
        return call(operations.list_checkpoints, locals())

    @method
    def get(self, path: str, **options: Unpack[CallOptions]) -> Call[CheckpointReply]:
        """Describe a checkpoint: the name, config and spec of each attention layer that could be imported.

        Raises CheckpointNotFound, or InvalidCheckpoint for files that cannot be read.
        """
        return call(operations.get_checkpoint, locals())

    @method
    def fetch(
        self, repository: str, *, revision: str | None = None, **options: Unpack[CallOptions]
    ) -> Call[CheckpointReply]:
        """Let the server fetch a repository of the Hugging Face hub, such as ``openai-community/gpt2``.

        Raises Forbidden unless the server's operator allows it, CheckpointNotFound, and Unavailable if the hub cannot
        be reached.
        """
        return call(operations.fetch_checkpoint, locals())
