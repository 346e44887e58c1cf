"""Asks: the attention that one request wants, read and checked without knowing the model. No vLLM in here."""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np
from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.exact_types import Index
from attention_contract.schemas.attention import AddedVector, Edit
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.validation import validate
from attention_service.core.inspection.statistics import CLASS_SHARES, OF_SOME, PAIR_STATISTICS, PAIRS

EDITED_TAPS: Final = frozenset(
    {"q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "output"}
)
"""The taps of an attention: those between its projections, and what it adds to the states of its tokens."""
_SCORES: Final = frozenset({"scores", "capped_scores", "masked_scores"})
_ANSWERED_OF_SOME: Final = frozenset({"sink_mass", PAIRS})
"""The statistics that some attentions lack, of which vLLM has attentions, and the one of given pairs."""
ReadTap = Literal["weights", "context", "output"]
TAPS: Final = frozenset(get_args(ReadTap))
"""The taps that are read of whole texts."""
AskText = Annotated[str, Field(min_length=1, max_length=256)]


class SpanTokens(WireModel):
    """The tokens of named parts of a prompt, and the prompt to which they belong."""

    prompt: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The ``prompt_digest`` of its tokens."""
    tokens: Annotated[list[list[Index]], Field(max_length=64)]
    """The positions of the tokens of each span of the ask."""


def prompt_digest(tokens: Iterable[int]) -> str:
    """Return what tells the tokens of a prompt from those of another one."""
    return sha256(",".join(map(str, tokens)).encode()).hexdigest()


class AttentionAsk(WireModel):
    """An ask, as it travels in ``SamplingParams.extra_args["attention"]``: an object, or its JSON text."""

    id: AskText
    """A name of the caller's choice, under which the results come."""
    attention: AttentionOfTokens = Field(default_factory=AttentionOfTokens)
    cache_salt: AskText | None = None
    """The ``cache_salt`` of the same request. Edits need one: without it, others would read their keys and values."""
    reply_to: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    """The name of the socket to which results go; None keeps them in the process of the worker."""
    taps: Annotated[list[ReadTap], Field(max_length=len(TAPS))] = Field(default_factory=list)
    """The taps to read of all tokens of the prompt, beside no statistics, top keys and weights of tokens."""
    spans: SpanTokens | None = None
    """The tokens of the spans that are not named by tokens; None refuses these."""


def read_ask(given: Any) -> AttentionAsk:
    """Read an ask. Raises InvalidRequest that names the field at fault."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise InvalidRequest.at("attention", "expected the JSON text of an ask") from None
    if not isinstance(given, Mapping):
        raise InvalidRequest.at("attention", "expected an object, or its JSON text")
    ask = validate(AttentionAsk, given, by_name=False)
    check_answered(ask.attention, spans_known=ask.spans is not None)
    if ask.taps and (ask.attention.statistics != [] or ask.attention.top_k or ask.attention.weights):
        raise InvalidRequest.at("taps", "they are of whole texts, and come without statistics, top keys and weights")
    if any(ask.attention.edits.values()) and ask.cache_salt is None:
        raise InvalidRequest.at(
            "cache_salt", "edits change keys and values, which vLLM shares among prompts that begin alike; send a "
            "cache_salt of their own, in the request and in the ask"
        )  # fmt: skip
    return ask


def ask_id(given: Any) -> tuple[str | None, str | None]:
    """Return the id and the socket of an ask that may be wrong, to tell of it; None for what it lacks."""
    try:
        given = json.loads(given) if isinstance(given, str) else given
        ids = [given_id if isinstance(given_id, str) else None for given_id in (given.get("id"), given.get("reply_to"))]
    except (ValueError, AttributeError):
        return None, None
    return ids[0], ids[1] if ids[1] is None or ids[1].isalnum() else None


def check_answered(wanted: AttentionOfTokens, *, spans_known: bool = True) -> None:
    """Raise InvalidRequest for a field that is not answered inside of vLLM, whatever the model.

    ``spans_known``: True if the tokens of spans that name none are known.
    """
    for name, given in (("steer", wanted.steer), ("keep", wanted.keep), ("watch", wanted.watch)):
        if given:
            raise InvalidRequest.at(f"attention.{name}", "it is not answered inside of vLLM; leave it out")
    for index, layer in enumerate(() if wanted.layers == "all" else wanted.layers):
        if not isinstance(layer, int):
            raise InvalidRequest.at(f"attention.layers.{index}", "layers are numbers inside of vLLM")
    _check_statistics(wanted, spans_known=spans_known)
    for key, edits in wanted.edits.items():
        if not key.isdecimal():
            raise InvalidRequest.at(f"attention.edits.{key}", "edits are of layers, by their number, inside of vLLM")
        for index, edit in enumerate(edits):
            _check_edit(edit, f"attention.edits.{key}.{index}")


def _check_statistics(wanted: AttentionOfTokens, *, spans_known: bool) -> None:
    edited = {edit.tap for edits in wanted.edits.values() for edit in edits}
    for index, name in enumerate(wanted.statistics or ()):
        param = f"attention.statistics.{index}"
        if name in PAIR_STATISTICS:
            raise InvalidRequest.at(param, f"{name} compares the queries of a text; each token is told of alone here")
        if name in OF_SOME and name not in _ANSWERED_OF_SOME:
            raise InvalidRequest.at(param, f"{name} needs {OF_SOME[name].needs}, which there is not here; leave it out")
        if name in OF_SOME and (spoiled := edited.intersection(OF_SOME[name].spoiled_by)):
            raise InvalidRequest.at(param, f"{name} {OF_SOME[name].spoiled_by[min(spoiled)]}; leave one of the two out")
    options = wanted.statistic_options
    if CLASS_SHARES in (wanted.statistics or ()) and not (options.token_classes or options.spans):
        raise InvalidRequest.at(
            "attention.statistic_options.token_classes", "the statistic classes has no class; name some, or spans"
        )
    for index, span in enumerate(options.spans):
        if span.tokens is None and not spans_known:
            field = "characters" if span.messages is None else "messages"
            raise InvalidRequest.at(
                f"attention.statistic_options.spans.{index}.{field}",
                "the characters of tokens are known to the server of the API alone; name tokens",
            )


def _check_edit(edit: Edit, param: str) -> None:
    if edit.tap not in EDITED_TAPS:
        raise InvalidRequest.at(f"{param}.tap", f"expected one of {', '.join(sorted(EDITED_TAPS))} inside of vLLM")
    if isinstance(edit.add, AddedVector):
        raise InvalidRequest.at(f"{param}.add", "vectors are kept by attention-service; send numbers")
    for name, given in (("set", edit.set), ("scale", edit.scale), ("value", edit.value), ("add", edit.added)):
        if given is None:
            continue
        numbers = np.asarray(given)
        meant = np.isfinite(numbers)
        if hides := edit.tap in _SCORES and name in {"set", "value"}:
            meant |= np.isneginf(numbers)
        if not meant.all():
            beside = ", or -Infinity, which hides a key" if hides else ""
            raise InvalidRequest.at(f"{param}.{name}", f"expected finite numbers{beside}; got NaN or infinity")


def statistic_names(wanted: AttentionOfTokens, default: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the statistics to tell, each once."""
    return tuple(default) if wanted.statistics is None else tuple(dict.fromkeys(wanted.statistics))
