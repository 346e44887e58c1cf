"""The prompt at the beginning of its choices: its text, and the log-probabilities of its tokens.

These come from one pass over the whole prompt, beside the passes that generate.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.core.tensors import wide
from attention_service.models.answers.model_forward import every_logit
from attention_service.models.generation.decoding.generated_text import Characters
from attention_service.models.generation.decoding.sampling import Sampling
from attention_service.models.generation.objects.completion_objects import Token
from attention_service.models.generation.objects.token_logprobs import TokenLogprobs, logprobs_of
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.token_texts import TokenDecoder, TokenTexts
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel


def echoed(
    loaded: LoadedModel, ids: list[int], text: str | None, edits: Any, sampling: Sampling, choices: Sequence[int],
    *, special: bool = True,
) -> list[list[Token]]:  # fmt: skip
    """The tokens of a prompt, for each of its choices. ``text``: the prompt, if it came as one.

    ``edits`` by layer; ``sampling`` says which log-probabilities to tell; ``special``: the tokenizer added tokens. The
    text of a prompt that came as tokens ends before a character that its last tokens only begin.
    """
    reader = loaded.reader
    parts = _decoded(reader.decoder, ids)
    if text is not None and b"".join(parts) != text.encode():
        parts = _cut(reader, text, special=special)
    characters = Characters()
    placed = [characters.add(raw) for raw in parts]
    scores: list[TokenLogprobs | None] = [None] * len(ids)
    if sampling.logprobs is not None:
        checked = check_request(loaded, ModelForwardRequest(tokens=ids, edits=edits))
        scores = [*_logprobs(reader.decoder, ids, parts, every_logit(loaded, checked)[0], sampling)]
    return [
        [
            Token(choice, new, place.begin, None, score, None, place.raw)
            for (place, new), score in zip(placed, scores, strict=True)
        ]
        for choice in choices
    ]


def unfinished(tokens: Sequence[Token]) -> str:
    """U+FFFD for a character that the last tokens of a prompt begin, if no answer goes on with it."""
    characters = Characters()
    for token in tokens:
        characters.add(token.raw)
    return characters.rest()


def _decoded(decoder: TokenDecoder, ids: Sequence[int]) -> list[bytes]:
    texts = TokenTexts(decoder)
    return [texts.add(token) for token in ids]


def _cut(reader: InputReader, text: str, *, special: bool) -> list[bytes]:
    """The bytes of each token in a text that the tokenizer does not give back as it was, by the characters it tells.

    Each token begins where the one before ends, and the last has what follows; the first has all where the tokenizer
    tells no characters.
    """
    spans = reader.tokens(text, "prompt", special=special).spans
    last = max((at for at, span in enumerate(spans) if span is not None), default=0)
    cut, done = list[bytes](), 0
    for at, span in enumerate(spans):
        end = len(text) if at == last else done if span is None else max(done, span[1])
        cut.append(text[done:end].encode())
        done = end
    return cut


def _logprobs(
    decoder: TokenDecoder, ids: list[int], parts: list[bytes], logits: Tensor, sampling: Sampling
) -> Iterator[TokenLogprobs]:
    """The log-probability of each token after those before it, by logits ``[L, V]``; of the first one there is none."""
    before = TokenTexts(decoder)
    for at, (token, raw) in enumerate(zip(ids, parts, strict=True)):
        logs = torch.log_softmax(wide(logits[at - 1]), -1) if at else None
        scored = logprobs_of(decoder, token, before.peek, logs, sampling.logprobs or 0, sampling.named_tokens)
        scored.chosen.raw = raw
        before.add(token)
        yield scored
