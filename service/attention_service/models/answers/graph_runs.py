"""Differentiable runs of a model: L, and the tensors that it is differentiated by, as nodes of one graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attention_service.core.pullback import pullback
from attention_service.models.answers.objective import Objective
from attention_service.models.loaded.checked_request import CheckedRequest, edit_tasks
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import Predictions, RunResult, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.points import EMBEDDINGS, Point


@dataclass
class GraphRun:
    """One differentiable run: L and the tensors that stand at each point."""

    value: Tensor
    answers: Tensor | None = None
    """The logits that predict the tokens of the given answers, if L is of them."""
    at: Mapping[Point, Tensor] = field(default_factory=dict)
    attention_pass: AttentionPass = field(default_factory=lambda: AttentionPass({}))


class GraphRuns:
    """The runs over one input in which the same tensors are held."""

    def __init__(
        self, loaded: LoadedModel, checked: CheckedRequest, objective: Objective, names: Sequence[str]
    ) -> None:
        """``names``: of the points of each layer to differentiate by, besides the embeddings.

        Raises InvalidRequest for a model that has no gradients.
        """
        loaded.runner.check(EMBEDDINGS, "keep", "model", "ask for effects of edits, which need no gradients")
        self._loaded, self._checked, self._names = loaded, checked, names
        self.objective = objective

    def name_tokens(self) -> None:
        """Find the likeliest token of each text, or place of a class, if the request names none."""
        objective, stack = self.objective, self._checked.inputs.predicted
        if objective.is_open:
            every = objective
            if objective.places is None:
                every = replace(objective, places=self._loaded.head.every(stack))
            with torch.no_grad():
                rows = self._run(RunSpec(self._edits()), every).logits
            self.objective = objective.named(rows, stack.mask)

    def run(self, put: "Mapping[Point, Tensor] | None" = None, *, graph: bool = True) -> GraphRun:
        """Run the model, on a graph or without one. ``put``: what to put at some points."""
        points = [(place.key, name) for place in self._checked.places for name in self._names]
        keep = [EMBEDDINGS, *points] if graph else []
        with torch.set_grad_enabled(graph):
            run = self._run(RunSpec(self._edits(), keep=keep, put=put or {}), self.objective)
            value = self.objective.value(run.logits)
        answers = run.logits.logits.detach() if graph and self.objective.answers is not None else None
        return GraphRun(value, answers, run.at, run.attention_pass)

    def run_scaled(
        self, embeddings: Tensor, scales: Sequence[float], origin: Tensor | None = None, *, graph: bool = True
    ) -> GraphRun:
        """Run the texts once for each scale of their embeddings ``[B, L, d_model]``, one batch behind the other.

        ``origin``: the embeddings at a scale of 0, of a shape that broadcasts to theirs; None for zeros.
        """
        objective = self.objective.repeated(len(scales))
        times = (len(scales), *(1 for _ in embeddings.shape[1:]))
        begin = None if origin is None else origin.expand_as(embeddings).repeat(times)
        states = _scaled(embeddings.repeat(times), scales, begin)
        keep = [EMBEDDINGS] if graph else []
        with torch.set_grad_enabled(graph):
            spec = RunSpec(self._edits(), keep=keep, put={EMBEDDINGS: states})
            run = self._run(spec, objective, len(scales))
            value = objective.value(run.logits)
        return GraphRun(value, at=run.at, attention_pass=run.attention_pass)

    def _edits(self) -> AttentionPass:
        return AttentionPass(edit_tasks(self._loaded, self._checked))

    def _run(self, spec: RunSpec, objective: Objective, times: int = 1) -> RunResult:
        """Run the texts so many times, with the logits that L depends on."""
        stack, arguments = self._checked.inputs.predicted, self._checked.inputs.arguments
        if times > 1:
            arguments = {name: torch.cat([x] * times) for name, x in arguments.items()}
            stack = stack.repeated(times)
        return self._loaded.runner.run(arguments, replace(spec, logits=Predictions(objective.places, stack)))


def differentiated(run: GraphRun) -> dict[Point, Tensor]:
    """The gradient of L at each point of a run."""
    points = [*run.at]
    gradients = pullback([run.value], [run.at[point] for point in points], [torch.ones_like(run.value)])
    return dict(zip(points, gradients, strict=True))


def _scaled(state: Tensor, scales: Sequence[float], begin: Tensor | None) -> Tensor:
    """Embeddings ``[points · B, L, d_model]`` times the scale of their point, from ``begin`` on, rounded once."""
    wide = torch.promote_types(state.dtype, torch.float32)
    by_text = torch.tensor(scales, dtype=wide, device=state.device).repeat_interleave(len(state) // len(scales))
    scale = by_text.view(-1, *(1 for _ in state.shape[1:]))
    scaled = state.to(wide) * scale
    return (scaled if begin is None else scaled + begin.to(wide) * (1 - scale)).to(state.dtype)
