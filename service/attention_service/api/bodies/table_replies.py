"""Replies as tables: their rows in Apache Arrow or Parquet. Writing them needs the extra ``tables``."""

import asyncio
from importlib.util import find_spec
from typing import Any, Final

from attention_contract.arrow_tables import write_table
from attention_contract.errors import InvalidRequest, NotAcceptable
from attention_contract.json_writing import tensor_bytes
from attention_contract.schemas.openai import ChatCompletionRequest, CompletionRequest
from attention_contract.schemas.openai_api.responses import ResponseRequest
from attention_contract.schemas.openai_api.transcriptions import TranscriptionRequest
from attention_contract.wire import JSON, TABLES
from attention_service.runtime.scheduling.budget import Budget

_GENERATES: Final = (ChatCompletionRequest, CompletionRequest, ResponseRequest, TranscriptionRequest)
_COPIES: Final = 4
"""Bytes of a table and of its file, in those of the reply's numbers."""
_OF_WEIGHTS: Final = ("top_k", "select", "pool", "average_heads")
"""Fields of a request for weights that change no statistic."""


def check_writable(media_type: str) -> None:
    """Raise NotAcceptable for a table if this server has nothing to write it with."""
    if find_spec("pyarrow") is None:
        raise NotAcceptable(
            f"Accept: {media_type} is written by pyarrow, which this server lacks; install its extra tables "
            f"(attention-service[tables]), or ask for {JSON}",
            offered=[JSON],
        )


def with_rows(request: Any) -> Any:
    """Return the request without what has no column in its table. Raises InvalidRequest if that was asked for."""
    if isinstance(request, _GENERATES):
        if request.stream:
            raise InvalidRequest.at("stream", "a table is one body; leave it out, or take JSON")
        if getattr(request, "response_format", None) in ("text", "srt", "vtt"):
            raise InvalidRequest.at("response_format", "a table takes the place of text; leave one of them out")
        if request.attention is None:
            raise InvalidRequest.at("attention", "a table has a row for each token and head; say what of its attention")
        return request
    for name in _OF_WEIGHTS:
        if getattr(request, name):
            raise InvalidRequest.at(name, "a table has statistics alone; leave it out, or take JSON")
    if request.statistics == []:
        raise InvalidRequest.at("statistics", "a table has a column for each; name one, or leave it out")
    return request.model_copy(update={"return_weights": False})


async def write(reply: Any, request: Any, media_type: str, budget: Budget) -> bytes:
    """Write the table of a reply in another thread, with its memory from the budget. Raises what that raises."""
    generated = isinstance(request, _GENERATES)
    need = _COPIES * tensor_bytes(reply)
    budget.check(need, "the table takes {need} bytes", "Ask for fewer layers or tokens")
    async with budget.holding(need):
        return await asyncio.to_thread(_written, reply, request.attention.heads if generated else None, media_type)


def _written(reply: Any, heads: Any, media_type: str) -> bytes:
    table = reply.to_table() if heads is None else reply.to_table(heads)
    return write_table(table, TABLES[media_type])
