"""The log-probabilities of the tokens of given answers.

Each is by the prediction at the token before it, or, of a masked model, at the mask token that it is in place of.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import AnswerToken
from attention_service.models.inputs.input_stacks import Inputs
from attention_service.models.inputs.prediction_head import Places
from attention_service.models.loaded.loaded_model import LoadedModel


def has_answers(loaded: LoadedModel, inputs: Inputs) -> bool:
    """True if each text has an answer whose tokens the model predicts. A target is none unless it is asked for."""
    if inputs.target is not None:
        return False
    return inputs.predicted.answers is not None or (loaded.head.predicts == "next" and all(inputs.answers))


def check_answers(loaded: LoadedModel, inputs: Inputs, param: str) -> None:
    """Raise InvalidRequest unless each text has an answer that the model predicts."""
    if inputs.predicted.answers is not None:
        return
    if loaded.head.predicts == "own" and loaded.reader.fills_masks:
        raise InvalidRequest.at(
            param, "expected answer beside text, with a mask token in the text for each of its tokens"
        )
    if loaded.head.predicts != "next":
        raise InvalidRequest.at(param, f"{type(loaded.model).__name__} does not predict the tokens of an answer")
    if not all(inputs.answers):
        raise InvalidRequest.at(
            param,
            "expected an answer behind each text: send answer, messages whose last is the assistant's, or a target",
        )


def answer_places(inputs: Inputs) -> Places:
    """The positions that predict the tokens of each answer; those of a shorter one are filled up with its last."""
    most, before = max(map(len, inputs.answers)), int(inputs.predicted.answers is None)
    return [[at - before for at in (*row, *[row[-1]] * (most - len(row)))] for row in inputs.answers]


def answer_ids(inputs: Inputs) -> list[list[int]]:
    """The tokens of each answer."""
    if inputs.predicted.answers is not None:
        return inputs.predicted.answers
    ids = inputs.predicted.host_ids.tolist()
    return [[ids[text][at] for at in row] for text, row in enumerate(inputs.answers)]


def answer_logs(logits: Tensor, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """Ln p ``[A]`` of the tokens of each answer, by the logits ``[B, A, V]`` that predict them."""
    logs = []
    for row, own in zip(logits, ids, strict=True):
        wide = row[: len(own)].to(torch.promote_types(row.dtype, torch.float32))
        chosen = torch.tensor(own, device=row.device)[:, None]
        logs.append((wide.gather(-1, chosen) - wide.logsumexp(-1, keepdim=True))[:, 0])
    return logs


@torch.no_grad()
def answer_replies(
    loaded: LoadedModel, inputs: Inputs, logits: Tensor, other: Tensor | None = None, run: str = "unedited"
) -> Any:
    """The tokens of the answers as a reply has them; ``logits [B, A, V]``: those that predict them.

    ``other``: those of another run, by the name ``run``.
    """
    ids = answer_ids(inputs)
    logs, before = answer_logs(logits, ids), None if other is None else answer_logs(other, ids)
    replies = []
    for text, own in enumerate(ids):
        chosen = logits[text, range(len(own)), own]
        ranks = (logits[text, : len(own)] > chosen[:, None]).sum(-1).tolist()
        rows = []
        for at, (token, name) in enumerate(zip(own, loaded.reader.readable(own), strict=True)):
            fields: dict[str, Any] = {
                "position": inputs.answers[text][at], "token": name, "id": token, "rank": ranks[at],
                "logprob": float(logs[text][at]),
            }  # fmt: skip
            if before is not None:
                fields[f"{run}_logprob"] = float(before[text][at])
            rows.append(valid(AnswerToken, fields))
        replies.append(rows)
    return replies if inputs.several else replies[0]
