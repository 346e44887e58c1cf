"""The requests of a survey: batches of texts of similar lengths, then the strongest passages one by one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Flow
from attention_client.media_files import with_media
from attention_client.survey.head_survey import SURVEYED, HeadSurvey, Passage, SurveyedHead
from attention_contract import operations
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelWeightsReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import MAX_TEXTS
from attention_contract.schemas.weights import StatisticName

OnTexts = Callable[[int, int], None]
"""Called with the number of texts that are done, and that of all."""


def surveyed(
    model: str,
    texts: Sequence[str],
    names: Sequence[StatisticName] | None,
    batch: int,
    on_texts: OnTexts | None,
    options: Mapping[str, Any],
) -> Flow[HeadSurvey]:
    """Ask for the statistics of all texts, a batch a request. Raises InvalidRequest that names the text at fault.

    With ``audio`` among the options, each text is the decoder's, of the sound at its index.
    """
    fields: dict[str, Any] = with_media({"options": options})["options"]
    audio = fields.pop("audio", None)
    _check(texts, audio, batch)
    wanted = SURVEYED if names is None else [*dict.fromkeys(names)]
    if not wanted or "classes" in wanted:
        raise InvalidRequest.at("statistics", f"expected some of {', '.join(SURVEYED)}")
    batch = batch if audio is None else 1
    heads: list[SurveyedHead] = []
    values: dict[str, NDArray[Any]] = {}
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))  # little padding
    for start in range(0, len(texts), batch):
        chosen = order[start : start + batch]
        read = {"text": [texts[at] for at in chosen]} if audio is None else _heard(audio, texts, chosen[0])
        sent = {"model": model, **read, "statistics": wanted, "return_weights": False}
        try:
            reply: ModelWeightsReply = yield call(operations.model_weights, sent | {"options": fields})
        except InvalidRequest as fault:
            field, _, number = (fault.param or "").partition(".")
            if field != "text" or not number.isdecimal():
                raise
            detail = fault.detail.removeprefix(f"{fault.param}: ")
            raise InvalidRequest.at(f"texts.{chosen[int(number)]}", detail) from None
        found = {
            name: np.concatenate([np.atleast_2d(getattr(layer.statistics, name)) for layer in reply.layers], axis=1)
            for name in wanted
        }  # fmt: skip
        for name, array in found.items():
            values.setdefault(name, np.empty((len(texts), array.shape[1]), array.dtype))[chosen] = array
        if not heads:
            for layer in reply.layers:
                count = getattr(layer.statistics, wanted[0]).shape[-1]
                heads += [SurveyedHead(layer.layer, head) for head in range(count)]
        if on_texts is not None:
            on_texts(start + len(chosen), len(texts))
    beside = fields | {"audio": audio}
    inputs = {name: beside[name] for name in ("edits", "statistic_options", "audio") if beside.get(name) is not None}
    return HeadSurvey(model, tuple(texts), heads, values, inputs)


def _check(texts: Sequence[str], audio: Sequence[Any] | None, batch: int) -> None:
    """Raise InvalidRequest for inputs that are no texts, or not a sound for each of them."""
    if isinstance(texts, str) or not texts:
        raise InvalidRequest.at("texts", "expected a list of texts, with one at least")
    for at, text in enumerate(texts):
        if not text:
            raise InvalidRequest.at(f"texts.{at}", "expected a text that is not empty")
    if not 1 <= batch <= MAX_TEXTS:
        raise InvalidRequest.at("batch", f"expected 1 to {MAX_TEXTS} texts a request, got {batch}")
    if audio is not None and len(audio) != len(texts):
        raise InvalidRequest.at("audio", f"expected a sound for each of {len(texts)} texts, got {len(audio)}")


def _heard(audio: Sequence[Any], texts: Sequence[str], at: int) -> dict[str, Any]:
    return {"audio": [audio[at]], "target": texts[at]}


def weights_call(survey: HeadSurvey, text: int, options: CallOptions, **fields: Any) -> Call[ModelWeightsReply]:
    """Return the request for the weights of one text, as it was surveyed."""
    edits = {name: each for name, each in survey.inputs.items() if name == "edits"}
    audio = survey.inputs.get("audio")
    read = {"text": survey.texts[text]} if audio is None else _heard(audio, survey.texts, text)
    request = {"model": survey.model, **read, "statistics": [], **edits, **fields}
    return call(operations.model_weights, request | {"options": options})


def read_passages(
    survey: HeadSurvey, head: tuple[LayerRef, int], by: str, count: int, top_k: int, options: CallOptions
) -> Flow[list[Passage]]:
    """Ask for the weights of one head in its strongest texts."""
    layer, number = head
    values, found = survey.of(by)[:, survey.index(layer, number)], []
    for text in survey.strongest(layer, number, by, count):
        reply = yield weights_call(survey, text, options, layers=[layer], select={"heads": [number]}, top_k=top_k)
        found.append(Passage(text, float(values[text]), reply))
    return found
