"""The tokens that a model predicts at some positions, and how edits change them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import LikelyToken, Prediction
from attention_service.models.inputs.model_inputs import InputReader, Stack


def predicts(model: PreTrainedModel) -> str | None:
    """``next``, ``own``, ``class``, or None for a model without a head that predicts."""
    whole: Any = model
    if "ForImageClassification" in type(model).__name__:
        return "class"
    if model.main_input_name == "pixel_values":
        return None
    if whole.get_output_embeddings() is None:
        return None
    return "own" if type(model).__name__.endswith("ForMaskedLM") else "next"


def places_of(positions: Sequence[int] | None, stack: Stack) -> list[list[int]]:
    """The indices of these positions in each text; negative ones count from the end of the text. Default: the last.

    Raises InvalidRequest for one that is out of range.
    """
    wanted = [-1] if positions is None else list(positions)
    for index, position in enumerate(wanted):
        least = min(stack.ends)
        if not -least <= position < stack.length:
            raise InvalidRequest.at(
                f"positions.{index}",
                f"{position} is out of range; expected {-least} to {stack.length - 1}",
                limit=stack.length,
            )
    return [[end + each if each < 0 else each for each in wanted] for end in stack.ends]


def pooled(output: Any) -> Tensor:
    """The one vector ``[B, width]`` of an input. Raises InvalidRequest for a model that makes none."""
    names = ("image_embeds", "pooler_output")
    found: Tensor | None = next((x for name in names if (x := getattr(output, name, None)) is not None), None)
    if found is None:
        raise InvalidRequest.at("return", "the model has no pooled vector; leave pooled out")
    return found


def rows_at(logits: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """``[B, positions, V]``: the rows of logits ``[B, L, V]`` at these places of each text."""
    index = torch.tensor([list(row) for row in places], device=logits.device)
    return logits.gather(1, index[:, :, None].expand(-1, -1, logits.shape[-1]))


def predictions(
    reader: InputReader, logits: Tensor, places: Sequence[Sequence[int]], top_k: int, unedited: Tensor | None
) -> list[Prediction]:
    """The likeliest tokens of rows of logits ``[B, positions, V]``; with those of the unedited run, of either."""
    found = []
    for text, row in enumerate(places):
        for index, position in enumerate(row):
            before = None if unedited is None else unedited[text, index].double()
            found.append(_prediction(reader, text, position, logits[text, index].double(), before, top_k))
    return found


def _prediction(
    reader: InputReader, text: int, position: int, row: Tensor, before: Tensor | None, top_k: int
) -> Prediction:
    logs = row.log_softmax(-1)
    count = min(top_k, len(row))
    ids = logs.topk(count).indices.tolist()
    values: dict[str, Any] = {"text": text, "position": position}
    logs_before = None
    if before is not None:
        logs_before = before.log_softmax(-1)
        ids = list(dict.fromkeys([*ids, *logs_before.topk(count).indices.tolist()]))
        values["divergence"] = max(0.0, float((logs_before.exp() * (logs_before - logs)).nan_to_num(0.0).sum()))
    top = []
    for each, token in zip(ids, reader.readable(ids), strict=True):
        fields: dict[str, Any] = {
            "token": token,
            "id": each,
            "logit": float(row[each]),
            "probability": float(logs[each].exp()),
        }
        if before is not None and logs_before is not None:
            fields |= {
                "unedited_logit": float(before[each]), "unedited_probability": float(logs_before[each].exp()),
            }  # fmt: skip
        top.append(valid(LikelyToken, fields))
    return valid(Prediction, values | {"top": top})
