"""The routers of layers with experts: the weights by which each token's experts are summed.

No list of classes names a router. In a short run, a module that is given states, the experts of each token and a weight
for each holds the experts if what it returns is the sum of the weights times the outputs of the experts, each of which
is computed alone; and if the same holds with random weights.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_service.models.loaded.streams.state_sums import same, tolerance_of
from attention_service.models.passes.attention_places import NO_LAYER, AttentionPlace, turns_of
from attention_service.models.passes.device_heads import is_divided
from attention_service.models.passes.expert_weights import (
    ExpertArguments,
    ExpertCall,
    argument,
    expert_arguments,
    texts_of,
    with_arguments,
)
from attention_service.models.passes.module_hooks import first_of, noting_calls, noting_returns
from attention_service.models.passes.points import NO_ROUTER, LayerStates, Site
from attention_service.models.passes.unrun_models import NOT_RUNNING
from attention_transformers.model_layers import LayerKey

_SEVERAL: Final = "its layer has several routers, each of experts of its own"
_OTHER_TOKENS: Final = "its experts are given other tokens than its layer, so that its router is not told"
_UNCOUNTED: Final = "the number of its experts is not seen, so that its router is not told"


class RouterTrials:
    """The trials of one model, in short runs of it."""

    def __init__(self, places: Sequence[AttentionPlace], dtype: torch.dtype) -> None:
        """``dtype``: that of the model."""
        self._places, self._tolerance = places, tolerance_of(dtype)
        self._layers: dict[nn.Module, nn.Module] = {}
        """The layer of each module that may hold experts."""
        attentions = {module for place in places for module in place.module.modules()}
        for place in places:
            if place.layer is not place.module:
                inner = [module for module in place.layer.modules() if module is not place.layer]
                self._layers |= {module: place.layer for module in inner if module not in attentions}
        self._arguments: dict[nn.Module, ExpertArguments] = {}
        self._tried: set[nn.Module] = set()
        self._calls: Counter[nn.Module] = Counter()
        self._tokens: dict[nn.Module, set[int]] = {}
        """The numbers of tokens that layers, and modules that hold experts, were given."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Try the modules that run until the block ends."""
        layers = {*self._layers.values()}
        with noting_calls(layers, self._begin), noting_returns(self._layers, self._end):
            yield

    def beside(self, states: Mapping[LayerKey, LayerStates]) -> dict[LayerKey, LayerStates]:
        """Return the states of layers with the sites of their routers."""
        return {place.key: states[place.key]._replace(router=self._router(place)) for place in self._places}

    def _begin(self, layer: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        state = args[0] if args else options.get("hidden_states")
        self._calls[layer] += 1
        if isinstance(state, Tensor):
            self._tokens.setdefault(layer, set()).add(math.prod(texts_of(state)))

    def _end(self, module: nn.Module, args: Sequence[Any], options: Mapping[str, Any], output: Any) -> None:
        arguments = self._arguments.get(module) or expert_arguments(args, options)
        if arguments is None:
            return
        if module not in self._tried:
            self._tried.add(module)
            if self._sums(module, args, options, arguments, first_of(output)):
                self._arguments[module] = arguments
        self._calls[module] += 1
        self._tokens.setdefault(module, set()).add(len(argument(args, options, arguments.weights)))

    @torch.no_grad()
    def _sums(
        self, module: nn.Module, args: Sequence[Any], options: Mapping[str, Any], at: ExpertArguments, output: Any
    ) -> bool:
        """True if a module returns the sum of weights times outputs of experts."""
        choice, weights = argument(args, options, at.choice), argument(args, options, at.weights)
        tokens, taken = weights.shape
        states, rest = argument(args, options, at.states).reshape(tokens, -1), [1] * (choice.ndim - 2)

        def run(states: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
            changed = {at.states: states, at.choice: choice, at.weights: weights}
            placed, named = with_arguments(args, options, changed)
            made: Tensor = first_of(module.forward(*placed, **named))
            return made

        random = torch.rand(weights.shape, generator=torch.Generator().manual_seed(0)).to(weights)
        try:
            alone = run(  # each expert of a token in every place, and all but the first without weight
                states.repeat_interleave(taken, 0), choice.flatten(0, 1)[:, None].repeat(1, taken, *rest),
                weights.new_tensor([1.0] + [0.0] * (taken - 1)).repeat(tokens * taken, 1),
            ).reshape(tokens, taken, -1).float()  # fmt: skip
            sums = [(factors[..., None].float() * alone).sum(1) for factors in (weights, random)]
            made = [summed.reshape(sums[0].shape).float() for summed in (output, run(states, choice, random))]
        except (*NOT_RUNNING, AssertionError):
            return False
        return bool(alone.any()) and all(map(self._same, sums, made))

    def _same(self, one: Tensor, other: Tensor) -> bool:
        return same(one, other, self._tolerance)

    def _router(self, place: AttentionPlace) -> Site | str:
        """The site of a layer's router, or the reason for which there is none."""
        layer = place.layer
        if layer is place.module:
            return NO_LAYER
        held = [module for module in self._arguments if self._layers[module] is layer]
        if len(held) != 1:
            return _SEVERAL if held else NO_ROUTER
        module = held[0]
        other = self._tokens[module] != self._tokens.get(layer) or self._calls[module] != self._calls[layer]
        if other or place.time_first or place.channels_first:
            return _OTHER_TOKENS
        if (experts := _experts_of(module)) is None:
            return _UNCOUNTED
        call = ExpertCall(layer, self._arguments[module], experts)
        return Site(module, True, place.turn, turns_of(layer, self._places), experts=call)


def _experts_of(module: nn.Module) -> int | None:
    """The number of experts that a module holds: as it says, or as its parameters do that have one matrix for each."""
    divided = any(map(is_divided, module.parameters()))  # then the module states those of its device
    if isinstance(stated := getattr(module, "num_experts", None), int) and not divided:
        return stated
    return max((len(x) for x in module.parameters() if x.ndim > 2), default=None)
