"""The requests of a survey: batches of texts of similar lengths, then the strongest passages one by one."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from attention_client.calls.base import Call, CallOptions, call
from attention_client.calls.method import Flow
from attention_client.media_files import with_media
from attention_client.survey.head_survey import SURVEYED, HeadSurvey, Passage, SurveyedHead
from attention_contract import operations
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import LayerWeights, ModelStatisticOptions, ModelWeightsReply
from attention_contract.schemas.models import LayerRef
from attention_contract.schemas.prompts import MAX_TEXTS
from attention_contract.schemas.weights import BY_KEY, NEEDS_NEEDLE, StatisticName

OnTexts = Callable[[int, int], None]
"""Called with the number of texts that are done, and that of all."""
_OF_A_TEXT: Final = re.compile(
    r"(text|answer|statistic_options\.(?:needle|pairs|candidates|passages\.[^.]+))\.(\d+)((?:\.\d+)*)"
)
"""The fields of a request with one entry for each text."""


_DEPTHS: Final = {"pairs": 2, "candidates": 1}
"""Options with a list for each text, or one for all, and the lists in each other of one text."""


@dataclass(frozen=True)
class _TextFields:
    """The fields of a request for weights that are those of one text: a list for all texts, or one entry for each."""

    options: Mapping[str, Any]
    count: int

    @property
    def statistic_options(self) -> dict[str, Any]:
        """The options of the statistics, as they are for all texts."""
        given = self.options.get("statistic_options") or {}
        return given.model_dump(exclude_unset=True) if isinstance(given, ModelStatisticOptions) else dict(given)

    @property
    def classes(self) -> list[str]:
        """The names of the classes of keys."""
        given = self.statistic_options
        return [*(given.get("token_classes") or {}), *(given.get("passages") or {})]

    def check(self) -> None:
        """Raise InvalidRequest for a list that has not one entry for each text."""
        given = self.statistic_options
        lists = {"answer": self.options.get("answer"), "statistic_options.needle": given.get("needle")}
        lists |= {
            f"statistic_options.passages.{name}": text_values
            for name, text_values in (given.get("passages") or {}).items()
        }
        lists |= {f"statistic_options.{name}": given.get(name) for name in _DEPTHS if _is_by_text(name, given)}
        for name, text_values in lists.items():
            if text_values is not None and not isinstance(text_values, str) and len(text_values) != self.count:
                raise InvalidRequest.at(name, f"expected one for each of {self.count} texts; got {len(text_values)}")

    def of(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Return those of these texts, with a list in each."""

        def own(field: str | Sequence[str]) -> list[str]:
            return [field if isinstance(field, str) else field[text] for text in chosen]

        fields, given = dict(self.options), self.statistic_options
        if fields.get("answer") is not None:
            fields["answer"] = own(fields["answer"])
        if given.get("needle") is not None:
            given["needle"] = own(given["needle"])
        if given.get("passages"):
            given["passages"] = {name: own(per_text) for name, per_text in given["passages"].items()}
        for name in _DEPTHS:
            if (lists := given.get(name)) is not None:
                given[name] = [lists[text] if _is_by_text(name, given) else lists for text in chosen]
        return fields | {"statistic_options": given} if given else fields


def _is_by_text(name: str, options: Mapping[str, Any]) -> bool:
    """True for pairs or candidates that are a list for each text, and not one for all."""
    value, depth = options.get(name), 0
    while isinstance(value, list | tuple | np.ndarray) and len(value):
        value, depth = value[0], depth + 1
    return depth > _DEPTHS[name]


def surveyed(
    model: str,
    texts: Sequence[str],
    names: Sequence[StatisticName] | None,
    batch: int,
    answer_tokens: int,
    on_texts: OnTexts | None,
    options: Mapping[str, Any],
) -> Flow[HeadSurvey]:
    """Ask for the statistics of all texts, a batch a request, after their answers if a statistic needs these.

    With ``audio`` among the options, each text is of the sound at its index: the decoder's, if the model has one.
    Raises InvalidRequest that names the text at fault.
    """
    fields: dict[str, Any] = with_media({"options": options})["options"]
    audio = fields.pop("audio", None)
    _check(texts, audio, batch)
    wanted = SURVEYED if names is None else [*dict.fromkeys(names)]
    of_texts = _TextFields(fields, len(texts))
    of_texts.check()
    if not wanted or ("classes" in wanted and not of_texts.classes):
        raise InvalidRequest.at(
            "statistics",
            f"expected some of {', '.join([*SURVEYED, *BY_KEY])}; or classes, with token_classes or passages",
        )
    if NEEDS_NEEDLE.intersection(wanted) and fields.get("answer") is None and audio is None:
        fields |= {"answer": (yield from _answers(model, texts, batch, answer_tokens, fields))}
        of_texts = _TextFields(fields, len(texts))
    text_field: Literal["text", "target"] = "text"
    if audio is not None:
        batch, model_info = 1, (yield call(operations.get_model, {"model": model, "options": _call_options(fields)}))
        text_field = "target" if "target" in model_info.takes else "text"
    heads: list[SurveyedHead] = []
    values: dict[str, NDArray[Any]] = {}
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))  # little padding
    for start in range(0, len(texts), batch):
        chosen = order[start : start + batch]
        read = {"text": [texts[at] for at in chosen]} if audio is None else _heard(audio, texts, chosen[0], text_field)
        sent = {"model": model, **read, "statistics": wanted, "return_weights": False}
        try:
            reply: ModelWeightsReply = yield call(operations.model_weights, sent | {"options": of_texts.of(chosen)})
        except InvalidRequest as fault:
            raise _of_all_texts(fault, chosen) from None
        by_layer = [dict(_statistics(layer, wanted, len(chosen))) for layer in reply.layers]
        for name in by_layer[0]:
            array = np.concatenate([tensors[name] for tensors in by_layer], axis=1)
            values.setdefault(name, np.empty((len(texts), array.shape[1]), array.dtype))[chosen] = array
        if not heads:
            for layer, tensors in zip(reply.layers, by_layer, strict=True):
                count = next(iter(tensors.values())).shape[1]
                heads += [SurveyedHead(layer.layer, head) for head in range(count)]
        if on_texts is not None:
            on_texts(start + len(chosen), len(texts))
    beside = fields | {"audio": audio}
    inputs = {name: beside[name] for name in ("edits", "answer", "audio") if beside.get(name) is not None}
    return HeadSurvey(model, tuple(texts), heads, values, inputs, text_field)


