"""Pseudo log-likelihoods of texts by a masked model: each token is masked in turn, and predicted from all others.

Source: Salazar et al. 2020, *Masked Language Model Scoring*, eq. 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import (
    AnswerToken,
    ModelForwardReply,
    ModelForwardRequest,
    TextLikelihood,
)
from attention_service.models.answers.given_answers import answer_logs
from attention_service.models.costs.answer_parts import OwnTime, Passes
from attention_service.models.costs.masked_passes import check_masked
from attention_service.models.loaded.checked_request import CheckedRequest, edit_tasks, read_request
from attention_service.models.loaded.edit_parts import differ_by_text
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.loaded.model_runner import Predictions, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass

MAX_MASKED: Final = 2**16
"""Tokens of all texts of a request that are masked."""


class MaskedCopy(NamedTuple):
    """A copy of a text with one masked token."""

    text: int
    position: int
    token: int
    """The token that is masked there."""


@dataclass(frozen=True)
class LikelihoodPlan:
    """A request for likelihoods, checked."""

    checked: CheckedRequest
    mask: int
    """The mask token."""
    copies: Sequence[MaskedCopy]
    """The copies of a text follow each other, in the order of their tokens."""


def plan_likelihoods(loaded: LoadedModel, request: ModelForwardRequest) -> LikelihoodPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    mask = check_masked(loaded, "likelihood")
    checked = read_request(loaded, request)
    inputs = checked.inputs
    if request.images or inputs.media is not None:
        raise InvalidRequest.at("images", "tokens of a text alone are masked; leave the images out")
    for key, edits in request.edits.items():
        if differ_by_text(edits):
            raise InvalidRequest.at(
                f"edits.{key}", "a tensor has an entry for each text, and each text has many copies; send one for all"
            )
    special, stack = loaded.reader.special_ids, inputs.text
    real = np.ones(stack.host_ids.shape, bool) if stack.mask is None else stack.mask.cpu().numpy()
    copies = []
    for text, (row, own) in enumerate(zip(stack.host_ids.tolist(), real.tolist(), strict=True)):
        places = [at for at, token in enumerate(row) if own[at] and token not in special]
        if not places:
            field = "text" if request.text is not None else "tokens" if request.tokens is not None else "messages"
            raise InvalidRequest.at(f"{field}.{text}" if inputs.several else field, "it has only special tokens")
        copies += [MaskedCopy(text, at, row[at]) for at in places]
    if len(copies) > MAX_MASKED:
        raise InvalidRequest.at(
            "likelihood", f"expected at most {MAX_MASKED} tokens to mask; got {len(copies)}. Send fewer texts",
            limit=MAX_MASKED, actual=len(copies),
        )  # fmt: skip
    return LikelihoodPlan(checked, mask, copies)


def masked_likelihoods(loaded: LoadedModel, plan: LikelihoodPlan, at_once: int) -> Passes[ModelForwardReply]:
    """Return the likelihoods of the texts. ``at_once``: copies of a pass."""
    time, attention_pass, checked = OwnTime(), AttentionPass({}), plan.checked
    logs, ranks = list[float](), list[int]()
    for first in range(0, len(plan.copies), at_once):
        copies = plan.copies[first : first + at_once]
        if first:
            yield from time.between(len(copies))
        logits, kernels = _logits(loaded, plan, copies)
        tokens = [[copy.token] for copy in copies]
        logs += torch.cat(answer_logs(logits, tokens)).tolist()
        chosen = logits.gather(2, torch.tensor(tokens, device=logits.device)[:, None])
        ranks += (logits > chosen).sum((1, 2)).tolist()
        attention_pass.kernels |= kernels
    attention_pass.started = time.began
    likelihoods = _by_text(loaded, plan, logs, ranks)
    likelihood = likelihoods if checked.inputs.several else likelihoods[0]
    fields: dict[str, Any] = {"predicts": loaded.head.predicts, "likelihood": likelihood}
    return valid(ModelForwardReply, fields | run_fields(loaded, checked, attention_pass))


@torch.inference_mode()
def _logits(
    loaded: LoadedModel, plan: LikelihoodPlan, copies: Sequence[MaskedCopy]
) -> tuple[Tensor, dict[str, None]]:  # fmt: skip
    """The logits ``[copies, 1, V]`` at the masked tokens, and the kernels of the pass."""
    inputs, texts = plan.checked.inputs, [copy.text for copy in copies]
    places = [[copy.position] for copy in copies]
    arguments = {name: x[texts] for name, x in inputs.arguments.items()}
    ids = arguments["input_ids"].scatter(1, torch.tensor(places, device=inputs.text.ids.device), plan.mask)
    mask = None if inputs.text.mask is None else inputs.text.mask[texts]
    stack = replace(inputs.text, ids=ids, mask=mask, spans=[inputs.text.spans[text] for text in texts])
    checked = replace(plan.checked, inputs=replace(inputs, several=True, text=stack), places=[], _cut={})
    attention_pass = AttentionPass(edit_tasks(loaded, checked))
    spec = RunSpec(attention_pass, logits=Predictions(places, stack))
    run = loaded.runner.run(arguments | {"input_ids": ids}, spec)
    return run.logits.logits, attention_pass.kernels


def _by_text(
    loaded: LoadedModel, plan: LikelihoodPlan, logs: Sequence[float], ranks: Sequence[int]
) -> list[TextLikelihood]:  # fmt: skip
    """The likelihood of each text, of what was found at each copy."""
    names = loaded.reader.readable([copy.token for copy in plan.copies])
    tokens: list[list[AnswerToken]] = [[] for _ in plan.checked.inputs.text.ids]
    for copy, name, log, rank in zip(plan.copies, names, logs, ranks, strict=True):
        fields = {"position": copy.position, "token": name, "id": copy.token, "logprob": log, "rank": rank}
        tokens[copy.text].append(valid(AnswerToken, fields))
    likelihoods = []
    for row in tokens:
        total = sum(float(token.logprob) for token in row)
        likelihoods.append(valid(TextLikelihood, {"tokens": row, "sum": total, "mean": total / len(row)}))
    return likelihoods
