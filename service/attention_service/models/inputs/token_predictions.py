"""The tokens or classes that a model predicts at some positions, and how edits change them."""

from typing import Any, NamedTuple

from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import LikelyToken, Prediction
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.inputs.prediction_head import PredictionHead, Rows


def pooled(output: Any) -> Tensor:
    """The one vector ``[B, width]`` of an input. Raises InvalidRequest for a model that makes none."""
    if hasattr(output, "image") and hasattr(output, "text"):
        raise InvalidRequest.at(
            "return", "a text and an image have a pooled vector each; send one of them, or ask their similarity"
        )
    names = ("image_embeds", "pooler_output")
    state: Tensor | None = next((x for name in names if (x := getattr(output, name, None)) is not None), None)
    if state is None:
        raise InvalidRequest.at(
            "return", "the model, or its checkpoint, has no pooler, so there is no pooled vector; leave pooled out"
        )
    return state


def predictions(
    head: PredictionHead, reader: InputReader, rows: Rows, stack: Stack, top_k: int, other: Rows | None,
    name: str = "unedited",
) -> list[Prediction]:  # fmt: skip
    """The likeliest tokens of rows; with those of another run, of either. None of padding. ``name``: of that run.

    ``stack``: the tokens whose predictions they are.
    """
    real = None if stack.mask is None or not head.by_token else stack.mask.tolist()
    tops = []
    for text, row in enumerate(rows.places):
        for index, position in enumerate(row):
            if real is not None and not real[text][position]:
                continue
            now = _row(head, rows, text, index)
            before = None if other is None else _row(head, other, text, index)
            values: dict[str, Any] = {"text": text, "position": position}
            ids = now.logs.topk(min(top_k, len(now.logs))).indices.tolist()
            if before is not None:
                ids = list(dict.fromkeys([*ids, *before.logs.topk(min(top_k, len(before.logs))).indices.tolist()]))
                if rows.partition is None and not head.scores:
                    values["divergence"] = float(head.divergence(before.logs, now.logs))
            top = []
            for token_id, token in zip(ids, head.named(reader, ids), strict=True):
                fields = {"token": token, "id": token_id, "logit": float(now.logits[token_id]),
                          "probability": float(now.probabilities[token_id])}  # fmt: skip
                if before is not None:
                    fields |= {
                        f"{name}_logit": float(before.logits[token_id]),
                        f"{name}_probability": float(before.probabilities[token_id]),
                    }
                top.append(valid(LikelyToken, fields))
            tops.append(valid(Prediction, values | {"top": top}))
    return tops


class _Row(NamedTuple):
    """One row in float64 ``[V]``."""

    logits: Tensor
    logs: Tensor
    probabilities: Tensor


def _row(head: PredictionHead, rows: Rows, text: int, index: int) -> _Row:
    logits = rows.logits[text, index].double()
    logs = head.logs(logits, None if rows.partition is None else rows.partition[text, 0])
    return _Row(logits, logs, head.probabilities(logs))
