"""The one way from a question to runs of a model: one value says what a run is to do.

Notation: B texts, L tokens, P positions.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import EditableTap
from attention_contract.schemas.models import LayerTap
from attention_service.core.tensors import wide
from attention_service.models.inputs.input_reader import InputReader
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.inputs.prediction_head import Places, PredictionHead, Rows, rows_at
from attention_service.models.loaded.entering_states import EnteringStates, kept_in_graph
from attention_service.models.loaded.last_states import LastStates, ModelCall
from attention_service.models.passes.attention_pass import STATE_TAPS, AttentionPass
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_hooks import State
from attention_service.models.passes.points import EMBEDDINGS, TOLD, Point, Points
from attention_service.models.passes.shared_layers import KeptStates, Resumed, SharedLayers

_FIRST_LOGITS: Final = torch.tensor([0])
"""The row of logits that a run makes of which none is needed."""


@dataclass(frozen=True)
class Reading:
    """The copy of a state that a run is to make."""

    positions: Places | None = None
    """The tokens of each text; None for all."""
    on_host: bool = False


WHOLE: Final = Reading()
ON_HOST: Final = Reading(on_host=True)


class Predictions(NamedTuple):
    """The logits that a run is to make."""

    places: Places | None
    """The places in each text, as ``PredictionHead.places`` returns them."""
    stack: Stack
    """The tokens whose predictions they are."""


@dataclass(frozen=True, eq=False)
class RunSpec:
    """The work of one run of a model. At one point edits come first, then ``put``, ``add``, ``keep`` and ``read``."""

    attention_pass: AttentionPass = field(default_factory=lambda: AttentionPass({}))
    """The tasks at attentions, of all texts and of some, and what is found there."""
    read: Mapping[Point, Reading] = field(default_factory=dict)
    """The states to copy."""
    keep: Collection[Point] = ()
    """The states, and taps, to keep as nodes of the graph."""
    put: Mapping[Point, Tensor] = field(default_factory=dict)
    """Tensors to put in the place of states, and of taps."""
    add: Mapping[Point, Tensor] = field(default_factory=dict)
    """Tensors to add to states."""
    logits: Predictions | None = None
    """The logits to make; None if none are needed, though a model may make some."""
    resumed: Resumed | None = None
    """The layers to run, if not all."""
    keeps_layers: bool = False
    """True to keep the states before and behind each layer, with which another run begins at a layer."""
    last_states: bool = False
    """True to run as much of the model as makes the last states of its texts."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """The results of one run."""

    attention_pass: AttentionPass
    output: Any
    """The output of the model."""
    rows: Rows | None = None
    """Its logits, if they are wanted."""
    at: dict[Point, Tensor] = field(default_factory=dict)
    """The states ``[B, L, …]`` that were read, or ``[B, P, …]``, and the nodes that were kept, point by point."""
    layers: KeptStates = field(default_factory=KeptStates)
    """The states of layers, if they were kept."""
    last_states: Tensor | None = None
    """``[B, L, width]``"""

    @property
    def logits(self) -> Rows:
        """The logits. Raises TypeError if none were wanted."""
        if self.rows is None:
            raise TypeError("the run was asked for no logits")
        return self.rows


EVERY_TAP: Final[tuple[LayerTap, ...]] = tuple(tap for taps in get_args(LayerTap) for tap in get_args(taps))
"""The taps of the layers of all models."""
Use = Literal["read", "keep", "put", "edit", "generate", "report"]
"""A use of a point in a run; of generated tokens, ``generate`` is an edit, and ``report`` a reply about each."""


class ModelRunner:
    """The runs of one model in this process."""

    def __init__(
        self, call: ModelCall, reader: InputReader, head: PredictionHead, points: Points, entering: EnteringStates,
        layers: SharedLayers, last_states: Callable[[], LastStates],
    ) -> None:  # fmt: skip
        self._call, self._reader, self._head = call, reader, head
        self._entering, self._layers, self._last_states = entering, layers, last_states
        self.points = points

    def refuses(self, point: Point, use: Use) -> str | None:
        """The reason for which a point has no such use; None if it has. Raises KeyError for a layer that there is not.

        To keep a point first takes a short run.
        """
        layer, name = point
        if use == "keep" and (reason := self._entering.refusal) is not None:
            return reason
        if layer is None or name in {"before", "entering", "embeddings"}:
            return self._refuses_entering(point, use)
        place = self.points.place(layer)
        if use in {"generate", "report"} and (reason := self._ungenerated(place, name, use)) is not None:
            return reason
        reason = self.points.refusal(point)
        if reason is None and name in {"mlp", "hidden"} and use in {"edit", "generate"}:
            reason = place.refusal("hidden") or self._unedited(place)
        if reason is not None or name in TOLD:
            return reason
        return place.refusal(name)

    def _refuses_entering(self, point: Point, use: Use) -> str | None:
        """The same for the states that enter the model, or a stack."""
        if point[0] is not None and point[1] == "embeddings":
            return "embeddings are those of the model, and not of a layer"
        if point != EMBEDDINGS or use not in {"edit", "generate"} or not isinstance(self._entering.width, str):
            return None
        return f"{self._entering.width}, so that embeddings are not edited"

    def width(self, point: Point) -> int | None:
        """The width of the states at a point; None if it is a grid, or several states of a token, or is not seen.

        That of a router is the number of experts.
        """
        if point[0] is not None:
            return (self.points.experts if point[1] == "router" else self.points.width)(point[0])
        return None if isinstance(self._entering.width, str) else self._entering.width

    def _unedited(self, place: AttentionPlace) -> str | None:
        """The reason for which states of a layer are not edited; None if they are."""
        if self.points.width(place.key) is None or place.windows is not None:
            return "its layer returns no single state of each token, so that mlp and hidden are not edited"
        return None

    def _ungenerated(self, place: AttentionPlace, name: str, use: Use) -> str | None:
        """The reason for which a use of a layer is one of whole texts alone; None if it is not."""
        if use == "report":
            return self._unreported(place)
        if place.queries == "media":
            return "it sees the images or sounds of a prompt, and is not edited while tokens are generated"
        if name in STATE_TAPS:  # a state between modules, whatever the layer mixes tokens by
            return None
        if place.mixes != "attention":
            return "it mixes tokens by a running state, which is not edited while tokens are generated"
        return f"{name} is not edited while tokens are generated" if name in place.beside.names else None

    def _unreported(self, place: AttentionPlace) -> str | None:
        """The reason for which the weights of a layer do not come with generated tokens; None if they do."""
        if place.mixes != "attention":
            return "it has implicit weights, which are those of a whole text, and are not made token by token"
        own = "target" if self._reader.pairs else "text"
        return None if place.queries == own else "no generated token attends in it"

    def check_tap(self, place: AttentionPlace, tap: str, use: Use, param: str) -> None:
        """Raise InvalidRequest, for the field ``param``, for a tap that has no such use in a layer."""
        if (reason := self.refuses((place.key, tap), use)) is not None:
            named = EVERY_TAP if use in {"read", "keep", "put"} else get_args(EditableTap)
            taps = [other for other in named if self.refuses((place.key, other), use) is None]
            advice = f"take {', '.join(taps)}" if taps else "take another layer"
            raise InvalidRequest.at(param, f"layer {place.key}: {reason}; {advice}")

    def check(self, point: Point, use: Use, param: str, instead: str) -> None:
        """Raise InvalidRequest, for the field ``param``, for a point that has no such use. ``instead``: the advice."""
        if (reason := self.refuses(point, use)) is not None:
            layer = "" if point[0] is None else f"layer {point[0]}: "
            raise InvalidRequest.at(param, f"{layer}{reason}; {instead}")

    def run(self, arguments: Mapping[str, Tensor], spec: RunSpec) -> RunResult:
        """Run the model once. ``arguments``: of its texts, as its reader makes them."""
        attention_pass, at = spec.attention_pass, dict[Point, Tensor]()
        changes = self._changes(spec, at)
        if spec.resumed is None and not spec.keeps_layers:
            result = self._result(arguments, spec, changes, at)
        else:
            resuming = nullcontext() if spec.resumed is None else self._layers.resuming(spec.resumed)
            keeping = self._layers.keeping() if spec.keeps_layers else nullcontext(KeptStates())
            with resuming, keeping as layers:
                result = replace(self._result(arguments, spec, changes, at), layers=layers)
        for layer, taps in attention_pass.traced.items():
            at |= {(layer, tap): x for tap, x in taps.items()}
        return result

    def _changes(self, spec: RunSpec, at: dict[Point, Tensor]) -> list[tuple[Point, State]]:
        """The changes of states by a run, which fill ``at``; those of taps become tasks of its attentions."""
        changes: list[tuple[Point, State]] = []
        kept, put = list[Point](), dict[Point, Tensor]()
        for point, value in spec.put.items():
            if self.points.is_state(point):
                changes.append((point, _replaced_by(value)))
            else:
                put[point] = value
        changes += [(point, _plus(value)) for point, value in spec.add.items()]
        for point in spec.keep:
            if self.points.is_state(point):
                changes.append((point, kept_in_graph(at, point)))
            else:
                kept.append(point)
        if kept or put:
            spec.attention_pass.add_tasks(kept, put)
        return changes + [(point, _copied(at, point, reading)) for point, reading in spec.read.items()]

    def _result(
        self, arguments: Mapping[str, Tensor], spec: RunSpec, changes: Sequence[tuple[Point, State]],
        at: dict[Point, Tensor],
    ) -> RunResult:  # fmt: skip
        attention_pass = spec.attention_pass
        if spec.last_states:
            return RunResult(
                attention_pass, None, at=at, last_states=self._last_states().of(arguments, attention_pass, changes)
            )
        if spec.logits is None:
            return RunResult(
                attention_pass, self._call(arguments, attention_pass, logits=_FIRST_LOGITS, changes=changes), at=at
            )
        rows, output = self._rows(arguments, attention_pass, spec.logits, changes)
        return RunResult(attention_pass, output, rows, at)

    def _rows(
        self, arguments: Mapping[str, Tensor], attention_pass: AttentionPass, wanted: Predictions,
        changes: Iterable[tuple[Point, State]],
    ) -> tuple[Rows, Any]:  # fmt: skip
        """The logits at these places of each text, and the whole output."""
        places, stack = wanted
        if places is None or self._head.predicts == "class" or "logits_to_keep" not in self._reader.names:
            output = self._call(arguments, attention_pass, changes=changes)
            return self._head.rows(output, places, stack, alike=False), output
        alike = all(row == places[0] for row in places)
        made = places[0] if alike else sorted({place for row in places for place in row})
        output = self._call(arguments, attention_pass, logits=torch.tensor(made), changes=changes)
        if alike:
            return self._head.rows(output, places, stack, alike=True), output
        index = {place: at for at, place in enumerate(made)}
        return Rows(rows_at(output.logits, [[index[place] for place in row] for row in places]), places), output


def _replaced_by(value: Tensor) -> State:
    return lambda _: value


def _plus(value: Tensor) -> State:
    return lambda state: (wide(state) + value).to(state.dtype)


def _copied(at: dict[Point, Tensor], point: Point, reading: Reading) -> State:
    def read(state: Tensor) -> None:
        state = state.detach()
        if reading.positions is not None:
            flat = rows_at(state.flatten(2), reading.positions)
            at[point] = flat.view(*flat.shape[:2], *state.shape[2:])
        else:
            at[point] = state.to("cpu", copy=True) if reading.on_host else state.clone()

    return read
