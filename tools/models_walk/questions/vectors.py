"""Vectors of texts and their cosines, beside the pooled last states of transformers."""

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.schemas.openai import EmbeddingRequest
from attention_contract.schemas.text_similarity import TextSimilarityRequest
from attention_service.models.answers.embeddings.text_embeddings import EmbeddingPlan, embed, plan_embedding
from attention_service.models.answers.embeddings.vector_similarity import plan_similarity, similarity_reply
from attention_service.models.loaded.loaded_model import LoadedModel
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import TEXTS, by_token, eager_states

PAIRS: Final = [("the cat sat on the mat", "the dog sat on the"), ("the mat sat on the", "the cat sat on the dog mat")]


def embeddings(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """Vectors of a padded batch are those of each text alone, and the pooled states of transformers."""
    errors = list[float]()
    for pooling in (None, "mean"):
        found = _vectors(loaded, TEXTS, pooling)
        plan = plan_embedding(loaded, EmbeddingRequest(model="m", input=TEXTS, pooling=pooling))
        with torch.no_grad():
            expected = [_pooled(plan, eager_states(model, loaded, ids)[0]) for ids in TEXTS]
        own = [_vectors(loaded, [ids], pooling)[0] for ids in TEXTS]
        errors += [*map(error, own, expected), *map(error, found, own)]
    return max(errors)


def _vectors(loaded: LoadedModel, texts: list[list[int]], pooling: Any) -> list[Any]:
    request = EmbeddingRequest(model="m", input=texts, pooling=pooling)
    return [each.embedding for each in embed(loaded, request, plan_embedding(loaded, request)).data]


def _pooled(plan: EmbeddingPlan, states: Tensor) -> Tensor:
    """The mean of the states ``[L, d]`` of a text, or its last one, of length 1."""
    vector = states[-1] if plan.settings.modes == ("lasttoken",) else states.mean(0)
    return nn.functional.normalize(vector, dim=0)


def similarity(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The cosines of pairs of texts of unequal lengths, and gradient · embedding by token, are those of transformers.

    Those of transformers are of each text alone; here all texts of all pairs are one batch.
    """
    request = TextSimilarityRequest(pairs=[[*pair] for pair in PAIRS])
    plan = plan_similarity(loaded, request)
    reply = similarity_reply(loaded, request, plan)
    rows, real = plan.rows, _real(plan.stack(loaded))
    errors = list[float]()
    for number in range(len(PAIRS)):
        sides = number, number + len(PAIRS)  # the first texts of all pairs, then the second ones
        states, leaves = zip(*(eager_states(model, loaded, rows[side]) for side in sides), strict=True)
        cosine = torch.cosine_similarity(*(_pooled(plan, each) for each in states), dim=0)
        errors.append(abs(reply.similarity[number] - float(cosine.detach())))
        products = [x * leaf for x, leaf in zip(torch.autograd.grad(cosine, leaves), leaves, strict=True)]
        # A norm right behind the table makes each sum 0 up to rounding: a share of its summands.
        least = max(float(each.detach().abs().sum(-1).max()) for each in products)
        for side, product, shares, labels in zip(
            sides, products, reply.tokens[number], reply.labels[number], strict=True
        ):
            found = np.asarray([share for share, _ in zip(shares, labels.tokens, strict=True)], np.float64)
            errors.append(error(found[real[side]], by_token(product, len(rows[side])), least))
    return max(errors)


def _real(stack: Any) -> list[Any]:
    """The places of the tokens of each text that are no padding."""
    return [slice(None)] * len(stack.ids) if stack.mask is None else [row.cpu().numpy() for row in stack.mask]
