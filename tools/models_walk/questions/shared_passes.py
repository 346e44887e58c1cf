"""Requests of several callers that share a pass, beside the same requests alone."""

from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel

from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.validation import validate
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.checked_request import read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import IDS, NotAskedError

TOKENS: Final = [IDS[:7], IDS[2:], IDS[:4]]
"""The texts of three callers. The second one edits its own."""
_TOP: Final = 96
"""All tokens of the small models, in the order of their logits."""


def shared(_: PreTrainedModel, loaded: LoadedModel) -> float:
    """The logits and weights of each of three requests in one pass are those of the request alone.

    One of them edits an attention of its text, which changes neither of the others.
    """
    asks: list[Any] = [(ModelWeightsRequest, {"statistics": ["entropy"]})] if loaded.places else []
    if loaded.head.predicts == "next":
        asks.append((ModelForwardRequest, {"top_k": _TOP}))
    errors = [found for kind, fields in asks if (found := _error(loaded, kind, fields)) is not None]
    if not errors:
        raise NotAskedError(_why(loaded))
    return max(errors)


def _why(loaded: LoadedModel) -> str:
    """The reason for which no texts of several requests share a pass."""
    none = "and its requests share no pass"
    if loaded.reader.pairs:
        return f"it reads a text by an encoder, {none}"
    if not loaded.places:
        return f"it mixes tokens by a running state, {none}"
    if loaded.attention.way == "observed":
        return f"it computes its attention itself, {none}"
    if loaded.reader.mixes_padding(2 * len(IDS)):
        return f"padding changes its numbers, {none}"
    return f"it takes other arguments than those of texts, or attends over other keys, {none}"


def _error(loaded: LoadedModel, kind: Any, fields: dict[str, Any]) -> float | None:
    """The largest difference of the replies in one pass from those alone; None if they share none."""
    able = [place.key for place in loaded.places.values() if place.refusal("context") is None]
    edits = {str(able[0]): [{"tap": "context", "heads": [0], "scale": 0.5}]} if able else {}
    of_each = [{"tokens": ids, "edits": edits if number == 1 else {}} for number, ids in enumerate(TOKENS)]
    requests = [validate(kind, {**own, **fields}) for own in of_each]
    pairs = [(request, read_request(loaded, request)) for request in requests]
    groups = {group_of(loaded, *each) for each in pairs}
    if groups == {None}:
        return None
    if len(groups) > 1:
        raise AssertionError(f"expected one group, got {groups}")
    answer: Any = forward_reply if kind is ModelForwardRequest else weights_reply
    alone = [answer(loaded, request, checked) for request, checked in pairs]
    together = joined_replies(loaded, pairs)
    return max(error(x, y) for one, other in zip(together, alone, strict=True) for x, y in _numbers(one, other))


def _numbers(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """The pairs of numbers of two replies to compare."""
    if isinstance(one, list):
        raise TypeError("expected one reply")
    if hasattr(other, "predictions"):
        return [(_logits(x), _logits(y)) for x, y in zip(one.predictions, other.predictions, strict=True)]
    return [
        pair
        for x, y in zip(one.layers, other.layers, strict=True)
        for pair in ((x.weights, y.weights), (x.statistics.entropy, y.statistics.entropy))
    ]


def _logits(prediction: Any) -> np.ndarray:
    """The logits by token, of a prediction that lists all tokens."""
    found = {each.id: each.logit for each in prediction.top}
    return np.asarray([found[token] for token in sorted(found)])
