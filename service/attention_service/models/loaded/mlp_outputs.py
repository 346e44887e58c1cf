"""The output of each layer's MLP: what the layer adds to its states beside its attention.

No list of classes names an MLP. A short run shows the states of every module of a layer. A module's output is the MLP's
if the end of the layer is a state plus this output, and if the end follows when random numbers take its place.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attention_service.models.loaded.streams.module_traces import ModuleTraces, traced
from attention_service.models.loaded.streams.state_sums import same, tolerance_of
from attention_service.models.passes.attention_places import NO_LAYER, AttentionPlace, turns_of
from attention_service.models.passes.module_hooks import State
from attention_service.models.passes.points import LayerStates, Site, changing
from attention_transformers.model_layers import LayerKey

Run = Callable[[Mapping[str, Tensor]], Any]
"""Runs a model over a few tokens."""
_ROUNDS: Final = 4
"""The outputs of a layer that are tried, the likeliest first."""
_LEAST_SHARE: Final = 0.2
"""The size of random numbers of the size of a sum, times the factor with which they are part of it."""
_ROUNDED: Final = 0.01
"""The part of the tolerance within which two sums are equal but for rounding."""
_NOTHING_BESIDE: Final = "its layer adds nothing beside its attention, so it has no mlp"
_SEVERAL: Final = "its layer adds the outputs of several modules beside its attention, none of which is its mlp alone"
_UNTOLD: Final = "no module of its layer returns what its mlp adds alone"


@dataclass(frozen=True, eq=False)
class _Slot:
    """A state of a run: what a module is given or returns, perhaps with the channels of a grid last."""

    module: nn.Module
    given: bool
    channels_last: bool = False

    def of(self, traces: ModuleTraces) -> Tensor | None:
        """Its numbers in one run; None if the module did not run."""
        state = (traces.given if self.given else traces.made).get(self.module)
        return state.permute(0, 2, 3, 1) if self.channels_last and state is not None else state


@dataclass(frozen=True, eq=False)
class _Sum:
    """A way in which the end of a layer may be a sum: of a state, an output, and perhaps that of its attention."""

    end: _Slot
    state: _Slot
    output: nn.Module
    attention: nn.Module | None = None
    rows: bool = False
    """True if the output has the texts of a batch one behind the other."""

    def factor(self, traces: ModuleTraces, tolerance: float) -> float | None:
        """The factor of the output in the sum; None if the end is no such sum, or is one without the output."""
        end, state, output = self.end.of(traces), self.state.of(traces), traces.made.get(self.output)
        attention = None if self.attention is None else traces.made.get(self.attention)
        if end is None or state is None or output is None or (attention is None) != (self.attention is None):
            return None
        if not bool(end.isfinite().all()):
            return None
        factors, share, left = _fitted(end, [x for x in (output, state, attention) if x is not None])
        if left > tolerance or share < _LEAST_SHARE:
            return None
        return 1.0 if abs(factors[0] - 1) < 10 * tolerance else factors[0]


_Told = tuple[_Sum, float]
"""A sum that holds, and the factor of its output."""


def find_layer_states(
    places: Sequence[AttentionPlace], runs: Sequence[Mapping[str, Tensor]], run: Run, dtype: torch.dtype
) -> dict[LayerKey, LayerStates]:
    """Find the states of layers, and the outputs of their MLPs, in short runs.

    ``runs``: the arguments of one for each kind of input; ``dtype``: that of the model. An MLP of experts is their sum.
    """
    states: dict[LayerKey, Site | str] = {place.key: _UNTOLD for place in places}
    widths: dict[nn.Module, int] = {}
    waiting: dict[nn.Module, list[AttentionPlace]] = {}
    for place in places:
        if place.layer is place.module:
            states[place.key] = NO_LAYER
        else:
            waiting.setdefault(place.layer, []).append(place)
    for arguments in runs:
        told, reasons = _found_in(waiting, partial(run, arguments), tolerance_of(dtype), widths)
        for layer, reason in reasons.items():
            states |= {place.key: reason for place in waiting[layer]}
        for layer, (chosen, factor) in told.items():
            states |= {place.key: _site(place, places, chosen, factor) for place in waiting[layer]}
        waiting = {
            layer: layer_places for layer, layer_places in waiting.items() if layer not in told and layer not in reasons
        }
    return {place.key: LayerStates(states[place.key], widths.get(place.layer)) for place in places}


def _found_in(
    layers: Mapping[nn.Module, Sequence[AttentionPlace]], run: Callable[[], Any], tolerance: float,
    widths: dict[nn.Module, int],
) -> tuple[dict[nn.Module, "_Told"], dict[nn.Module, str]]:  # fmt: skip
    """The sums that hold of the layers that run, and why the others have none; adds to the ``widths`` of states."""
    with traced(_modules_of(layers)) as traces, torch.no_grad():
        run()
    _unfold(traces, layers)
    sums = {layer: _Sums(layer, places, traces, tolerance) for layer, places in layers.items() if layer in traces.made}
    for layer in sums:
        if traces.made[layer].ndim == 3 and not layers[layer][0].channels_first:
            widths[layer] = traces.made[layer].shape[-1]
    reasons, listed = dict[nn.Module, str](), dict[nn.Module, Sequence[_Sum]]()
    for layer, of_layer in sums.items():
        every = [of_layer.of(end) for end in of_layer.ends()]
        listed[layer] = [chosen for some, _ in every for chosen in some]
        reasons[layer] = _UNTOLD
        if any(complete for _, complete in every):
            reasons[layer], listed[layer] = _NOTHING_BESIDE, []
    told = _tried(listed, traces, run, tolerance)
    more = {layer: sums[layer].others(chosen) for layer, (chosen, _) in told.items()}
    for layer in _tried(more, traces, run, tolerance):
        reasons[layer] = _SEVERAL
    told = {layer: layer_sums for layer, layer_sums in told.items() if reasons[layer] is not _SEVERAL}
    return told, {layer: reason for layer, reason in reasons.items() if layer not in told}


def _tried(
    listed: Mapping[nn.Module, Sequence[_Sum]], traces: ModuleTraces, run: Callable[[], Any], tolerance: float
) -> dict[nn.Module, "_Told"]:
    """The first sum of each layer that holds with random numbers for the output, of at most ``_ROUNDS`` of each."""
    proven: dict[nn.Module, _Told] = {}
    for number in range(_ROUNDS):
        sums = {
            layer: layer_sums[number]
            for layer, layer_sums in listed.items()
            if layer not in proven and number < len(layer_sums)
        }
        if not sums:
            break
        random = [
            (Site(one.output, rows_of=layer if one.rows else None), _random(_state(one.end, traces)))
            for layer, one in sums.items()
        ]
        with changing(random), traced(_modules_of(sums)) as changed, torch.no_grad():
            run()
        _unfold(changed, sums)
        for layer, candidate_sum in sums.items():
            if (factor := candidate_sum.factor(changed, tolerance)) is not None:
                proven[layer] = candidate_sum, factor
    return proven


def _unfold(traces: ModuleTraces, layers: Iterable[nn.Module]) -> None:
    """See the states of modules that have the texts of a batch one behind the other as those of their layer."""
    for layer in layers:
        end = traces.made.get(layer)
        if end is None or end.ndim != 3:
            continue
        for module, states in product(layer.modules(), (traces.given, traces.made)):
            state = states.get(module)
            if state is not None and state.ndim == 2 and state.shape == (end.shape[:-1].numel(), end.shape[-1]):
                states[module] = state.view_as(end)
                if states is traces.made:
                    traces.rows.add(module)


def _site(place: AttentionPlace, places: Sequence[AttentionPlace], chosen: _Sum, factor: float) -> Site:
    batch_first: Callable[[State], State] | None = None if chosen.end.channels_last else place.batch_first
    if factor != 1:
        batch_first = _times(factor, batch_first)
    turns, rows_of = turns_of(place.layer, places), place.layer if chosen.rows else None
    return Site(chosen.output, False, place.turn, turns, batch_first, rows_of=rows_of)


def _times(factor: float, batch_first: Callable[[State], State] | None) -> Callable[[State], State]:
    """Make a change of an output times a factor one of the output itself."""

    def scaled(change: State) -> State:
        def changed(state: Tensor) -> Tensor | None:
            new = change(state * factor)
            return None if new is None else new / factor

        return changed if batch_first is None else batch_first(changed)

    return scaled


# ── the sums that the end of a layer may be ──────────────────────────────────────────────────────────────────────────


class _Sums:
    """The sums that a state of one layer may be, by the numbers of one run."""

    def __init__(
        self, layer: nn.Module, places: Sequence[AttentionPlace], traces: ModuleTraces, tolerance: float
    ) -> None:
        self._layer, self._places, self._traces, self._tolerance = layer, places, traces, tolerance
        self._modules = [module for module in layer.modules() if module is not layer]
        around = {module for module in self._modules if any(p.module in {*module.modules()} for p in places)}
        self._attending = around | {module for place in places for module in place.module.modules()}
        self._attended = [traces.made[place.module] for place in places if place.module in traces.made]
        self._behind = self._behind_attention()

    def ends(self) -> Iterator[_Slot]:
        """The end of the layer, and what its last norm is given."""
        end = self._traces.made[self._layer]
        yield _Slot(self._layer, given=False)
        if self._places[0].channels_first and end.ndim == 4:
            yield _Slot(self._layer, given=False, channels_last=True)
        for module in self._modules:
            given, made = self._traces.given.get(module), self._traces.made.get(module)
            ends = not [*module.children()] and same(end, made, self._tolerance)
            if ends and given is not None and not same(end, given, self._tolerance):
                yield _Slot(module, given=True)

    def others(self, chosen: _Sum) -> list[_Sum]:
        """The sums that other states of the layer may be, of other outputs than that of this sum."""
        output, traces = _Slot(chosen.output, given=False), self._traces
        inside, other_sums = {*chosen.output.modules()}, list[_Sum]()
        for slot in self._states([_state(output, traces)]):
            if slot.module not in inside | {self._layer} and traces.begun[slot.module] < traces.done[chosen.output]:
                sums, complete = self.of(slot, (chosen.end, output), whole=False)
                other_sums += [] if complete else sums
        return other_sums

    def _states(self, known: Sequence[Tensor]) -> list[_Slot]:
        """The states that modules are given, in the order in which they begin, the one before the layer first."""
        modules = [module for module in (self._layer, *self._modules) if module in self._traces.begun]
        modules.sort(key=self._traces.begun.__getitem__)
        return self._unlike([_Slot(module, given=True) for module in modules], known)

    def of(self, target: _Slot, without: Sequence[_Slot] = (), *, whole: bool = True) -> tuple[list[_Sum], bool]:
        """The sums that a state may be, the likeliest first; True if it is one of states and attentions alone.

        ``without``: states that are no part of the sum; ``whole``: the sum has the attention's output too.
        """
        traces, tolerance = self._traces, self._tolerance
        known = [_state(slot, traces) for slot in (target, *without)]
        states = [slot for slot in self._states(known) if not target.given or self._is_earlier(slot, target)]
        modules = sorted(self._modules, key=lambda module: not [*module.children()])  # an MLP before its last matrix
        outputs = self._unlike([_Slot(one, given=False) for one in modules if one not in self._attending], known)
        attending = [place.module for place in self._places]
        beside = [_Slot(one, given=False) for one in self._modules if one in attending or one in self._behind]
        beside = self._unlike(beside, known)
        slots = [target, *states, *outputs, *beside]
        gram, at = _gram([_state(slot, traces) for slot in slots]), {id(slot): n for n, slot in enumerate(slots)}

        def residual(*columns: _Slot | None) -> float:
            return _residual(gram, [at[id(slot)] for slot in columns if slot is not None])

        candidates = list[tuple[bool, float, _Sum]]()
        for state, output in product(states, outputs):
            if traces.begun[state.module] > traces.done[output.module]:
                continue  # an output is made of the state to which it is added
            if output.module in self._behind and not self._is_attended(state):
                continue
            for attention in (None, *beside):
                if attention is None and whole and state.module is self._layer:
                    continue  # the output would have the attention's in it
                left = residual(state, output, attention)
                fewer = [residual(state, attention), *([] if attention is None else [residual(state, output)])]
                if left <= tolerance and left < min(fewer) / 2:
                    module = None if attention is None else attention.module
                    rows = output.module in traces.rows
                    candidates.append((module is not None, left, _Sum(target, state, output.module, module, rows)))
                    break
        before = [state for state in states if not self._is_attended(state) and not self._is_made_behind(state)]
        alone = (residual(state, one) for state, one in product(before, beside))
        complete = any(left <= _ROUNDED * tolerance for left in alone)
        return [chosen for *_, chosen in sorted(candidates, key=itemgetter(0, 1))], complete

    def _unlike(self, slots: Sequence[_Slot], known: Sequence[Tensor]) -> list[_Slot]:
        """The slots whose states have the shape of a known one and differ from it, and from those of earlier slots."""
        known, unlike = [*known], list[_Slot]()
        for slot in slots:
            state = slot.of(self._traces)
            if state is None or state.shape != known[0].shape or not bool(state.any()):
                continue
            if not any(same(one, state, self._tolerance * _ROUNDED) for one in known):
                known.append(state)
                unlike.append(slot)
        return unlike

    def _is_earlier(self, slot: _Slot, target: _Slot) -> bool:
        return self._traces.begun[slot.module] < self._traces.begun[target.module]

    def _is_attended(self, slot: _Slot) -> bool:
        """True for a state that an attention returned, as one that ends in a norm does."""
        return any(same(one, slot.of(self._traces), self._tolerance * _ROUNDED) for one in self._attended)

    def _is_made_behind(self, slot: _Slot) -> bool:
        """True for a state that a module behind an attention returned, which may be its MLP (BigBird)."""
        made = [self._traces.made[module] for module in self._behind if module in self._traces.made]
        return any(same(one, slot.of(self._traces), self._tolerance * _ROUNDED) for one in made)

    def _behind_attention(self) -> set[nn.Module]:
        """The modules that are given what an attention returned, one behind the other: its norm, its projection."""
        rest = [module for module in self._modules if module not in self._attending]
        behind, made = set[nn.Module](), [*self._attended]
        grows = True
        while grows:
            near = {module for module in rest if module not in behind and self._follows(module, made)}
            made += [self._traces.made[module] for module in near if module in self._traces.made]
            behind, grows = behind | near, bool(near)
        return behind

    def _follows(self, module: nn.Module, made: Sequence[Tensor]) -> bool:
        """True if a module without others is given one of these states, or one with others returns it."""
        states = self._traces.made if [*module.children()] else self._traces.given
        given = states.get(module)
        return given is not None and any(_are_alike(state, given, self._tolerance * _ROUNDED) for state in made)


def _are_alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """True if two states have the same numbers, those of windows perhaps in another order."""
    if one.shape == other.shape or one.numel() != other.numel():
        return same(one, other, tolerance)
    return same(one.flatten().sort()[0], other.flatten().sort()[0], tolerance)


def _state(slot: _Slot, traces: ModuleTraces) -> Tensor:
    state = slot.of(traces)
    if state is None:
        raise TypeError("the module did not run")
    return state


def _gram(states: Sequence[Tensor]) -> NDArray[np.float64]:
    """The products of states, each of length 1; each token counts by its size in the first state."""
    columns = torch.stack(_columns(states))
    columns = columns / columns.norm(dim=1, keepdim=True)
    gram: NDArray[np.float64] = (columns @ columns.T).numpy()
    return gram


def _columns(states: Sequence[Tensor]) -> list[Tensor]:
    """States as columns on the host, the numbers of each token relative to the size of the first state there."""
    sizes = states[0].double().norm(dim=-1, keepdim=True)
    return [(x.double() / sizes.where(sizes > 0, 1)).reshape(-1).cpu() for x in states]


def _residual(gram: NDArray[np.float64], columns: Sequence[int]) -> float:
    """The part of the first state that is no sum of some others, relative to its size."""
    inner, target = gram[np.ix_(columns, columns)], gram[columns, 0]
    factors = np.linalg.lstsq(inner, target, rcond=1e-12)[0]
    return math.sqrt(max(0.0, 1 - float(factors @ target)))


def _fitted(total: Tensor, states: Sequence[Tensor]) -> tuple[list[float], float, float]:
    """The factors by which states sum to another, the size of the first summand, and that of what is left.

    Both sizes are relative to the sum's.
    """
    wanted, *columns = _columns([total, *states])
    matrix = torch.stack(columns, 1)
    factors = torch.linalg.lstsq(matrix, wanted[:, None], driver="gelsd").solution[:, 0]
    left = (wanted - matrix @ factors).norm() / wanted.norm()
    share = (factors[0] * columns[0]).norm() / wanted.norm()
    return factors.tolist(), float(share), float(left)


def _modules_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for layer in layers for module in layer.modules()]


def _random(like: Tensor) -> State:
    """Random numbers in place of a state, of the size that each token has in one of its shape; others at each call."""
    generator = torch.Generator().manual_seed(0)
    sizes = like.float().square().mean(-1, keepdim=True).sqrt()

    def change(state: Tensor) -> Tensor:
        drawn = torch.randn(state.shape, generator=generator)
        return (drawn.to(state.device) * sizes).to(state.dtype)

    return change
