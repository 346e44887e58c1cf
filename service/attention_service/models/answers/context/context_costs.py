"""The cost of a request for the sources of an answer: the passes that it takes, before any of them runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from attention_contract.schemas.analyses.context import ContextRequest
from attention_contract.schemas.costs.model_complexity import ContextCost, ModelComplexityReply, ModelComplexityRequest
from attention_service.cost import NOTHING, Estimate
from attention_service.models.answers.context.context_ablation import joins
from attention_service.models.answers.context.context_plan import ContextPlan, plan_context
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.model_pace import times_of
from attention_service.models.loaded.loaded_model import LoadedModel

_TOKENS: Final = 128
"""Tokens of a generated answer, if the request names no number."""
_OF_SENTENCE: Final = 20
"""Tokens of a sentence of an answer that is to be generated."""
_SLOWER: Final = 8
"""The time of a pass on a busy machine, as a multiple of the prediction."""
_WEIGHTS: Final = 4
"""Copies of the weights of the queries that predict an answer that one layer holds at once."""


@dataclass(frozen=True)
class Stage:
    """One turn of a request for sources: a pass, and what is taken from it."""

    measure: Literal["gradient", "attention", "hidden", "removed"]
    flops: int
    bytes: int
    peak_bytes: int
    predicted_ms: float
    """Without the pace of the model."""
    passes: int = 1
    sources: Sequence[int] = ()
    """The sources that are hidden or left out, one in each row of the pass."""

    def seconds(self, pace: float) -> float:
        """A bound of the time for which the process is silent."""
        return _SLOWER * self.predicted_ms / 1e3 * max(1.0, pace)


@dataclass(frozen=True)
class ContextSizes:
    """The sizes of a request that its cost depends on."""

    length: int
    """Tokens of prompt and answer."""
    answer: int
    sentences: int
    sources: Sequence[int]
    """Tokens of each source."""
    joins: bool
    """True if prompts without a source are rows of one pass."""

    @classmethod
    def of(cls, loaded: LoadedModel, request: ContextRequest, plan: ContextPlan, new_tokens: int = 0) -> "ContextSizes":
        """The sizes of a request; ``new_tokens``: those of an answer that is to be generated."""
        answer = len(plan.answers) + new_tokens
        sentences = len(plan.sentences) or -(-new_tokens // _OF_SENTENCE)
        sources = [len(each.tokens) for each in plan.sources]
        together = not request.alone and joins(loaded, plan)
        return cls(plan.length + new_tokens, answer, sentences, sources, together)


def new_tokens(loaded: LoadedModel, request: ContextRequest, plan: ContextPlan) -> int:
    """The most tokens of an answer that is to be generated; 0 if it is given."""
    if plan.answers:
        return 0
    most = loaded.reader.max_length
    free = _TOKENS if most is None else max(1, min(_TOKENS, most - plan.length))
    return free if request.max_tokens is None else request.max_tokens


def stages(
    costs: ModelCosts, loaded: LoadedModel, request: ContextRequest, sizes: ContextSizes, free_bytes: int
) -> list[Stage]:
    """The turns of a request, in their order, with so many bytes of memory free."""
    return [*_stages(costs, loaded, request, sizes, free_bytes)]


def _stages(
    costs: ModelCosts, loaded: LoadedModel, request: ContextRequest, sizes: ContextSizes, free_bytes: int
) -> Iterator[Stage]:
    length, answer, many = sizes.length, sizes.answer, range(len(sizes.sources))
    one = costs.rows_cost(1, length, answer)
    if "gradient" in request.return_:
        # Backward, a product by a matrix costs as much as forward, and one of two states twice.
        backward = one.flops + costs.attention_flops(length)
        times = (one.flops + sizes.sentences * backward) / max(1, one.flops)
        yield Stage(
            "gradient", int(times * one.flops), one.bytes * (1 + sizes.sentences),
            one.peak_bytes + costs.memory.graph_bytes(1, length), times * one.predicted_ms, 1 + sizes.sentences,
        )  # fmt: skip
    heads = max((place.widths.heads for place in loaded.places.values()), default=0)
    yield Stage(
        "attention", one.flops, one.bytes, one.peak_bytes + _WEIGHTS * 4 * heads * answer * length, one.predicted_ms
    )
    for measure, lengths in (
        ("hidden", [length] * len(many)), ("removed", [length - each for each in sizes.sources]),
    ):  # fmt: skip
        if measure not in request.return_:
            continue
        at_once = costs.memory.texts_at_once(len(many), length, answer, free_bytes) if sizes.joins else 1
        # Those alike in length first, so that few tokens fill a pass up.
        order = sorted(many, key=lambda source: lengths[source])
        for start in range(0, len(order), at_once):
            some = order[start : start + at_once]
            cost = costs.rows_cost(len(some), max(lengths[each] for each in some), answer)
            name: Literal["hidden", "removed"] = "hidden" if measure == "hidden" else "removed"
            yield Stage(name, cost.flops, cost.bytes, cost.peak_bytes, cost.predicted_ms, len(some), some)


def context_report(
    loaded: LoadedModel, costs: ModelCosts, request: ModelComplexityRequest, free_bytes: int
) -> ModelComplexityReply:
    """Return the cost of a request for sources. Raises InvalidRequest as the request does."""
    question = request.context or ContextRequest()
    plan = plan_context(loaded, question)
    more = new_tokens(loaded, question, plan)
    sizes = ContextSizes.of(loaded, question, plan, more)
    found = stages(costs, loaded, question, sizes, free_bytes)
    whole = ModelComplexityRequest(length=max(1, sizes.length - more), new_tokens=more)
    reply = costs.report(whole, free_bytes)
    time = sum((costs.pace.estimate("context", each.predicted_ms) for each in found), NOTHING)
    cost = ContextCost(
        flops=sum(each.flops for each in found),
        bytes=sum(each.bytes for each in found),
        peak_bytes=max(each.peak_bytes for each in found),
        **times_of(time),
        passes=sum(each.passes for each in found),
        sources=len(plan.sources),
        tokens=sizes.length,
    )
    generation = Estimate(reply.total_ms, reply.total_low_ms, reply.total_high_ms) if more else NOTHING
    total = generation + time
    totals = {"total_ms": total.median, "total_low_ms": total.low, "total_high_ms": total.high}
    return reply.model_copy(update={"context": cost, **totals})
