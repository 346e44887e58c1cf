"""Runs over copies of a request's texts, each changed in its own way, and how the prediction of each differs.

Copies whose changes begin at the same layer share one pass, from that layer on.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest, NotFinite
from attention_contract.schemas.analyses.model_effects import ModelEffects, ModelEffectsReply, ModelEffectsRequest
from attention_service.core.tensors import is_finite
from attention_service.models.answers.objective import objective_of
from attention_service.models.costs.answer_parts import OwnTime
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.inputs.prediction_head import Places, Rows
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.loaded.model_runner import Predictions, Reading, RunResult, RunSpec
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.points import Point
from attention_service.models.passes.shared_layers import KeptStates, Resumed


def in_passes(changes: Sequence[int], kind: Callable[[int], Hashable], copies: int) -> Iterator[list[int]]:
    """The changes of each pass: at most so many of one kind that follow each other."""
    for _, alike in groupby(changes, kind):
        while some := [*islice(alike, copies)]:
            yield some


class MeasuredRuns:
    """The baseline of a request for effects, and the runs with a change beside it."""

    time: OwnTime
    """The time since the baseline began."""

    def __init__(
        self, loaded: LoadedModel, request: ModelEffectsRequest,
        answers: Callable[[AttentionPlace], bool] | None = None,
    ) -> None:  # fmt: skip
        """Check the input and the measured number. Raises InvalidRequest that names the field at fault.

        ``answers``: see ``check_request``.
        """
        self._loaded = loaded
        if loaded.reader.asks_two_vectors(request):
            raise InvalidRequest.at("images", "the effects on one vector are measured: send a text or an image")
        self.checked = check_request(loaded, request, answers)
        """The request's input and its layers."""
        self._objective = objective_of(loaded, self.checked.inputs, request.of)
        self._attention_pass = AttentionPass({})
        self._baseline: Rows | None = None
        self.kept = KeptStates()
        """The states of the baseline."""
        self._by_number: dict[str, dict[int, Tensor]] = {"value": {}, "divergence": {}}

    @property
    def sizes(self) -> SweepSizes:
        """The sizes of the texts."""
        inputs, places = self.checked.inputs, self._objective.places
        batch, length = inputs.predicted.ids.shape
        return SweepSizes(batch, length, inputs.text.length, length if places is None else max(map(len, places)))

    def measure_baseline(self, spec: RunSpec, read: Mapping[Point, Reading]) -> RunResult:
        """Run the texts without a change, read states, and find the token whose probability is measured."""
        self.time = OwnTime()
        objective, stack = self._objective, self.checked.inputs.predicted
        if objective.is_open and objective.places is None:
            every = self._loaded.head.every(stack)
            self._objective = objective.named(self._run(spec, places=every).logits, stack.mask)
        run = self._run(replace(spec, read=read, keeps_layers=True))
        self.kept = run.layers
        if self._objective.is_open:
            self._objective = self._objective.named(run.logits, stack.mask)
        self._baseline = run.logits
        return run

    def measure(self, numbers: Sequence[int], spec: RunSpec, first: int = 0, states: Tensor | None = None) -> None:
        """Run a copy of the texts for each of these numbers of changes, and keep how each differs from the baseline.

        first: the layer at which all changes begin, of as many as there are for those behind the last layer; states
        ``[copies · B, L, d_model]`` take the place of those that the baseline has before it.
        """
        loaded, times, resumed = self._loaded, len(numbers), None
        if (states is not None and first == loaded.shared_layers.count) or loaded.begins_at(first):
            resumed = Resumed(self.kept, first, times, states)
        rows, attention_pass = self._run(replace(spec, resumed=resumed), times).logits, spec.attention_pass
        for measured_pass in (attention_pass, *(own.attention_pass for own in attention_pass.own)):
            self._attention_pass.kernels |= measured_pass.kernels
        baseline = self._measured
        value, before = self._objective.repeated(times).value(rows), self._objective.value(baseline)
        if not is_finite(value):  # NaN in the reply says that there is no such edit or path
            raise NotFinite("effects.value of the reply is not finite", param="model", field="effects.value")
        for at, number in enumerate(numbers):
            part = slice(at * len(before), (at + 1) * len(before))
            self._by_number["value"][number] = (value[part] - before).cpu()
            after = Rows(rows.logits[part], rows.places[part], None if rows.partition is None else rows.partition[part])
            divergence = self._objective.divergence(baseline, after)
            if divergence is not None:
                self._by_number["divergence"][number] = divergence.cpu()

    def arguments(self, times: int) -> Mapping[str, Tensor]:
        """The arguments of the model for so many copies of the texts."""
        arguments: Mapping[str, Tensor] = self.checked.inputs.arguments
        return arguments if times == 1 else {name: torch.cat([x] * times) for name, x in arguments.items()}

    def reply(self, swept: Mapping[str, Sequence[Any]]) -> ModelEffectsReply:
        """Return all effects, numbered along the swept axes, the last one fastest."""
        loaded, baseline = self._loaded, self._objective.value(self._measured)
        fields: dict[str, Any] = {"swept": swept, "baseline": self._shaped(baseline)}
        if self._objective.ids is not None:
            fields["token"] = self._objective.ids
            fields["token_names"] = loaded.head.named(loaded.reader, self._objective.ids)
        shape = len(baseline), *map(len, swept.values())
        effects = {name: self._of_all(runs, shape) for name, runs in self._by_number.items() if runs or name == "value"}
        self._attention_pass.started = self.time.began
        about = run_fields(loaded, self.checked, self._attention_pass)
        return valid(ModelEffectsReply, fields | {"effects": valid(ModelEffects, effects)} | about)

    @property
    def _measured(self) -> Rows:
        """The logits of the baseline. Raises RuntimeError before it is measured."""
        if self._baseline is None:
            raise RuntimeError("the baseline is not measured")
        return self._baseline

    def _run(self, spec: RunSpec, times: int = 1, places: Places | None = None) -> RunResult:
        """Run the texts so many times, with the logits that the number depends on, or those at these places."""
        stack = self.checked.inputs.predicted
        places = self._objective.repeated(times).places if places is None else places
        stack = stack if times == 1 else stack.repeated(times)
        return self._loaded.runner.run(self.arguments(times), replace(spec, logits=Predictions(places, stack)))

    def _of_all(self, runs: Mapping[int, Tensor], shape: tuple[int, ...]) -> Any:
        """``[B, *swept]``; NaN where no layer has such an index."""
        every = torch.full((shape[0], math.prod(shape[1:])), torch.nan, dtype=torch.float64)
        for number, numbers in runs.items():
            every[:, number] = numbers.double()
        return self._shaped(every.view(shape))

    def _shaped(self, x: Tensor) -> Any:
        """``[B, …]`` as the reply has it, in float32 unless it was computed in float64."""
        dtype = np.float64 if self._loaded.model.dtype == torch.float64 else np.float32
        return (x if self.checked.inputs.several else x[0]).detach().cpu().numpy().astype(dtype)
