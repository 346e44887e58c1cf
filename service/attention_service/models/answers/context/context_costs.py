"""The cost of a request for the sources of an answer: the passes that it takes, before any of them runs."""

from typing import Final

from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.costs.model_complexity import ContextCost, ModelComplexityReply, ModelComplexityRequest
from attention_service.models.answers.context.context_ablation import joins
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.question_stages import ContextSizes, Stage, context_stages
from attention_service.models.loaded.loaded_model import LoadedModel

_DEFAULT_ANSWER_TOKENS: Final = 128
"""Tokens of a generated answer, if the request names no number."""
_OF_SENTENCE: Final = 20
"""Tokens of a sentence of an answer that is to be generated."""


def new_tokens(loaded: LoadedModel, request: ContextRequest, plan: ContextPlan) -> int:
    """The most tokens of an answer that is to be generated; 0 if it is given."""
    if plan.answers:
        return 0
    most = loaded.reader.max_length
    free = _DEFAULT_ANSWER_TOKENS if most is None else max(1, min(_DEFAULT_ANSWER_TOKENS, most - plan.length))
    return free if request.max_tokens is None else request.max_tokens


def stages_of(
    loaded: LoadedModel, costs: ModelCosts, request: ContextRequest, plan: ContextPlan, free_bytes: int
) -> list[Stage]:
    """The turns of a request, in their order, without those that generate the answer."""
    more = new_tokens(loaded, request, plan)
    sizes = ContextSizes(
        plan.length + more, len(plan.answers) + more, len(plan.sentences) or -(-more // _OF_SENTENCE),
        [len(source.tokens) for source in plan.sources], joins=not request.alone and joins(loaded, plan),
    )  # fmt: skip
    return context_stages(costs.memory, request.return_, sizes, free_bytes)


def context_report(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, free_bytes: int
) -> ModelComplexityReply:
    """Return the cost of a request for sources. Raises InvalidRequest as the request does."""
    question = request.context or ContextRequest()
    plan = plan_context(loaded, question)
    more = new_tokens(loaded, question, plan)
    stages = stages_of(loaded, costs, question, plan, free_bytes)
    reply = costs.report(ModelComplexityRequest(length=max(1, plan.length), new_tokens=more), free_bytes)
    cost = ContextCost(
        passes=sum(stage.counted for stage in stages), sources=len(plan.sources), tokens=plan.length + more,
        **vars(costs.priced("context", stages)),
    )  # fmt: skip
    generated = reply if more else None
    totals = {
        f"total_{name}ms": getattr(cost, f"predicted_{name}ms") + getattr(generated, f"total_{name}ms", 0.0)
        for name in ("", "low_", "high_")
    }
    return reply.model_copy(update={"context": cost, **totals})
