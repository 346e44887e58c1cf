"""Effects of the edits of a sweep on a prediction: many edits a pass, each on a copy of the texts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffectsReply, ModelEffectsRequest
from attention_contract.schemas.attention import Edit
from attention_service.models.answers.measured_runs import MeasuredRuns, in_passes
from attention_service.models.answers.sweeps.swept_edits import check_sweep_labels, is_swept, layer_sweep
from attention_service.models.costs.answer_parts import Passes
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.loaded.checked_request import edit_tasks
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_runner import RunSpec
from attention_service.models.passes.attention_pass import NOTHING, AttentionPass, OwnTexts
from attention_service.models.passes.module_taps import MODULE_TAPS
from attention_transformers.model_layers import LayerKey


class EffectsOfSweep:
    """The effects of the edits that one request asks for."""

    def __init__(self, loaded: LoadedModel, request: ModelEffectsRequest) -> None:
        """Check the request. Raises InvalidRequest that names the field at fault."""
        if request.sweep is None:
            raise InvalidRequest.at("sweep", "expected a sweep")
        self._loaded = loaded
        self.runs = MeasuredRuns(loaded, request, partial(is_swept, loaded, request.sweep))
        checked = self.runs.checked
        self._sweep = layer_sweep(loaded, request.sweep, checked, every=request.layers == "all")
        check_sweep_labels(request.sweep, request.labels, checked)
        edited = [*map(loaded.place_of, checked.edited_layers), *checked.places]
        taps = {request.sweep.tap, *(edit.tap for edits in checked.edits.values() for edit in edits)}
        self._beside = not taps.isdisjoint(MODULE_TAPS) or any(place.mixes != "attention" for place in edited)
        """True if edits change what is seen beside the attentions, of all copies alike."""
        starts = [loaded.shared_layers.first(edits) for edits in self._sweep.edits]
        self._starts = starts
        self._edits = sorted((at for at, edits in enumerate(self._sweep.edits) if edits), key=starts.__getitem__)
        """The numbers of the edits, by the layer at which each begins."""

    @property
    def copies(self) -> int:
        """The most copies of the texts in one pass."""
        loaded = self._loaded
        alone = self._beside or loaded.head.unit == "choice" or not loaded.stacks_texts
        if alone or not self.runs.checked.repeats:
            return 1
        return max(1, len(self._edits))

    @property
    def sizes(self) -> SweepSizes:
        """The sizes of the texts."""
        return self.runs.sizes

    @torch.no_grad()
    def parts(self, copies: int) -> Passes[ModelEffectsReply]:
        """Measure the baseline, and then the edits, on at most so many copies of the texts in a pass."""
        self.runs.measure_baseline(RunSpec(self._tasks({})), {})
        for numbers in in_passes(self._edits, self._starts.__getitem__, copies):
            yield from self.runs.time.between(len(numbers))
            self._measure(numbers)
        return self.runs.reply(self._sweep.swept)

    def _measure(self, numbers: Sequence[int]) -> None:
        """Try these edits, each on its own copy of the texts."""
        passes = [self._tasks(self._sweep.edits[number]) for number in numbers]
        texts = len(self.runs.checked.inputs.predicted.ids)
        own = [
            OwnTexts(slice(at * texts, (at + 1) * texts), slice(None), edits_of_pass)
            for at, edits_of_pass in enumerate(passes)
        ]
        attention_pass = passes[0] if len(passes) == 1 else AttentionPass({}, own)
        self.runs.measure(numbers, RunSpec(attention_pass), self._starts[numbers[0]])

    def _tasks(self, swept: Mapping[LayerKey, Edit]) -> AttentionPass:
        """A pass with the edits of the request, and then these."""
        loaded, checked = self._loaded, self.runs.checked
        tasks = edit_tasks(loaded, checked)
        for layer, edit in swept.items():
            task = tasks.get(layer, NOTHING)
            real = checked.keys(loaded.place_of(layer)).mask
            tasks[layer] = replace(task, edits=[*task.edits, edit], key_mask=real)
        return AttentionPass(tasks)
