"""Generated texts, embeddings and tokens, as a notebook shows them."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from attention_contract.reply_names import head_name
from attention_contract.schemas.openai import (
    ChatCompletion,
    Completion,
    Embeddings,
    GeneratedToken,
    TokenLogprob,
)
from attention_contract.schemas.openai_api.responses import ModelResponse
from attention_contract.schemas.openai_api.tokenization import Tokenization
from attention_contract.schemas.openai_api.transcriptions import Transcription
from attention_pictures.notebook.html_tables import tokens_html
from attention_pictures.notebook.notebook_maps import Maps, html_of, statistic_maps
from attention_pictures.statistic_tables import named, tables


def chat_html(reply: ChatCompletion) -> str:
    """The text of each choice by its tokens, and their attention."""
    return "".join(
        _generated(
            choice.message.content or "",
            _chosen(choice.logprobs.content if choice.logprobs else None),
            choice.attention,
        )
        for choice in reply.choices
    )


def completion_html(reply: Completion) -> str:
    """The text of each choice by its tokens, and their attention."""
    shown = []
    for choice in reply.choices:
        known = choice.logprobs
        numbers = None if known is None else (known.tokens, [x if x is not None else 0.0 for x in known.token_logprobs])
        shown.append(_generated(choice.text, numbers, choice.attention))
    return "".join(shown)


def response_html(reply: ModelResponse) -> str:
    """The text of the answer by its tokens, and their attention."""
    parts = [part for message in reply.output for part in message.content]
    return "".join(_generated(part.text, _chosen(part.logprobs), part.attention) for part in parts)


def transcription_html(reply: Transcription) -> str:
    """The text of a sound by its tokens, and their attention."""
    return _generated(reply.text, _chosen(reply.logprobs), reply.attention)


def embeddings_html(reply: Embeddings) -> str | None:
    """A map of the cosines of all pairs; None for one vector, and for vectors in base64."""
    vectors = [item.embedding for item in reply.data if not isinstance(item.embedding, str)]
    if len(vectors) < 2:
        return None
    states = np.asarray(vectors, np.float64)
    states /= np.maximum(np.linalg.norm(states, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    names = [f"input {item.index}" for item in reply.data]
    return Maps((states @ states.T)[None], ["cosine"], names, names, f"Cosines of {reply.model}", "Map", True).html()


def tokenization_html(reply: Tokenization) -> str:
    """The tokens of a text, every other one on a colour."""
    every_other = [float(at % 2) for at in range(reply.count)]
    return tokens_html(f"{reply.count} tokens", reply.labels.tokens, every_other, colours="every other token has one")


def _generated(
    text: str, numbers: tuple[Sequence[str], Sequence[float]] | None, attention: list[GeneratedToken] | None
) -> str:
    if numbers is not None and numbers[0]:
        shown = tokens_html("log p of each token", *numbers)
    else:
        shown = f"<p style='white-space:pre-wrap'>{escape(text)}</p>"
    return shown + (html_of([*_weight_maps(attention), *_statistic_maps(attention)] if attention else []) or "")


def _chosen(logprobs: Sequence[TokenLogprob] | None) -> tuple[list[str], list[float]] | None:
    return (
        None
        if not logprobs
        else ([chosen.token for chosen in logprobs], [float(chosen.logprob) for chosen in logprobs])
    )


def _weight_maps(tokens: Sequence[GeneratedToken]) -> Iterable[Maps]:
    """A map ``[generated tokens, positions]`` for each head whose weights came."""
    rows = [token.token for token in tokens]
    maps: list[Any] = []
    names: list[str] = []
    for at, layer in enumerate(tokens[0].layers):
        lines = [token.layers[at].weights for token in tokens]
        if any(line is None for line in lines):
            continue
        length = max(line.shape[-1] for line in lines)
        padded = [np.pad(line, ((0, 0), (0, length - line.shape[-1])), constant_values=np.nan) for line in lines]
        maps += list(np.stack(padded, 1))
        names += [head_name(layer.layer, head) for head in range(padded[0].shape[0])]
    if maps and len({drawn.shape for drawn in maps}) == 1:
        keys = [str(key) for key in range(maps[0].shape[1])]
        yield Maps(np.stack(maps), names, rows, keys, "Weights by generated token and position")


def _statistic_maps(tokens: Sequence[GeneratedToken]) -> Iterable[Maps]:
    """A map ``[generated tokens, heads of all layers]`` for each statistic."""
    rows = [
        tables([named(layer.statistics) for layer in token.layers if layer.statistics is not None]) for token in tokens
    ]
    layers = [layer.layer for layer in tokens[0].layers if layer.statistics is not None]
    most = max((table.shape[1] for row in rows for table in row.values()), default=0)
    heads = [head_name(layer, head) for layer in layers for head in range(most)]
    flat = [
        (token.token, {name: x.ravel() for name, x in row.items()}) for token, row in zip(tokens, rows, strict=True)
    ]
    return statistic_maps(flat, "Statistics by generated token and head", heads=heads)
