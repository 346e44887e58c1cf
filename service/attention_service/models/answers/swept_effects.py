"""Effects of the edits of a sweep on a prediction: many edits a pass, each on a copy of the texts.

Copies whose edits begin at the same layer share one pass, from that layer on.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.model_effects import ModelEffects, ModelEffectsReply, ModelEffectsRequest
from attention_contract.schemas.attention import Edit
from attention_service.core.cancellation import checkpoint
from attention_service.models.answers.objective import Objective, objective_of
from attention_service.models.answers.swept_edits import layer_sweep
from attention_service.models.costs.pass_memory import SweepSizes
from attention_service.models.inputs.images.pair_inputs import PairInputs
from attention_service.models.inputs.prediction_head import Rows
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask, OwnTexts
from attention_service.models.passes.layer_states import LayerStates
from attention_service.models.passes.module_taps import MODULE_TAPS
from attention_service.models.passes.shared_layers import KeptStates
from attention_transformers.model_layers import LayerKey

_TOKENS: Final = {"cpu": 2048, "cuda": 32_768}
"""Tokens of one pass, by device; of more it would hardly be faster."""


def copies_of(loaded: LoadedModel, tokens: int) -> int:
    """The copies of texts of so many tokens in one pass that is fast."""
    return max(1, _TOKENS["cuda" if loaded.device.is_cuda else "cpu"] // tokens)


class EffectsOfSweep:
    """The effects that one request asks for, measured pass by pass, so that other requests have turns between."""

    def __init__(self, loaded: LoadedModel, request: ModelEffectsRequest) -> None:
        """Check the request. Raises InvalidRequest that names the field at fault."""
        self._loaded = loaded
        if isinstance(loaded.reader, PairInputs) and request.images and (request.text or request.tokens):
            raise InvalidRequest.at("images", "the effects on one vector are measured: send a text or an image")
        self.checked = check_request(loaded, request)
        """The request's input and the swept layers."""
        self._sweep = layer_sweep(request, self.checked)
        self._beside = request.sweep.tap in MODULE_TAPS or any(
            edit.tap in MODULE_TAPS for edits in self.checked.edits.values() for edit in edits
        )
        """True if edits change what hooks see beside the attentions, of all copies alike."""
        self._objective = objective_of(loaded, self.checked.inputs, request.of)
        starts = [loaded.shared_layers.first(edits) for edits in self._sweep.edits]
        self._starts = starts
        self._left = sorted((at for at, edits in enumerate(self._sweep.edits) if edits), key=starts.__getitem__)
        """The numbers of the edits that are still to be tried, by the layer at which each begins."""
        self._pass = AttentionPass({})
        self._baseline: Rows | None = None
        self._kept = KeptStates()
        self._found: dict[str, dict[int, Tensor]] = {"value": {}, "divergence": {}}
        self._seconds = 0.0

    @property
    def copies(self) -> int:
        """The number of copies of the texts in one pass that is fast."""
        loaded, inputs = self._loaded, self.checked.inputs
        if (
            not self.checked.repeats
            or self._beside
            or loaded.head.unit == "choice"
            or loaded.attention.way == "observed"
        ):
            return 1
        tokens = max(inputs.predicted.ids.numel(), inputs.text.ids.numel())
        return max(1, min(copies_of(loaded, tokens), len(self._left)))

    @property
    def sizes(self) -> SweepSizes:
        """The sizes of the texts."""
        inputs, places = self.checked.inputs, self._objective.places
        batch, length = inputs.predicted.ids.shape
        return SweepSizes(batch, length, inputs.text.length, length if places is None else max(map(len, places)))

    @property
    def has_ended(self) -> bool:
        """True once every edit is tried."""
        return self._baseline is not None and not self._left

    def next_copies(self, copies: int) -> int:
        """The number of copies of the texts that ``advance`` runs next."""
        return len(self._next(copies)) if self._baseline is not None else 2

    @torch.no_grad()
    def advance(self, copies: int) -> None:
        """Measure the baseline, or the edits of one further pass of at most so many copies."""
        started = time.perf_counter()
        checkpoint()
        if self._baseline is None:
            self._measure_baseline()
        else:
            self._measure(self._next(copies))
        self._seconds += time.perf_counter() - started

    def reply(self) -> ModelEffectsReply:
        """Return all effects."""
        loaded, baseline = self._loaded, self._objective.value(self._measured)
        fields: dict[str, Any] = {"swept": self._sweep.swept, "baseline": self._shaped(baseline)}
        if self._objective.ids is not None:
            fields["token"] = self._objective.ids
            fields["token_names"] = loaded.head.named(loaded.reader, self._objective.ids)
        texts = len(baseline)
        effects = {name: self._of_all(found, texts) for name, found in self._found.items() if found or name == "value"}
        self._pass.started = time.perf_counter() - self._seconds
        about = run_fields(loaded, self.checked, self._pass)
        return valid(ModelEffectsReply, fields | {"effects": valid(ModelEffects, effects)} | about)

    @property
    def _measured(self) -> Rows:
        """The logits of the baseline. Raises RuntimeError before it is measured."""
        if self._baseline is None:
            raise RuntimeError("the baseline is not measured")
        return self._baseline

    # ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _measure_baseline(self) -> None:
        """Run the texts without a swept edit, and find the token whose probability is measured."""
        objective, stack, shared = self._objective, self.checked.inputs.predicted, self._loaded.shared_layers
        if objective.is_open and objective.places is None:
            every = replace(objective, places=[[*range(stack.length)]] * len(stack.ids))
            self._objective = objective.named(self._rows(self._tasks({}), every), stack.mask)
        with shared.keeping() as self._kept:
            rows = self._rows(self._tasks({}), self._objective)
        if self._objective.is_open:
            self._objective = self._objective.named(rows, stack.mask)
        self._baseline = rows

    def _next(self, copies: int) -> list[int]:
        """The numbers of the next edits, which begin at one layer."""
        start = self._starts[self._left[0]] if self._left else 0
        return [number for number in self._left[:copies] if self._starts[number] == start]

    def _measure(self, numbers: Sequence[int]) -> None:
        """Try these edits, each on its own copy of the texts."""
        loaded, baseline, times = self._loaded, self._measured, len(numbers)
        passes = [self._tasks(self._sweep.edits[number]) for number in numbers]
        texts = len(self.checked.inputs.predicted.ids)
        own = [OwnTexts(slice(at * texts, (at + 1) * texts), slice(None), each) for at, each in enumerate(passes)]
        asking = passes[0] if times == 1 else AttentionPass({}, own)
        objective = self._objective if times == 1 else self._objective.repeated(times)
        start, positions = self._starts[numbers[0]], self._wanted()
        with ExitStack() as stack:
            if loaded.begins_at(start):
                wanted = positions if positions is not None and loaded.begins_at(start, narrow=True) else None
                stack.enter_context(loaded.shared_layers.beginning(self._kept, start, times, wanted))
            rows = self._rows(asking, objective, times)
        for each in (asking, *passes):
            self._pass.kernels |= each.kernels
        value, before = objective.value(rows), self._objective.value(baseline)
        for at, number in enumerate(numbers):
            part = slice(at * len(before), (at + 1) * len(before))
            self._found["value"][number] = (value[part] - before).cpu()
            after = Rows(rows.logits[part], rows.places[part], None if rows.partition is None else rows.partition[part])
            divergence = self._objective.divergence(baseline, after)
            if divergence is not None:
                self._found["divergence"][number] = divergence.cpu()
        self._left = self._left[times:]

    def _wanted(self) -> Tensor | None:
        """The positions ``[B, P]`` whose predictions are measured; None if those of others may count too."""
        head, places = self._loaded.head, self._objective.places
        if places is None or head.predicts not in {"next", "own"} or not self.checked.repeats:
            return None
        return torch.tensor(places)

    def _rows(self, asking: AttentionPass, objective: Objective, times: int = 1) -> Rows:
        """The logits that the measured number depends on, of the texts so many times."""
        loaded, inputs = self._loaded, self.checked.inputs
        arguments: Mapping[str, Tensor] = inputs.arguments
        stack = inputs.predicted
        if times > 1:
            arguments, stack = {name: torch.cat([x] * times) for name, x in arguments.items()}, stack.repeated(times)
        with LayerStates(loaded.places.values(), asking).reading((), output=False, hidden=False):
            return loaded.output_rows(arguments, asking, objective.places, stack)[0]

    def _tasks(self, swept: Mapping[LayerKey, Edit]) -> AttentionPass:
        """A pass with the edits of the request, and then these."""
        loaded, tasks = self._loaded, dict[LayerKey, LayerTask]()
        for key in dict.fromkeys([*self.checked.edits, *map(str, swept)]):
            place = loaded.places[key]
            edits = [*self.checked.edits.get(key, ()), *([swept[place.key]] if place.key in swept else ())]
            tasks[place.key] = LayerTask(edits=edits, key_mask=self.checked.keys(place).mask)
        return AttentionPass(tasks)

    # ── reply ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of_all(self, found: Mapping[int, Tensor], texts: int) -> Any:
        """``[B, *swept]``; NaN where no layer has such an index."""
        shape = self._sweep.shape
        every = torch.full((texts, math.prod(shape)), torch.nan, dtype=torch.float64)
        for number, each in found.items():
            every[:, number] = each.double()
        return self._shaped(every.view(texts, *shape))

    def _shaped(self, x: Tensor) -> Any:
        """``[B, …]`` as the reply has it, in float32 unless it was computed in float64."""
        dtype = np.float64 if self._loaded.model.dtype == torch.float64 else np.float32
        return (x if self.checked.inputs.several else x[0]).detach().cpu().numpy().astype(dtype)
