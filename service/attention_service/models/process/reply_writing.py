"""Replies and events of a model's process, as bytes of the contract."""

from collections.abc import Sequence
from typing import Any

import orjson

from attention_contract.base import WireModel
from attention_contract.json_writing import AT_ONCE, tensor_bytes, to_json
from attention_contract.tensor_files import to_safetensors
from attention_contract.tensors import Encoding
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.models.worker_messages import Piece


def written(reply: WireModel, form: str, encoding: Encoding) -> tuple[str, Sequence[Piece]]:
    """Return the media type and the pieces of a reply.

    A JSON text of many numbers is not made here, where it would hold up other requests: the server makes it piece by
    piece from safetensors, while it is sent.
    """
    if form == JSON and tensor_bytes(reply) <= AT_ONCE:
        return JSON, [to_json(reply, encoding)]
    return SAFETENSORS, to_safetensors(reply, "reply")


def lines_of(objects: Sequence[Any]) -> bytes:
    """Objects as JSON, one a line. Their numbers are finite."""
    return b"\n".join([orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY) for part in objects])
