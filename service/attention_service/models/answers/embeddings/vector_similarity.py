"""The cosine of the vectors of two texts, and its gradient by token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.text_similarity import TextSimilarityReply, TextSimilarityRequest
from attention_service.core.cancellation import checkpoint
from attention_service.models.answers.embeddings.pair_similarity import images_of
from attention_service.models.answers.embeddings.text_embeddings import EmbeddingPlan, passes_of, plan_texts, vectors_of
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_ran
from attention_service.models.loaded.model_runner import RunSpec
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.points import EMBEDDINGS


def plan_similarity(loaded: LoadedModel, request: TextSimilarityRequest) -> EmbeddingPlan:
    """Check a request. Returns the plan of the first texts of all pairs, and then the second ones.

    Raises InvalidRequest that names the field at fault, and InvalidCheckpoint.
    """
    if images_of(request):
        raise InvalidRequest.at("pairs", "this model puts no image into one space with texts; send texts")
    if loaded.reader.tokenizer is None:
        raise InvalidRequest.at("pairs", f"{loaded.reader.no_tokenizer}; take a model that reads texts")
    if request.gradients:
        loaded.runner.check(EMBEDDINGS, "keep", "gradients", "send gradients: false for the similarities alone")
    names: Sequence[str | None] = request.prompt_names or (None, None)
    sides = [
        plan_texts(
            loaded, {f"pairs.{index}.{side}": str(pair[side]) for index, pair in enumerate(request.pairs)}, names[side],
            request.pooling, f"prompt_names.{side}",
        )
        for side in (0, 1)
    ]  # fmt: skip
    return EmbeddingPlan(sides[0].settings, [*sides[0].rows, *sides[1].rows], [*sides[0].left_out, *sides[1].left_out])


def similarity_reply(loaded: LoadedModel, request: TextSimilarityRequest, plan: EmbeddingPlan) -> TextSimilarityReply:
    """Return the cosine of each pair, and the share of each token in it."""
    stack, attention_pass, parts = plan.stack(loaded), AttentionPass({}), passes_of(loaded, plan)
    embedded, vectors = list[Tensor](), list[Tensor]()
    spec = RunSpec(attention_pass, keep=[EMBEDDINGS] if request.gradients else [], last_states=True)
    with torch.set_grad_enabled(request.gradients):
        for part in parts:
            checkpoint()
            vector, run = vectors_of(loaded, part, spec)
            vectors.append(vector)
            embedded += run.at.values()
        first, second = torch.cat(vectors).chunk(2)
        cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1)
    labels = loaded.reader.labels(stack)
    fields: dict[str, Any] = {"similarity": cosine.tolist(), "labels": _by_pair(labels)}
    if request.gradients:
        gradients = torch.autograd.grad(cosine.sum(), embedded)
        products = [(x * leaf).sum(-1).detach() for x, leaf in zip(gradients, embedded, strict=True)]
        shares = products[0] if len(parts) == 1 else _filled_up(products, stack)
        fields["tokens"] = _by_pair(shares.tolist())
    return valid(TextSimilarityReply, fields | {"ran": model_ran(loaded, attention_pass, loaded.adapters.active)})


def _filled_up(of_texts: Sequence[Tensor], stack: Stack) -> Tensor:
    """Numbers ``[1, L]`` of the tokens of each text, each run alone, as those of one batch; 0 for padding."""
    filled = of_texts[0].new_zeros(stack.ids.shape)
    real = torch.ones_like(stack.ids, dtype=torch.bool) if stack.mask is None else stack.mask
    for row, own, numbers in zip(filled, real, of_texts, strict=True):
        row[own] = numbers[0]
    return filled


def _by_pair(of_texts: Sequence[Any]) -> list[list[Any]]:
    """Facts of the first texts of all pairs and then of the second ones, pair by pair."""
    half = len(of_texts) // 2
    return [[*pair] for pair in zip(of_texts[:half], of_texts[half:], strict=True)]
