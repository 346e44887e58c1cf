"""Exact gradients of one number that a model predicts: by token, hidden state, head and tap.

One pass goes through transformers and this package's attention without leaving autograd's graph.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.gradients import GradientCheck
from attention_contract.schemas.model_requests import (
    LayerGradients,
    ModelGradientsReply,
    ModelGradientsRequest,
)
from attention_service.core.cancellation import checkpoint
from attention_service.core.problem import Selection
from attention_service.core.pullback import pullback
from attention_service.core.stages import narrow
from attention_service.core.tensors import to_numpy
from attention_service.models.answers.given_answers import answer_replies
from attention_service.models.answers.graph_runs import GraphRun, GraphRuns, differentiated
from attention_service.models.answers.integrated_path import EmbeddingPath, bound_path
from attention_service.models.answers.objective import objective_of
from attention_service.models.costs.answer_parts import BACKWARD, OwnTime, Passes, at_once
from attention_service.models.loaded.checked_request import CheckedRequest, read_request
from attention_service.models.loaded.head_norms import is_normed_by_head, may_be_normed
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.loaded.model_loading import places_of_parts
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.float64_runs import in_float64
from attention_service.models.passes.module_taps import MODULE_TAPS
from attention_service.models.passes.points import EMBEDDINGS, STATES, Point
from attention_service.runtime.binding.selection import bind_selection
from attention_service.runtime.operations.central_differences import (
    CHECK_FLOOR,
    TOLERANCE,
    Derivative,
    converging,
    verdict,
)
from attention_transformers.model_layers import LayerKey

_BY_TOKEN: Final = frozenset({"tokens", "embeddings"})
_FIRST_STEP: Final = 1e-3
"""First step of central differences along a direction of length 1, relative to the length of the point."""
_LEAST_STEP: Final = 1e-12
"""Smallest step, relative to the same."""
_ROUNDING: Final = 1e-14
"""Rounding error of L in float64, relative to its size."""


class ModelGradients:
    """The gradients that one request asks for."""

    def __init__(
        self, loaded: LoadedModel, request: ModelGradientsRequest, checked: CheckedRequest | None = None
    ) -> None:
        """Check the request; ``checked``: its input and layers, if they were read before.

        Raises InvalidRequest that names the field at fault.
        """
        if loaded.reader.asks_two_vectors(request):
            raise InvalidRequest.at(
                "images", "of a text and an image, their similarity is differentiated: ask …/similarity, or send one"
            )
        self._loaded = loaded
        self._request = request
        self.checked = checked or read_request(loaded, request)
        """The request's input and layers."""
        self._selections: dict[LayerKey, Selection] = {
            place.key: bind_selection(request.select, self.checked.bound(place)) for place in self.checked.places
        }
        self._time = OwnTime()
        self.kernels: dict[str, None] = {}
        """The kernels of the run of ``by_part``."""
        taps = tuple(name for name in dict.fromkeys(request.wrt) if name not in _BY_TOKEN | STATES)
        self._taps = taps
        self._traced = tuple(dict.fromkeys((*taps, *(("context",) if request.by_head else ()))))
        self._states = tuple(name for name in ("hidden", "mlp", "router", "output") if name in request.wrt)
        for place in self.checked.places:
            for index, name in enumerate(request.wrt):
                if name not in _BY_TOKEN:
                    loaded.runner.check_tap(place, name, "read", f"wrt.{index}")
            if request.by_head and "by_head" in request.model_fields_set:
                loaded.runner.check_tap(place, "context", "read", "by_head")
        objective = objective_of(loaded, self.checked.inputs, request.of)
        self._runs = GraphRuns(loaded, self.checked, objective, (*self._traced, *self._states))
        self._path = None if request.path is None else bound_path(loaded, self.checked, request.path)
        if request.check and places_of_parts(loaded.model):
            raise InvalidRequest.at(
                "check", "it computes in float64, which a model that is partly on disk cannot; leave it out"
            )

    @property
    def joins(self) -> bool:
        """True if several points of an integrated gradient can be one batch."""
        texts = len(self.checked.inputs.predicted.ids)
        return self.checked.repeats and not (texts > 1 and any(self.checked.edits.values()))

    def reply(self, points: int = 1) -> ModelGradientsReply:
        """Run the model and differentiate. ``points``: those of an integrated gradient that are one batch."""
        return at_once(self.parts(points))

    def parts(self, points: int = 1) -> Passes[ModelGradientsReply]:
        """Yield between the parts of the reply; see ``reply``."""
        loaded, request, checked = self._loaded, self._request, self.checked
        self._time = OwnTime()
        if self._runs.objective.is_open:
            self._runs.name_tokens()
            yield from self._time.between(BACKWARD)
        run = self._runs.run()
        gradients = differentiated(run)
        fields: dict[str, Any] = {"value": self._array(run.value)}
        if self._runs.objective.ids is not None:
            fields["token"] = self._runs.objective.ids
            fields["token_names"] = loaded.head.named(loaded.reader, self._runs.objective.ids)
        if run.answers is not None:
            fields["answer"] = answer_replies(loaded, checked.inputs, run.answers)
        embedded, gradient = run.at[EMBEDDINGS].detach(), gradients[EMBEDDINGS]
        change = embedded
        if self._path is not None:
            path = EmbeddingPath(self._runs, self._time, self._path, points)
            gradient, baseline = yield from path.mean_gradient(embedded)
            change = path.change(embedded)
            fields["baseline"] = self._array(baseline)
            fields["completeness"] = self._completeness((gradient * change).flatten(1), run.value, baseline)
        if embedded.ndim == 4 and loaded.reader.enters == "pixels":  # a grid of patches
            change, gradient = change.flatten(1, 2), gradient.flatten(1, 2)
        if "tokens" in request.wrt:
            fields["tokens"] = self._array((gradient * change).sum(-1))
        if "embeddings" in request.wrt:
            fields["embeddings"] = self._array(gradient)
        fields["layers"] = []
        for place in checked.places if self._traced or self._states else ():
            fields["layers"].append((yield from self._of_layer(place, run, gradients)))
        run.attention_pass.started = self._time.began
        about = run_fields(loaded, checked, run.attention_pass)
        if request.check:
            del run, gradients
            fields["check"] = yield from self._checks()
        return valid(ModelGradientsReply, fields | about)

    def by_part(self, parts: Sequence[range]) -> Iterator[dict[Point, Tensor]]:
        """Yield gradient · embeddings and, by head, Σ gradient · context of each part of the answer, from one graph."""
        self._runs.objective = replace(self._runs.objective, parts=parts)
        run = self._runs.run()
        self.kernels = run.attention_pass.kernels
        points = [*run.at]
        for index in range(len(parts)):
            checkpoint()
            upstream = torch.zeros_like(run.value)
            upstream[index] = 1
            gradients = pullback(
                [run.value], [run.at[point] for point in points], [upstream], keep=index < len(parts) - 1
            )
            products = {point: x * run.at[point].detach() for point, x in zip(points, gradients, strict=True)}
            yield {
                point: x if point == EMBEDDINGS else run.attention_pass.of_all_heads(point[0], _by_head(x))
                for point, x in products.items()
            }

    def _of_layer(
        self, place: AttentionPlace, run: GraphRun, gradients: Mapping[Point, Tensor]
    ) -> Passes[LayerGradients]:
        fields: dict[str, Any] = {"layer": place.key}
        array = partial(self._array, several=self.checked.several(place))
        states = partial(self._array, several=self.checked.several_states(place))
        point = (place.key, "context")
        if self._request.by_head and point in gradients:  # by default, where it is seen
            effect = gradients[point] * run.at[point].detach()
            fields["heads"] = array(run.attention_pass.of_all_heads(place.key, _by_head(effect)))
            if place.mixes != "attention" and may_be_normed(effect) and (yield from self._is_normed(place)):
                fields["heads_normed"] = True
        of_layer: dict[str, Tensor] = {name: gradients[place.key, name] for name in self._states}
        selection, batched = self._selections[place.key], self.checked.several(place)
        divided = run.attention_pass.divided(place.key, selection.heads, batched=batched)
        own = selection if divided is None else replace(selection, heads=divided.own)
        for tap in self._taps:
            problem = run.attention_pass.problems[place.key]
            of_layer[tap] = narrow(gradients[place.key, tap], tap, problem, selection if tap in MODULE_TAPS else own)
        arrays = {name: (states if name in {"hidden", "mlp", "router"} else array)(x) for name, x in of_layer.items()}
        if divided is not None and (by_head := [tap for tap in self._taps if tap not in MODULE_TAPS]):
            arrays |= divided.of_all_chosen({tap: arrays[tap] for tap in by_head})
        return valid(LayerGradients, fields | {"gradients": arrays})

    def _is_normed(self, place: AttentionPlace) -> Passes[bool]:
        """True if each head has a norm of its own, by one trial of the first layer of this class that may have one."""
        kind, tried = type(place.module), self._loaded.normed_kinds
        if kind not in tried:
            yield from self._time.between(2)
            tried[kind] = is_normed_by_head(self._loaded, place)
        return tried[kind]

    def _completeness(self, attributions: Tensor, value: Tensor, baseline: Tensor) -> dict[str, Any]:
        """The sums of attributions ``[B, …]``, the change of L that they explain, and the gap between both."""
        attributed, expected = attributions.double().sum(1), value.detach().double() - baseline.double()
        gap = attributed - expected
        integral = {"attributed": attributed, "expected": expected, "gap": gap, "relative_gap": gap / expected.abs()}
        integral["relative_gap"][expected == 0] = torch.nan
        return {name: self._array(x) for name, x in integral.items()}

    def _array(self, x: Tensor, *, several: bool | None = None) -> Any:
        """A result ``[B, …]`` as the reply has it; ``several``: with its batch dimension."""
        x = x.detach()
        return to_numpy(x if (self.checked.inputs.several if several is None else several) else x[0])

    # ── check ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _checks(self) -> Passes[dict[str, GradientCheck]]:
        """Compare gradients with central differences along random directions, all in float64."""
        yield from self._time.between(BACKWARD)
        with in_float64(self._loaded.model):
            run = self._runs.run()
            gradients = {point: self._whole(run, point, x) for point, x in differentiated(run).items()}
            base = {point: self._whole(run, point, x.detach()) for point, x in run.at.items()}
            rounding = _ROUNDING * max(1.0, float(run.value.detach().abs().sum()))
            del run
        checks = {}
        for point, x in base.items():
            checks[_name(point)] = yield from self._check(point, x, gradients[point], rounding)
        return checks

    def _whole(self, run: GraphRun, point: Point, x: Tensor) -> Tensor:
        """The tensor at a point, with the heads of all devices."""
        by_head = point[1] in self._traced and point[1] not in MODULE_TAPS
        return run.attention_pass.of_all_heads(point[0], x) if by_head else x

    def _check(self, point: Point, base: Tensor, gradient: Tensor, rounding: float) -> Passes[GradientCheck]:
        generator = torch.Generator().manual_seed(0)
        moves = base.isfinite()
        if point[1] == "router":
            moves &= base != 0  # an expert that is not taken has no derivative
        size = float(base[moves].norm()) or 1.0
        expected, numeric = list[float](), list[Derivative]()
        for _ in range(_DIRECTIONS):
            direction = torch.randn(base.shape, generator=generator, dtype=torch.float64).to(base.device)
            direction = direction.masked_fill(~moves, 0)
            direction /= direction.norm().clamp_min(1e-300)
            expected.append(float((gradient * direction).sum()))
            enough = 0.1 * TOLERANCE * max(CHECK_FLOOR, abs(expected[-1]))
            steps = converging(_FIRST_STEP * size, _LEAST_STEP * size, rounding, enough, expected[-1])
            numeric.append((yield from self._derivative(point, base, direction, steps)))
        return verdict(expected, numeric)

    def _derivative(
        self, point: Point, base: Tensor, direction: Tensor, steps: Generator[float, float, Derivative]
    ) -> Passes[Derivative]:
        """Differentiate L along a direction by central differences of these steps."""
        step = next(steps)
        while True:
            yield from self._time.between(2)
            with in_float64(self._loaded.model):
                moved = (base + sign * step * direction for sign in (1, -1))
                ends = [float(self._runs.run({point: moved_state}, graph=False).value.sum()) for moved_state in moved]
            try:
                step = steps.send((ends[0] - ends[1]) / (2 * step))
            except StopIteration as end:
                derivative: Derivative = end.value
                return derivative


_DIRECTIONS: Final = 2
"""Directions at each point."""


def _by_head(effect: Tensor) -> Tensor:
    """The sum of an effect ``[B, H, L, Dv]`` by head."""
    return effect.sum((2, 3), dtype=torch.promote_types(effect.dtype, torch.float32))


def _name(point: Point) -> str:
    layer, name = point
    return name if layer is None else f"{layer}.{name}"
