"""The cost of a request for the sources of an answer: the passes that it takes, before any of them runs."""

from dataclasses import replace
from typing import Final

from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.costs.model_complexity import ContextCost, ModelComplexityReply, ModelComplexityRequest
from attention_service.models.answers.context.context_ablation import joins
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.question_stages import Measure, Stage
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
    """The stages of a request, in the order in which they run, without those that generate the answer."""
    memory, wanted, more, many = costs.memory, request.return_, new_tokens(loaded, request, plan), len(plan.sources)
    length, answer = plan.length + more, len(plan.answers) + more
    peak_bytes = memory.rows_bytes(1, length, answer)
    one = Stage(
        1, length, peak_bytes=peak_bytes + memory.answer_weights_bytes(answer, length), rows=answer, measure="attention"
    )
    stages = [one]
    if "gradient" in wanted:
        sentences = len(plan.sentences) or -(-more // _OF_SENTENCE)
        graph = peak_bytes + memory.graph_bytes(1, length)
        stages.insert(0, replace(
            one, peak_bytes=graph, reads=1 + sentences, gradients=sentences, counted=1 + sentences, measure="gradient"
        ))  # fmt: skip
    joined = not request.alone and joins(loaded, plan)
    removed = [length - len(source.tokens) for source in plan.sources]
    lengths: dict[Measure, list[int]] = {"hidden": [length] * many, "removed": removed}
    for measure, of_source in lengths.items():
        if measure not in wanted:
            continue
        at_once = memory.texts_at_once(many, length, answer, free_bytes) if joined else 1
        # Those alike in length first, so that few tokens fill a pass up.
        order = sorted(range(many), key=of_source.__getitem__)
        for start in range(0, many, at_once):
            some = order[start : start + at_once]
            longest = max(of_source[chosen] for chosen in some)
            stages.append(Stage(
                len(some), longest, peak_bytes=memory.rows_bytes(len(some), longest, answer), rows=answer,
                counted=len(some), measure=measure, sources=some,
            ))  # fmt: skip
    return stages


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
