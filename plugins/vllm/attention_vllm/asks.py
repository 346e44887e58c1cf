"""Asks: the attention that one request wants, read and checked without knowing the model. No vLLM in here."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import AddedVector, Edit
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.validation import validate
from attention_service.core.inspection.statistics import CLASS_SHARES, OF_SOME, PAIR_STATISTICS

EDITED_TAPS: Final = frozenset({"q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context"})
"""The taps between the projections of a layer. Others are not inside of vLLM's attention backends."""
_SCORES: Final = frozenset({"scores", "capped_scores", "masked_scores"})
_ANSWERED_OF_SOME: Final = frozenset({"sink_mass"})
"""The statistics that some attentions lack, of which vLLM has attentions."""
AskText = Annotated[str, Field(min_length=1, max_length=256)]


class AttentionAsk(WireModel):
    """An ask, as it travels in ``SamplingParams.extra_args["attention"]``: an object, or its JSON text."""

    id: AskText
    """A name of the caller's choice, under which the results come."""
    attention: AttentionOfTokens = Field(default_factory=AttentionOfTokens)
    cache_salt: AskText | None = None
    """The ``cache_salt`` of the same request. Edits need one: without it, others would read their keys and values."""
    reply_to: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    """The name of the socket to which results go; None keeps them in the process of the worker."""


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
    check_answered(ask.attention)
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


def check_answered(wanted: AttentionOfTokens) -> None:
    """Raise InvalidRequest for a field that is not answered inside of vLLM, whatever the model."""
    for name, given in (("steer", wanted.steer), ("keep", wanted.keep), ("watch", wanted.watch)):
        if given:
            raise InvalidRequest.at(f"attention.{name}", "it is not answered inside of vLLM; leave it out")
    for index, layer in enumerate(() if wanted.layers == "all" else wanted.layers):
        if not isinstance(layer, int):
            raise InvalidRequest.at(f"attention.layers.{index}", "layers are numbers inside of vLLM")
    _check_statistics(wanted)
    for key, edits in wanted.edits.items():
        if not key.isdecimal():
            raise InvalidRequest.at(f"attention.edits.{key}", "edits are of layers, by their number, inside of vLLM")
        for index, edit in enumerate(edits):
            _check_edit(edit, f"attention.edits.{key}.{index}")


def _check_statistics(wanted: AttentionOfTokens) -> None:
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
        if span.tokens is None:
            field = "characters" if span.messages is None else "messages"
            raise InvalidRequest.at(
                f"attention.statistic_options.spans.{index}.{field}",
                "the characters of tokens are not known inside of vLLM; name tokens",
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
