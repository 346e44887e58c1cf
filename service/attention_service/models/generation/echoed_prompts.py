"""The prompt at the beginning of its choices: its text, and the log-probabilities of its tokens.

These come from one pass over the whole prompt, beside the passes that generate.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.core.tensors import wide
from attention_service.models.answers.model_forward import every_logit
from attention_service.models.generation.completion_objects import Json, Token
from attention_service.models.generation.generated_text import GeneratedText
from attention_service.models.generation.token_logprobs import logprob_of
from attention_service.models.inputs.model_inputs import InputReader
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel


def echoed(
    loaded: LoadedModel, ids: list[int], text: str | None, edits: Any, logprobs: int | None, choices: Sequence[int]
) -> list[list[Token]]:
    """The tokens of a prompt, for each of its choices. ``text``: the prompt, if it came as one.

    ``edits`` by layer; ``logprobs``: the likeliest tokens to name beside each, None for no log-probabilities.
    """
    pieces = _pieces(loaded.reader, ids, text)
    scores: list[Json | None] = [None] * len(ids)
    if logprobs is not None:
        checked = check_request(loaded, ModelForwardRequest(tokens=ids, edits=edits))
        scores = _logprobs(loaded.reader, ids, every_logit(loaded, checked)[0], logprobs)
    return [
        [Token(choice, piece, at, None, one, None) for (at, piece), one in zip(pieces, scores, strict=True)]
        for choice in choices
    ]


def _pieces(reader: InputReader, ids: list[int], text: str | None) -> list[tuple[int, str]]:
    """The first character of each token, and the text that ends with it; all of a text that came comes first."""
    if text is not None:
        spans = reader.tokens(text, "prompt").spans
        starts, at = [], 0
        for span in spans:
            at = at if span is None else span[0]
            starts.append(at)
        return [(at, "" if number else text) for number, at in enumerate(starts)]
    stream = GeneratedText(reader.tokenizer, [], ())
    found = []
    for token in ids:
        at = stream.given
        found.append((at, stream.add(token)))
    at, piece = found[-1]
    found[-1] = at, piece + stream.rest()
    return found


def _logprobs(reader: InputReader, ids: list[int], logits: Tensor, count: int) -> list[Json | None]:
    """The log-probability of each token after those before it, by logits ``[L, V]``; of the first one there is none."""
    name = reader.tokenizer
    first: Json = {"token": logprob_of(name, ids[0], None, 0)["token"], "logprob": None, "top_logprobs": None}
    rows = (torch.log_softmax(wide(row), -1) for row in logits[:-1])
    return [first, *(logprob_of(name, token, row, count) for token, row in zip(ids[1:], rows, strict=True))]