def _of_all_texts(fault: InvalidRequest, chosen: Sequence[int]) -> InvalidRequest:
    """The fault of a batch, with the number of the text at fault among all."""
    place = _OF_A_TEXT.fullmatch(fault.param or "")
    if place is None:
        return fault
    name = "texts" if place[1] == "text" else place[1]
    return InvalidRequest.at(f"{name}.{chosen[int(place[2])]}{place[3]}", fault.detail.removeprefix(f"{fault.param}: "))


def _statistics(layer: LayerWeights, names: Sequence[str], texts: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the statistics ``[B, H]`` of a layer by name, each class by itself: the mean over windows of a sound."""

    def by_text(array: NDArray[Any]) -> NDArray[Any]:
        rows = np.atleast_2d(array)
        return rows if len(rows) == texts else rows.mean(0, keepdims=True)

    for name in names:
        values = getattr(layer.statistics, name)
        if isinstance(values, Mapping):
            yield from ((f"{name}.{part}", by_text(array)) for part, array in values.items())
        else:
            yield name, by_text(_most_received(values) if name in BY_KEY else values)


def _most_received(array: NDArray[Any]) -> NDArray[Any]:
    """The largest of the numbers ``[..., Lk]`` of a head's keys, without those of padding."""
    most: NDArray[Any] = np.where(np.isnan(array), -np.inf, array).max(-1)
    return np.where(np.isneginf(most), np.nan, most).astype(array.dtype)


def _answers(model: str, texts: Sequence[str], batch: int, tokens: int, options: Mapping[str, Any]) -> Flow[list[str]]:
    """Have the model continue each text by its likeliest tokens, a batch a request."""
    edits = options.get("edits")
    answers: list[str] = []
    for start in range(0, len(texts), batch):
        sent: dict[str, Any] = {"model": model, "prompt": [*texts[start : start + batch]], "max_tokens": tokens}
        sent |= {"min_tokens": 1, "temperature": 0.0}
        if edits is not None:
            sent["attention"] = {"edits": edits, "statistics": []}
        reply = yield call(operations.create_completion, sent | {"options": _call_options(options)})
        answers += [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]
    return answers


def _call_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that any call has."""
    return {name: options[name] for name in CallOptions.__optional_keys__ if name in options}


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


def _heard(audio: Sequence[Any], texts: Sequence[str], at: int, text_field: str) -> dict[str, Any]:
    return {"audio": [audio[at]], text_field: texts[at]}


def weights_call(survey: HeadSurvey, text: int, options: CallOptions, **fields: Any) -> Call[ModelWeightsReply]:
    """Return the request for the weights of one text, as it was surveyed."""
    inputs = {name: value for name, value in survey.inputs.items() if name != "audio"}
    if not isinstance(inputs.get("answer", ""), str):
        inputs["answer"] = inputs["answer"][text]
    audio = survey.inputs.get("audio")
    read = {"text": survey.texts[text]} if audio is None else _heard(audio, survey.texts, text, survey.text_field)
    request = {"model": survey.model, **read, "statistics": [], **inputs, **fields}
    return call(operations.model_weights, request | {"options": options})


def read_passages(
    survey: HeadSurvey, head: tuple[LayerRef, int], by: str, count: int, top_k: int, options: CallOptions
) -> Flow[list[Passage]]:
    """Ask for the weights of one head in its strongest texts."""
    layer, number = head
    values, passages = survey.of(by)[:, survey.index(layer, number)], []
    for text in survey.strongest(layer, number, by, count):
        reply = yield weights_call(survey, text, options, layers=[layer], select={"heads": [number]}, top_k=top_k)
        passages.append(Passage(text, float(values[text]), reply))
    return passages
