"""The number that gradients differentiate, as a function of a model's logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.model_requests import GivenAnswer, GivenUpstream, PredictedLogit
from attention_service.core.tensors import to_torch
from attention_service.models.answers.given_answers import (
    answer_ids,
    answer_logs,
    answer_places,
    check_answers,
    has_answers,
)
from attention_service.models.folders.head_kinds import NO_OBJECT
from attention_service.models.inputs.input_stacks import Inputs
from attention_service.models.inputs.prediction_head import Places, PredictionHead, Rows
from attention_service.models.loaded.loaded_model import LoadedModel


@dataclass(frozen=True)
class Objective:
    """The number L of each text, as a function of the logits."""

    head: PredictionHead
    places: Places | None
    """The position of each text whose logits count; None for that at which the logits tell ``ids`` to be likeliest."""
    ids: list[int] | None = None
    """The token of each text; None for a given upstream."""
    against: int | None = None
    of_logit: bool = False
    """True for the logit in place of the logarithm of the probability."""
    upstream: Tensor | None = None
    """``[B, positions, V]``"""
    answers: list[list[int]] | None = None
    """The tokens of each text's given answer, if L is the logarithm of its probability."""
    mean: bool = False
    """True for the mean over the tokens of an answer."""
    parts: Sequence[range] | None = None
    """Parts of the answer of the only text, each of which is differentiated by itself."""

    def value(self, rows: Rows) -> Tensor:
        """L ``[B]`` of logits ``[B, positions, V]``; with ``parts``, that of each."""
        logits = rows.logits.to(torch.promote_types(rows.logits.dtype, torch.float32))
        if self.answers is not None:
            logs = answer_logs(logits, self.answers)
            if self.parts is not None:
                return torch.stack([logs[0][part.start : part.stop].sum() for part in self.parts])
            return torch.stack([row.mean() if self.mean else row.sum() for row in logs])
        if self.upstream is not None:
            return (logits * self.upstream.to(logits)).sum((1, 2))
        outputs = logits if self.of_logit else self.head.logs(logits, rows.partition)
        chosen = outputs[:, 0].gather(1, torch.tensor(self.ids, device=logits.device)[:, None])[:, 0]
        return chosen if self.against is None else chosen - outputs[:, 0, self.against]

    def named(self, rows: Rows, real: Tensor | None) -> "Objective":
        """Return a copy with the missing token (argmax) or position filled in.

        ``rows``: those of every token, if the place is not given; ``real [B, L]``: the tokens that are no padding.
        """
        logs, batch = self.head.logs(rows.logits, rows.partition), range(len(rows.logits))
        ids = self.ids
        if self.places is None:
            logs = logs if real is None else logs.masked_fill(~real[..., None], -torch.inf)
            if ids is None and self.head.unit == "object":
                shown = logs[..., :-1] if self.head.classes[-1] == NO_OBJECT else logs
                ids = shown.amax(1).argmax(-1).tolist()
            ids = ids or [0] * len(logs)
            places = [[rows.places[text][int(logs[text, :, ids[text]].argmax())]] for text in batch]
            return replace(self, places=places, ids=ids)
        return replace(self, ids=logs[:, 0].argmax(-1).tolist() if ids is None else ids)

    def divergence(self, before: Rows, after: Rows) -> Tensor | None:
        """Σ p · ln(p / q) ``[B]`` of predictions p and q in float64, in nats; None for a head that has none.

        Summed (or averaged) over answer tokens; otherwise averaged over positions.
        """
        if before.partition is not None or self.head.scores or self.head.predicts is None:
            return None
        texts = [self.head.logs(rows.logits.double()) for rows in (before, after)]
        divergences = self.head.divergence(*texts)  # [B, positions]
        if self.answers is None:
            return divergences.mean(-1)
        own = [row[: len(ids)] for row, ids in zip(divergences, self.answers, strict=True)]
        return torch.stack([row.mean() if self.mean else row.sum() for row in own])

    def repeated(self, times: int) -> "Objective":
        """The same number of texts that come so many times, one batch behind the other."""
        ids = None if self.ids is None else self.ids * times
        upstream = None if self.upstream is None else self.upstream.repeat(times, 1, 1)
        places, answers = (None if row is None else row * times for row in (self.places, self.answers))
        return replace(self, places=places, ids=ids, upstream=upstream, answers=answers)

    @property
    def is_open(self) -> bool:
        """True if its token, or the place of it, is still to be found."""
        given = self.upstream is not None or self.answers is not None
        return not given and (self.ids is None or self.places is None)


def objective_of(
    loaded: LoadedModel, inputs: Inputs, of: PredictedLogit | GivenAnswer | GivenUpstream | None
) -> Objective:
    """Check the number that a request is about, its field ``of``. Raises InvalidRequest that names the field."""
    head = loaded.head
    if head.predicts is None and not isinstance(of, GivenUpstream):
        raise InvalidRequest.at("of", f"{loaded.without_head}; send upstream, ∂L/∂last hidden states")
    if isinstance(of, GivenAnswer) or (of is None and has_answers(loaded, inputs)):
        check_answers(loaded, inputs, "of")
        mean = isinstance(of, GivenAnswer) and of.answer == "mean"
        return Objective(head, answer_places(inputs), answers=answer_ids(inputs), mean=mean)
    of = PredictedLogit() if of is None else of
    stack, batch = inputs.predicted, 1 if head.unit == "choice" else len(inputs.predicted.ids)
    if isinstance(of, PredictedLogit):
        choices = len(inputs.text.ids)
        ids = None if of.token is None else [head.find(loaded.reader, of.token, "of.token", choices)] * batch
        against = None if of.against is None else head.find(loaded.reader, of.against, "of.against", choices)
        return Objective(head, _place(head, inputs, of), ids, against, of.logit)
    every = head.every(stack)[0]
    length = (loaded.reader.last_states or len(every)) if head.by_token else 1
    given = to_torch(np.asarray(of.upstream))
    given = given if inputs.several else given[None]
    lengths = 1, length
    if head.predicts == "class":
        width = len(head.classes) or len(inputs.text.ids)
    else:
        config = loaded.model.config
        seen = config.vision_config if loaded.reader.absent(inputs) == "text" else config.get_text_config()
        hidden = int(seen.hidden_size)
        width = loaded.reader.predictable if head.predicts else hidden
    if given.ndim != 3 or given.shape[0] != batch or given.shape[1] not in lengths or given.shape[2] != width:
        expected = [batch, length, width] if inputs.several else [length, width]
        raise ShapeMismatch.at(
            "of.upstream",
            f"expected the shape of the logits, {expected}, or 1 in place of {length}; got {list(of.upstream.shape)}",
            expected=expected,
            actual=list(of.upstream.shape),
        )
    first = every[0] if head.by_token else 0
    chosen = [first + length - 1] if given.shape[1] == 1 else [*range(first, first + length)]
    return Objective(head, [chosen] * batch, upstream=given.to(loaded.model.device))


def _place(head: PredictionHead, inputs: Inputs, of: PredictedLogit) -> Places | None:
    """The place of the prediction in each text; None for the likeliest one of a class. Raises InvalidRequest."""
    if not head.by_token and of.position is None:
        return head.places(None, inputs)
    if of.position is None and head.predicts == "class" and (head.unit in {"span", "object"} or of.token is not None):
        return None
    try:
        return head.places([-1 if of.position is None else of.position], inputs)
    except InvalidRequest as fault:
        detail = fault.detail.replace("positions.0", "of.position").replace("positions", "position")
        raise InvalidRequest(detail, param="of.position", **fault.facts) from None
