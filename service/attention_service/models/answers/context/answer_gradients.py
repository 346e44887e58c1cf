"""The gradients of each sentence of an answer: by source, and by head."""

from typing import NamedTuple

import torch
from torch import Tensor

from attention_contract.schemas.model_requests import ModelGradientsRequest
from attention_service.models.answers.context.context_plan import ContextPlan
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.costs.answer_parts import BACKWARD, Passes
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.points import EMBEDDINGS
from attention_transformers.model_layers import LayerKey


class HeadEffect(NamedTuple):
    """A head, and the first-order effect of it on the log-probability of an answer."""

    layer: LayerKey
    head: int
    effect: float


class AnswerGradients(NamedTuple):
    """Gradient · input of each sentence."""

    sources: Tensor
    """``[S, A]``: summed over the tokens of each source."""
    heads: list[HeadEffect]
    """Σ gradient · context of the whole answer, in descending order of its size."""
    kernels: dict[str, None]


def answer_gradients(loaded: LoadedModel, plan: ContextPlan, heads: int) -> Passes[AnswerGradients]:
    """Differentiate the log-probability of each sentence; ``heads``: the number of heads to name.

    Yields between the pass and the gradient of each sentence.
    """
    request = ModelGradientsRequest(tokens=[0], by_head=heads > 0)
    gradients = ModelGradients(loaded, request, plan.checked)
    columns: list[Tensor] = []
    effects: dict[LayerKey, Tensor] = {}
    for by_point in gradients.by_part([sentence.tokens for sentence in plan.sentences]):
        yield BACKWARD
        by_token = by_point.pop(EMBEDDINGS).sum(-1)[0]  # [L]
        columns.append(
            torch.stack([by_token[source.tokens.start : source.tokens.stop].sum() for source in plan.sources])
        )
        for (layer, _), effect in by_point.items():
            own = effect.sum(0)  # [H]
            effects[layer or 0] = effects[layer or 0] + own if (layer or 0) in effects else own
    ranked = [
        HeadEffect(layer, head, effect) for layer, row in effects.items() for head, effect in enumerate(row.tolist())
    ]
    ranked.sort(key=lambda head: -abs(head.effect))
    return AnswerGradients(torch.stack(columns, 1), ranked[:heads], gradients.kernels)
