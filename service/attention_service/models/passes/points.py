"""The points of a model at which states are read, kept in the graph or replaced, and the one way to do so.

A point is a layer's key and a name: ``hidden``, ``mlp``, ``router``, ``output``, ``before``, ``entering`` (the states
that enter its stack), or a tap of its attention; of the model ``embeddings``, what its table of tokens returns. States
are ``[B, L, width]`` at every point, whatever modules say; a router's are the weights of the E experts, ``[B, L, E]``.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from attention_contract.schemas.attention import Edit
from attention_service.core.edits import BoundEdit, apply
from attention_service.models.passes.attention_pass import STATE_TAPS, AttentionPass, OwnTexts
from attention_service.models.passes.attention_places import AttentionPlace, turns_of
from attention_service.models.passes.expert_weights import ExpertCall, texts_of
from attention_service.models.passes.module_hooks import (
    State,
    after,
    before,
    before_call,
    noting_calls,
    on_turn,
    one_by_one,
)
from attention_service.runtime.operations import compute
from attention_transformers.model_layers import LayerKey

Point = tuple[LayerKey | None, str]
"""A layer and the name of something in it; no layer for the model."""
EMBEDDINGS: Final[Point] = (None, "embeddings")
"""The states that enter the model: what its table of tokens returns, before positions, types and norms; of a model of
images or sounds, perhaps beside text, what its first layer is given."""
EDITED_EMBEDDINGS: Final = "embeddings"
"""The key of a pass's task that edits them, in the place of a layer's."""
STATES: Final = frozenset({"hidden", "mlp", "router", "output", "before", "entering"})
"""The names of points of a layer that are states between modules; the others are taps of its attention."""
TOLD: Final = frozenset({"mlp", "router"})
"""The points of a layer that a short run tells, or the reason for which there are none."""
NO_ROUTER: Final = (
    "no module is seen in its layer that is given weights for the outputs of experts, so it has no router"
)
ONCE: Final = sys.maxsize
"""The turns of a module of which only the first call of a run counts."""


@dataclass(frozen=True, eq=False)
class Site:
    """The place of a point: what a module is given or returns at one of its calls."""

    module: nn.Module
    given: bool = False
    """True for what the module is given, False for what it returns."""
    turn: int = 0
    """The call of the module, among those of one pass."""
    turns: int = 1
    """The calls of the module in one pass."""
    batch_first: Callable[[State], State] | None = None
    """Makes a change of states ``[B, L, width]`` one of the states that the module has; None if they are such."""
    experts: ExpertCall | None = None
    """The weights of experts that the module is given beside its states, if they are the point."""
    rows_of: nn.Module | None = None
    """The layer whose states are ``[B, L, width]`` if those of the module are their rows, ``[B · L, width]``."""


class LayerStates(NamedTuple):
    """The states of one layer, as short runs show them."""

    mlp: Site | str
    """The site of what its MLP adds, or the reason for which it is not told."""
    width: int | None
    """The width of the state behind the layer; None if it is a grid, or several states of a token, or is not seen."""
    router: Site | str = NO_ROUTER
    """The site of the weights of its experts, or the reason for which there are none."""

    def named(self, name: str) -> Site | str:
        """The site of ``mlp`` or ``router``, or the reason for which there is none."""
        return self.router if name == "router" else self.mlp


class Points:
    """The points of one model."""

    def __init__(
        self, places: Sequence[AttentionPlace], entering: Callable[[], Sequence[Site]],
        layers: Callable[[], Mapping[LayerKey, LayerStates]],
    ) -> None:  # fmt: skip
        """``places``: all attentions of the model; ``entering`` finds the sites of the states that enter it.

        ``layers`` finds the states of the layers.
        """
        self._places = {place.key: place for place in places}
        self._entering, self._layers = entering, layers
        self._sites: dict[Point, Sequence[Site]] = {}

    def name(self, sites: Mapping[Point, Site]) -> None:
        """Give further sites the names of points."""
        self._sites |= {point: (site,) for point, site in sites.items()}

    def is_state(self, point: Point) -> bool:
        """True for a point that is a state between modules; False for a tap of an attention."""
        return point in self._sites or point[0] is None or point[1] in STATES

    def place(self, layer: LayerKey) -> AttentionPlace:
        """Return the attention of a layer. Raises KeyError for a layer that there is not."""
        return self._places[layer]

    def refusal(self, point: Point) -> str | None:
        """The reason for which there is no such state; None if there is. Raises KeyError for a layer that is not."""
        layer, name = point
        if layer is None or name not in TOLD:
            return None
        site = self._layers()[layer].named(name)
        return site if isinstance(site, str) else None

    def width(self, layer: LayerKey) -> int | None:
        """The width of the states of a layer, as ``LayerStates`` has it. Raises KeyError for a layer that is not."""
        return self._layers()[layer].width

    def experts(self, layer: LayerKey) -> int | None:
        """The number of experts of a layer; None if no router is seen. Raises KeyError for a layer that is not."""
        site = self._layers()[layer].router
        return None if isinstance(site, str) or site.experts is None else site.experts.experts

    def sites(self, point: Point) -> Sequence[Site]:
        """Return the sites of a point, of which each run passes one. Raises KeyError for a point that there is not."""
        if point not in self._sites:
            self._sites[point] = self._found(point)
        return self._sites[point]

    def _found(self, point: Point) -> Sequence[Site]:
        if point == EMBEDDINGS:
            return self._entering()
        layer, name = point
        if layer not in self._places or name not in STATES:
            raise KeyError(point)
        if name in TOLD:
            site = self._layers()[layer].named(name)
            if isinstance(site, str):
                raise KeyError(f"{point}: {site}")
            return (site,)
        place = self._places[layer]
        module = {"output": place.module, "entering": place.first_layer}.get(name, place.layer)
        turns = turns_of(module, self._places.values())
        turn = 0 if name == "entering" else place.turn
        return (Site(module, name in {"before", "entering"}, turn, turns, place.batch_first),)

    def changing(self, changes: Iterable[tuple[Point, State]]) -> AbstractContextManager[None]:
        """Make these changes of states in the run until the block ends; those of one point in their order."""
        return changing([(site, change) for point, change in changes for site in self.sites(point)])


@contextmanager
def changing(changes: Iterable[tuple[Site, State]]) -> Iterator[None]:
    """Make changes at these sites until the block ends; those of one site in their order."""
    calls: dict[tuple[nn.Module, bool], dict[int, list[State]]] = {}
    turns: dict[tuple[nn.Module, bool], int] = {}
    routed: dict[tuple[nn.Module, bool], ExpertCall] = {}
    with ExitStack() as stack:
        for site, change in changes:
            side = site.module, site.given
            own = change if site.batch_first is None else site.batch_first(change)
            if site.rows_of is not None:
                own = stack.enter_context(_unfolding(site.rows_of, own))
            calls.setdefault(side, {}).setdefault(site.turn, []).append(own)
            turns[side] = max(site.turns, turns.get(side, 1))
            if site.experts is not None:
                routed[side] = site.experts
        for side, by_turn in calls.items():
            module, given = side
            changes_by_turn = {turn: one_by_one(made) if len(made) > 1 else made[0] for turn, made in by_turn.items()}
            change = changes_by_turn[0] if turns[side] == 1 else on_turn(changes_by_turn, turns[side])
            if side in routed:
                stack.enter_context(_weighing(module, routed[side], change))
            else:
                stack.callback((before if given else after)(module, change))
        yield


@contextmanager
def _unfolding(layer: nn.Module, change: State) -> Iterator[State]:
    """Yield a change of the states of a layer as one of their rows, one text behind the other."""
    sizes: list[int] = []

    def note(_: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        sizes[:] = (args[0] if args else options["hidden_states"]).shape[:-1]

    def changed(rows: Tensor) -> Tensor | None:
        new = change(rows.view(*sizes, rows.shape[-1]))
        return None if new is None else new.reshape(rows.shape)

    with noting_calls([layer], note):
        yield changed


@contextmanager
def _weighing(module: nn.Module, call: ExpertCall, change: State) -> Iterator[None]:
    """Make a change of the weights ``[B, L, E]`` that a module is given for its experts."""
    batch: list[int] = []

    def note(_: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        state = args[0] if args else options["hidden_states"]
        batch[:] = texts_of(state)

    def changed(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        weights = call.weights(args, options)
        new = change(weights.view(*batch, call.experts))
        return None if new is None else call.changed(args, options, weights, new.reshape(weights.shape))

    with noting_calls([call.layer], note), ExitStack() as stack:
        stack.callback(before_call(module, changed))
        yield


def state_edits(attention_pass: AttentionPass) -> list[tuple[Point, State]]:
    """Return the edits of states in a pass, which are made behind the modules that make them."""
    edits: list[tuple[Point, State]] = []
    for texts in attention_pass.texts:
        for layer, task in texts.attention_pass.tasks.items():
            taps = dict.fromkeys(edit.tap for edit in task.edits if edit.tap in STATE_TAPS)
            edits += [
                (edited_point(layer, tap), _edited([one for one in task.edits if one.tap == tap], texts, tap))
                for tap in taps
            ]
    return edits


def edited_point(key: LayerKey, tap: str) -> Point:
    """The point of edits of a state that stand under this key."""
    return EMBEDDINGS if key == EDITED_EMBEDDINGS else (key, tap)


def _edited(edits: Sequence[Edit], texts: OwnTexts, tap: str) -> State:
    def change(state: Tensor) -> Tensor:
        bound: Sequence[BoundEdit] = compute.bind_edits(edits, state.device, state.dtype)
        if texts.are_all:
            return apply(bound, tap, state)
        changed = state.clone()
        own = changed[texts.rows, texts.tokens]
        own.copy_(apply(bound, tap, own))
        return changed

    return change
