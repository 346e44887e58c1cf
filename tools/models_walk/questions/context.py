"""Sources of an answer, beside separate passes without each, and beside the gradients of transformers."""

import math
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.validation import validate
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.answers.context.context_run import ContextRun
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.loaded_model import LoadedModel
from tools.models_walk.differences import error
from tools.models_walk.questions.plain_runs import (
    LEAST,
    by_token,
    eager_logits,
    fed_embeddings,
    log_ps,
    logits_with,
)

PROMPT, ANSWER = "the cat sat on\nthe dog on mat\nthe mat", "\nthe dog sat\non mat"
_FREE: Final = 2**30


def context(model: PreTrainedModel, loaded: LoadedModel) -> float:
    """The log-probability of each sentence of an answer without a source is that of a pass of its own.

    All sources are rows of one pass where the model joins them. ``gradient`` is gradient · embedding of transformers.
    """
    errors = list[float]()
    for name in ("removed", "hidden", "gradient"):
        request = validate(ContextRequest, {"text": PROMPT, "answer": ANSWER, "return": [name]})
        try:
            plan = plan_context(loaded, request)
        except InvalidRequest:
            if name == "removed":
                raise
            continue  # one whose keys cannot be hidden one by one
        reply = at_once(ContextRun(loaded, ModelCosts(loaded), request, plan, _FREE).parts())
        if name == "gradient":
            expected, least = _gradients(model, loaded, plan)
            errors.append(error(reply.gradient, expected, least))
        else:
            errors.append(error(getattr(reply.ablation, name), _ablated(model, loaded, plan, name), LEAST))
    return max(errors)


def _ablated(model: PreTrainedModel, loaded: LoadedModel, plan: ContextPlan, name: str) -> np.ndarray:
    """The change of each sentence's log-probability ``[S, A]`` without a source, by separate passes."""
    ids = plan.inputs.text.ids[0].tolist()
    clean = _sentences(eager_logits(model, loaded, ids), ids, plan)
    found = []
    for source in plan.sources:
        if name == "removed":
            kept = [token for at, token in enumerate(ids) if at not in source.tokens]
            found.append(_sentences(eager_logits(model, loaded, kept), kept, plan))
            continue
        keys = [*source.tokens]
        hidden = Edit(tap="masked_scores", keys=keys, set=-math.inf)  # beside a sink, whose share grows
        if loaded.attention.way == "observed":
            hidden = Edit(tap="weights", keys=keys, set=0.0, renormalize=True)
        found.append(
            _sentences(logits_with(loaded, ids, {str(place.key): [hidden] for place in plan.places}), ids, plan)
        )
    return np.stack(found) - clean


def _sentences(logits: np.ndarray, ids: list[int], plan: ContextPlan) -> np.ndarray:
    """The log-probability of each sentence of an answer at the end of a text."""
    logs, count = log_ps(logits), len(plan.answers)
    own = np.asarray([logs[at - 1, ids[at]] for at in range(len(ids) - count, len(ids))])
    return np.asarray([own[each.tokens.start : each.tokens.stop].sum() for each in plan.sentences])


def _gradients(model: PreTrainedModel, loaded: LoadedModel, plan: ContextPlan) -> tuple[np.ndarray, float]:
    """Gradient · embedding ``[S, A]`` of each sentence's log-probability, summed over the tokens of a source.

    Also the largest sum of the sizes of its summands: a norm right behind the table makes each sum 0 up to rounding.
    """
    ids = plan.inputs.text.ids[0].tolist()
    arguments: dict[str, Any] = dict(loaded.reader.read(ModelForwardRequest(tokens=ids)).arguments)
    if "use_cache" in loaded.reader.names:
        arguments["use_cache"] = False
    with fed_embeddings(model, model) as leaves:
        logs = model(**arguments, return_dict=True).logits[0].log_softmax(-1)
    first = len(ids) - len(plan.answers)
    columns, sizes = [], []
    for sentence in plan.sentences:
        places = [first + at for at in sentence.tokens]
        value = torch.stack([logs[at - 1, ids[at]] for at in places]).sum()
        (gradient,) = torch.autograd.grad(value, leaves, retain_graph=True)
        product = gradient * leaves[0]
        shares = by_token(product, len(ids))
        columns.append([float(shares[source.tokens.start : source.tokens.stop].sum()) for source in plan.sources])
        sizes.append(float(by_token(product.abs(), len(ids)).max()))
    return np.asarray(columns).T, max(sizes)
