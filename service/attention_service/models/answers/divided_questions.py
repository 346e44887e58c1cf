"""Forwards and weights of many texts, of some texts at a time, so that others have their turns between.

Each part is the question about its own texts, which stay padded to the length of all. The parts are joined as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attention_contract.base import WireModel
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_service.core.tensors import empty_result, results_in
from attention_service.models.answers.model_recordings import Recorded
from attention_service.models.answers.model_weights import weights_pass
from attention_service.models.costs.answer_parts import OwnTime, Passes
from attention_service.models.inputs.input_stacks import Inputs
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.edit_parts import differ_by_text
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.prompts.named_pairs import lists_by_text

TextsRequest = ModelForwardRequest | ModelWeightsRequest
AnswerTexts = Callable[[LoadedModel, Any, CheckedRequest], Recorded[WireModel]]
"""Answers a request for the texts that were read."""


def may_divide(loaded: LoadedModel, request: TextsRequest, checked: CheckedRequest) -> bool:
    """True if the texts of a request may be answered some at a time, since none changes the numbers of another.

    One that is to be ``alone`` keeps its pass, whose bits are those of a batch of all.
    """
    inputs, edits = checked.inputs, [edit for layer_edits in checked.edits.values() for edit in layer_edits]
    alike = loaded.stacks_texts and loaded.head.unit != "choice" and checked.repeats and inputs.media is None
    return inputs.several and alike and not (request.alone or differ_by_text(edits))


def divided(
    loaded: LoadedModel, request: TextsRequest, checked: CheckedRequest, texts: int, answer: AnswerTexts
) -> Passes[WireModel]:
    """Answer a request, so many texts at a time. Raises InvalidRequest that names the field at fault."""
    _check(loaded, request, checked)
    count, time, parts = len(checked.inputs.text.ids), OwnTime(), list[Any]()
    for first in range(0, count, texts):
        rows = slice(first, min(first + texts, count))
        if parts:
            yield from time.between(rows.stop - rows.start)
        with results_in(lambda *_: None):  # the memory of the reply is for that of all texts
            part: Any = answer(loaded, _request_of(request, count, rows), _checked_of(checked, rows)).reply
        if isinstance(request, ModelForwardRequest):
            shown = [prediction.model_copy(update={"text": prediction.text + first}) for prediction in part.predictions]
            part = part.model_copy(update={"predictions": shown})
        parts.append(part)
    kernels = list(dict.fromkeys(kernel for part in parts for kernel in part.ran.kernels))
    ran = parts[0].ran.model_copy(update={"kernels": kernels, "compute_ms": time.took_ms})
    joined_reply: WireModel = _joined(parts).model_copy(update={"ran": ran})
    return joined_reply


def _check(loaded: LoadedModel, request: TextsRequest, checked: CheckedRequest) -> None:
    """Raise InvalidRequest for what is at fault in a text of a later part, by its place among all."""
    if isinstance(request, ModelWeightsRequest):
        weights_pass(loaded, request, checked)
    else:
        loaded.head.places(request.positions, checked.inputs)


def _request_of(request: TextsRequest, count: int, rows: slice) -> TextsRequest:
    """The request about some of its texts. Of what a text brings, a forward reads its positions."""
    if not isinstance(request, ModelWeightsRequest):
        if request.positions is None or not isinstance(request.positions[0], list):
            return request
        return request.model_copy(update={"positions": request.positions[rows]})
    options = request.statistic_options
    by_text = {
        name: lists_by_text(name, given, count)[rows]
        for name in ("pairs", "candidates") if (given := getattr(options, name)) is not None
    }  # fmt: skip
    if not (by_text or options.names_text):
        return request

    def own(value: Any) -> Any:
        return value[rows] if isinstance(value, list) and len(value) == count else value

    passages = {name: own(part) for name, part in options.passages.items()}
    named = options.model_copy(update={"passages": passages, "needle": own(options.needle)} | by_text)
    return request.model_copy(update={"text": own(request.text), "statistic_options": named})


def _checked_of(checked: CheckedRequest, rows: slice) -> CheckedRequest:
    """Some texts of a request that was checked."""
    inputs = checked.inputs
    target = None if inputs.target is None else inputs.target.part(rows)
    arguments = {name: x[rows] for name, x in inputs.arguments.items()}
    own = Inputs(several=True, text=inputs.text.part(rows), target=target, arguments=arguments)
    return replace(checked, inputs=own, _cut={})


def _joined(parts: Sequence[Any], name: str = "") -> Any:
    """One value for all texts, of those for some texts each; ``name``: its field."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return _joined_arrays(parts)
    if isinstance(first, WireModel):
        values = {field: value for field, value in vars(first).items() if value is not None and field != "ran"}
        return first.model_copy(
            update={field: _joined([getattr(part, field) for part in parts], field) for field in values}
        )
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list):
        if name in {"layers", "watched"}:
            return [_joined(layer) for layer in zip(*parts, strict=True)]
        return [member for part in parts for member in part]
    return first


def _joined_arrays(parts: Sequence[Any]) -> Any:
    """Arrays ``[texts, …]`` one behind the other, in the memory of the reply if that has room."""
    first = parts[0]
    if first.dtype.kind not in "biuf":  # bfloat16 is a type of its own, which PyTorch does not read
        return np.concatenate(parts)
    shape = (sum(map(len, parts)), *first.shape[1:])
    whole = empty_result(shape, torch.from_numpy(first[:0])).numpy()
    np.concatenate(parts, out=whole)
    return whole
