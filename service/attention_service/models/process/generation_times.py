"""The time of a generation beside its prediction: that of its prompts, and that of its further tokens."""

from attention_service.cost import NOTHING
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.question_stages import Stage
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.process.served import RunTime


def generation_time(costs: ModelCosts, generation: RunningGeneration) -> RunTime | None:
    """Learn from a generation that has ended, and return its time; None if others had its steps too."""
    texts, lengths, tokens = generation.sizes
    if generation.has_mates or not generation.times or not tokens:
        return None
    parts = {"reading": sum(costs.work(costs.reading(Stage(1, length))).ms for length in lengths)}
    if (steps := tokens / texts - 1) > 0:
        longest = max(lengths)
        parts["tokens"] = steps * costs.work(costs.step(Stage(texts, 1, after=longest + round(steps / 2)), longest)).ms
    time, kind = NOTHING, ", attention" if generation.is_seen else ""
    for part, predicted_ms in parts.items():
        time += costs.pace.estimate(part + kind, predicted_ms)
        costs.pace.note(part + kind, predicted_ms, generation.times.get(part, 0.0))
    return RunTime("generation", time, sum(generation.times.values()))
