"""A request for the sources of an answer as it runs, a pass at a time, so that other requests run between."""

from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.schemas.analyses.context import (
    Ablation,
    AnswerSentence,
    ContextReply,
    ContextRequest,
    HeadSources,
    LayerLookback,
    SourcePlace,
)
from attention_service.core.tensors import to_numpy
from attention_service.cost import NOTHING
from attention_service.models.answers.context.answer_gradients import AnswerGradients, answer_gradients
from attention_service.models.answers.context.context_ablation import (
    hidden_logs,
    logs_of,
    removed_logs,
    sentence_logs,
)
from attention_service.models.answers.context.context_attention import ContextAttention
from attention_service.models.answers.context.context_costs import stages_of
from attention_service.models.answers.context.context_plan import ContextPlan
from attention_service.models.costs.answer_parts import OwnTime, Passes
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.model_pace import times_of
from attention_service.models.costs.question_stages import Stage
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.passes.attention_pass import AttentionPass

T = TypeVar("T")


class ContextRun:
    """The passes of one request, and what they found."""

    def __init__(
        self, loaded: LoadedModel, costs: ModelCosts, request: ContextRequest, plan: ContextPlan, free_bytes: int
    ) -> None:
        self._loaded, self._costs, self._request, self._plan = loaded, costs, request, plan
        self.stages = stages_of(loaded, costs, request, plan, free_bytes)
        self._compute_ms, self._expected = 0.0, NOTHING
        self._kernels: dict[str, None] = {}
        self._gradients: AnswerGradients | None = None
        self._attention: ContextAttention | None = None
        self._logs: Tensor = torch.empty(0)
        """``[A]``: with all sources."""
        self._without: dict[str, dict[int, Tensor]] = {"hidden": {}, "removed": {}}
        """``[A]`` without a source, by its index."""

    def seconds(self, stage: Stage) -> float:
        """The time for which the process may be silent in the first part of a stage."""
        return self._costs.seconds(stage, kind="context")

    def parts(self) -> Generator[float, None, ContextReply]:
        """Run the stages one after the other, the gradients of sentence after sentence. Yields the time of the next."""
        for stage in self.stages:
            if stage is not self.stages[0]:
                yield self.seconds(stage)
            time = OwnTime()
            if stage.measure == "gradient":
                gradients = answer_gradients(self._loaded, self._plan, self._request.heads)
                self._gradients = yield from self._paused(gradients, time, self.seconds(stage))
                self._kernels |= self._gradients.kernels
            else:
                self._advance(stage)
            took_ms = time.took_ms
            self._compute_ms += took_ms
            predicted_ms = self._costs.work(stage).ms
            self._expected += self._costs.pace.estimate("context", predicted_ms)
            self._costs.pace.note("context", predicted_ms, took_ms)
        return self._reply()

    def _paused(self, parts: Passes[T], time: OwnTime, seconds: float) -> Generator[float, None, T]:
        """Run a stage in parts, each of which may take so long."""
        while True:
            try:
                passes = next(parts)
            except StopIteration as end:
                result: T = end.value
                return result
            for _ in time.between(passes):
                yield seconds

    def _advance(self, stage: Stage) -> None:
        """Run a stage that is one pass."""
        attention_pass = AttentionPass({})
        if stage.measure == "attention":
            attention_pass = self._attention = self._attend()
        else:
            logs = hidden_logs if stage.measure == "hidden" else removed_logs
            logs_left = logs(self._loaded, self._plan, stage.sources, attention_pass)
            self._without[str(stage.measure)] |= dict(zip(stage.sources, logs_left, strict=True))
        self._kernels |= attention_pass.kernels

    @torch.no_grad()
    def _attend(self) -> ContextAttention:
        """The pass that reads the whole prompt, and sums its attention."""
        wanted, plan = self._request.return_, self._plan
        chosen: dict[Any, list[int]] = {}
        for head in () if self._gradients is None else self._gradients.heads:
            chosen.setdefault(head.layer, []).append(head.head)
        looks = ContextAttention(plan, chosen, lookback="lookback" in wanted)
        if not {"attention", "lookback"} & set(wanted) and not chosen:
            looks.tasks = {}
        [logs] = logs_of(self._loaded, plan.inputs, looks)
        self._logs = sentence_logs(plan, logs)
        return looks

    def _reply(self) -> ContextReply:
        """Return what was found."""
        plan, wanted, looks = self._plan, self._request.return_, self._attention
        answers = plan.answers
        fields: dict[str, Any] = {
            "prompt": plan.prompt, "answer_text": plan.answer, "generated": plan.generated,
            "sources": [
                SourcePlace(
                    name=source.name, text=plan.prompt[slice(*source.span)], span=source.span,
                    tokens=(source.tokens.start, source.tokens.stop),
                )
                for source in plan.sources
            ],
            "answer": [
                AnswerSentence(
                    text=plan.answer[slice(*sentence.span)], span=sentence.span,
                    tokens=(answers[sentence.tokens.start], answers[sentence.tokens.stop - 1] + 1), logprob=logprob,
                )
                for sentence, logprob in zip(plan.sentences, self._logs.tolist(), strict=True)
            ],
        }  # fmt: skip
        if looks is not None and "attention" in wanted:
            fields["attention"] = to_numpy(looks.mean)
        if looks is not None and "lookback" in wanted:
            fields["lookback"] = [
                valid(LayerLookback, {"layer": layer, "heads": to_numpy(x)}) for layer, x in looks.lookback.items()
            ]
        if self._gradients is not None:
            fields["gradient"] = to_numpy(self._gradients.sources)
        if self._gradients is not None and looks is not None:
            fields["heads"] = [
                valid(HeadSources, {**head._asdict(), "attention": to_numpy(looks.of_heads[head.layer, head.head])})
                for head in self._gradients.heads if (head.layer, head.head) in looks.of_heads
            ]  # fmt: skip
        without = {name: self._changes(removed) for name, removed in self._without.items() if removed}
        if without:
            fields["ablation"] = valid(Ablation, without)
        whole = AttentionPass({})
        whole.kernels = self._kernels
        about = run_fields(self._loaded, plan.checked, whole)
        about["ran"] = about["ran"].model_copy(update={"compute_ms": self._compute_ms, **times_of(self._expected)})
        return valid(ContextReply, fields | about)

    def _changes(self, removed: dict[int, Tensor]) -> Any:
        """``[S, A]``: the log-probabilities without each source, minus those with all."""
        return to_numpy(torch.stack([removed[index] - self._logs for index in range(len(self._plan.sources))]))
