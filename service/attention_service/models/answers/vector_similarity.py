"""The cosine of the vectors of two texts, and its gradient by token."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.text_similarity import TextSimilarityReply, TextSimilarityRequest
from attention_service.core.cancellation import checkpoint
from attention_service.models.answers.pair_similarity import images_of
from attention_service.models.answers.text_embeddings import EmbeddingPlan, plan_texts
from attention_service.models.inputs.input_stacks import Stack, Tokens
from attention_service.models.loaded.entering_states import kept_as_leaf
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_ran
from attention_service.models.passes.attention_pass import AttentionPass


@dataclass(frozen=True)
class SimilarityPlan:
    """A request for similarities, checked."""

    plan: EmbeddingPlan
    """The first texts of all pairs, then the second ones."""
    stack: Stack


def plan_similarity(loaded: LoadedModel, request: TextSimilarityRequest) -> SimilarityPlan:
    """Check a request. Raises InvalidRequest that names the field at fault, and InvalidCheckpoint."""
    if images_of(request):
        raise InvalidRequest.at("pairs", "this model puts no image into one space with texts; send texts")
    if loaded.reader.tokenizer is None:
        raise InvalidRequest.at("pairs", f"{loaded.reader.no_tokenizer}; take a model that reads texts")
    if request.gradients:
        loaded.entering.check_differentiable("gradients", "send gradients: false for the similarities alone")
    names: Sequence[str | None] = request.prompt_names or (None, None)
    sides = [
        plan_texts(
            loaded, {f"pairs.{index}.{side}": str(pair[side]) for index, pair in enumerate(request.pairs)}, names[side],
            request.pooling, f"prompt_names.{side}",
        )
        for side in (0, 1)
    ]  # fmt: skip
    plan = EmbeddingPlan(sides[0].settings, [*sides[0].rows, *sides[1].rows], [*sides[0].left_out, *sides[1].left_out])
    return stacked(loaded, plan)


def stacked(loaded: LoadedModel, plan: EmbeddingPlan) -> SimilarityPlan:
    """The plan of pairs as one batch."""
    return SimilarityPlan(plan, loaded.reader.batch([Tokens(ids, [None] * len(ids)) for ids in plan.rows]))


def similarity_reply(
    loaded: LoadedModel, request: TextSimilarityRequest, planned: SimilarityPlan
) -> TextSimilarityReply:
    """Return the cosine of each pair, and the share of each token in it."""
    stack, asking, last_states = planned.stack, AttentionPass({}), loaded.last_states
    embedded: dict[str, Tensor] = {}
    checkpoint()
    mask = torch.ones_like(stack.ids, dtype=torch.bool) if stack.mask is None else stack.mask
    with torch.set_grad_enabled(request.gradients), ExitStack() as hooks:
        if request.gradients:
            hooks.callback(loaded.entering.changing(kept_as_leaf(embedded, "text")))
        states = last_states.of(loaded.reader.arguments(stack), asking)
        first, second = planned.plan.pooled(states, mask).chunk(2)
        cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    labels = loaded.reader.labels(stack)
    fields: dict[str, Any] = {"similarity": cosine.tolist(), "labels": _by_pair(labels)}
    if request.gradients:
        (gradient,) = torch.autograd.grad(cosine.sum(), [embedded["text"]])
        shares = (gradient * embedded["text"]).sum(-1).detach()
        fields["tokens"] = _by_pair(shares.tolist())
    return valid(TextSimilarityReply, fields | {"ran": model_ran(loaded, asking, loaded.adapters.active)})


def _by_pair(of_texts: Sequence[Any]) -> list[list[Any]]:
    """Facts of the first texts of all pairs and then of the second ones, pair by pair."""
    half = len(of_texts) // 2
    return [[*each] for each in zip(of_texts[:half], of_texts[half:], strict=True)]
