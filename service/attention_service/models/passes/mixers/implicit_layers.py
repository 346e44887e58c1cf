"""The layers of a model that mix tokens by a running state, seen and changed while the model runs.

A companion of the two ways of attention, of the same interface: a pass states its tasks in the same words. The weights
of these layers are implicit, and are made only where a task needs them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.schemas.models import LayerKind
from attention_service.core.tensors import product
from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.growing_rotations import GrowingRotations
from attention_service.models.passes.mixers.mixer_rules import (
    RULES,
    MixerRule,
    Mixing,
    Place,
    Recurrence,
    gated_by,
    is_lightning,
    lightning,
    place_of,
    rule_name,
    with_values,
)
from attention_service.models.passes.module_hooks import State, after, before, within_calls
from attention_service.models.passes.observed.observed_attention import SeenLayer
from attention_service.models.passes.observed.own_functions import Sight
from attention_service.models.passes.ways import AttentionWay, LayerTurns
from attention_transformers.model_layers import AttentionModule, LayerKey, layered

TAPS: Final = frozenset({"v", "weights", "context"})
"""The taps of such a layer, besides the states around it."""


def mixers_of(model: nn.Module) -> list[AttentionModule]:
    """Return the modules of a model that mix tokens by a running state, with the numbers of their layers."""
    return layered(model, [module for module in model.modules() if rule_name(module) or is_lightning(module)])


def kind_of(module: nn.Module) -> LayerKind:
    """The kind of such a module."""
    name = rule_name(module)
    return "linear" if name is None else RULES[name].kind


def is_by_channel(module: nn.Module) -> bool:
    """True for a module whose channels have weights of their own."""
    name = rule_name(module)
    return name is not None and RULES[name].by_channel


class ImplicitLayers(AttentionWay):
    """The layers of one model that mix tokens by a running state."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]]) -> None:
        """``layers``: each module with the keys of its layers."""
        self._keys = [key for _, keys in layers for key in keys]
        self.turns = LayerTurns(layers)
        self.modules = [one.module for one, _ in layers]
        self.rotations = GrowingRotations(model)
        self.state_widths: dict[nn.Module, int] = {}
        """The numbers of the state of each module for each value, of those that a pass has seen."""

    def taps_of(self, _: nn.Module) -> frozenset[str] | None:
        """The taps of such a layer."""
        return TAPS

    def concerns(self, attention_pass: AttentionPass) -> bool:
        """True if a pass asks something of one of these layers. Raises TypeError for tasks of some texts alone."""
        attention_pass.check_rows_shared(self._keys)
        return any(attention_pass.task(key).asks or attention_pass.notes(key) for key in self._keys)

    @contextmanager
    def running(self, attention_pass: AttentionPass) -> Iterator[AttentionPass]:
        """Let the model's runs until the block ends belong to a pass."""
        self.restart()
        running: list[_Mixing] = []

        def enter(module: nn.Module, _: Sequence[Any], options: Mapping[str, Any]) -> None:
            layer, mask = self.turns.layer_of(module), options.get("attention_mask")
            running.append(_Mixing(module, layer, attention_pass, mask, self.state_widths))

        def leave() -> None:
            running.pop()

        with ExitStack() as stack:
            stack.enter_context(within_calls(self.modules, enter, leave))
            for module in self.modules:
                if is_lightning(module):
                    parts: Any = module
                    stack.callback(after(parts.qkv_proj, _projected(running)))
                    stack.callback(before(parts.norm, _mixed(running)))
            for (space, name, function), rule in _functions(self.modules):
                if name in space:
                    stack.callback(space.__setitem__, name, function)
                else:  # a method of the class
                    stack.callback(space.__delitem__, name)
                space[name] = _seen(function, rule, running)
            yield attention_pass


def _functions(modules: Sequence[nn.Module]) -> list[tuple[Place, MixerRule]]:
    """The functions that these modules call, each once."""
    functions: dict[tuple[int, str], tuple[Place, MixerRule]] = {}
    for module in modules:
        if (name := rule_name(module)) is not None:
            place = place_of(module, name)
            functions[id(place.space), name] = place, RULES[name]
    return [*functions.values()]


def _seen(original: Callable[..., Any], rule: MixerRule, running: "Sequence[_Mixing]") -> Callable[..., Any]:
    """The function of a rule, seen by the module that runs."""
    signature = inspect.signature(original)

    def call(*args: Any, **options: Any) -> Any:
        if not running:
            return original(*args, **options)
        bound = signature.bind(*args, **options).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        rest: list[Any] = []
        gate = None if rule.gate is None else arguments.get(rule.gate)

        def own(v: Tensor | None) -> Tensor:
            named = {**arguments, **({} if rule.gate is None else {rule.gate: None})}
            named.pop("kwargs", None)
            if v is not None:
                named[rule.values] = rule.as_called(v).to(arguments[rule.values].dtype)
            result = original(**named)
            several = isinstance(result, tuple)
            rest[:] = result[1:] if several else []
            context: Tensor = result[0] if several else result
            return rule.by_head(context)

        mixing = running[-1]
        given = {**arguments, "module": mixing.module}
        context = rule.as_called(mixing.mixed(lambda: rule.read(given), own)).contiguous()
        context = gated_by(context, gate).to(arguments[rule.values].dtype)
        if rule.returns_state and not rest:
            rest = [None]
        return (context, *rest) if rest else context

    return call


def _projected(running: "Sequence[_Mixing]") -> State:
    """Note the projection of the layer of lightning attention that runs."""

    def note(projected: Tensor) -> None:
        running[-1].projected = projected

    return note


def _mixed(running: "Sequence[_Mixing]") -> State:
    """See what the layer of lightning attention that runs has mixed."""

    def change(whole: Tensor) -> Tensor:
        mixing = running[-1]

        def read() -> Recurrence:
            return lightning(mixing.module, mixing.projected, mixing.attention_mask)

        def own(v: Tensor | None) -> Tensor:
            if v is not None:
                return with_values(read(), v).context()
            heads = mixing.heads
            return whole.view(*whole.shape[:2], heads, -1).transpose(1, 2)

        context = mixing.mixed(read, own)
        return context.transpose(1, 2).reshape(whole.shape).to(whole.dtype)

    return change


class _Mixing:
    """One run of a module."""

    projected: Tensor
    """The projection of lightning attention."""

    def __init__(
        self, module: nn.Module, layer: LayerKey, attention_pass: AttentionPass, attention_mask: Tensor | None,
        state_widths: dict[nn.Module, int],
    ) -> None:  # fmt: skip
        self.module, self.attention_mask = module, attention_mask
        self._layer, self._pass, self._state_widths = layer, attention_pass, state_widths

    @property
    def heads(self) -> int:
        """The heads of lightning attention."""
        module: Any = self.module
        return int(module.num_attention_heads)

    def mixed(self, read: Callable[[], Mixing], own: Callable[[Tensor | None], Tensor]) -> Tensor:
        """Answer for a mixed output ``[B, H, L, V]``, and return that to go on with.

        ``own`` computes it by the model's code, of other values if these are given.
        """
        attention_pass, task = self._pass, self._pass.task(self._layer)
        if not (task.asks or attention_pass.notes(self._layer)):
            return own(None)
        mixing = read()
        self._state_widths[self.module] = mixing.state_width
        batch, heads, length, width = mixing.v.shape
        layer = SeenLayer(self._layer, Sight("softmax", 0, heads, heads, width, square=True), attention_pass)
        if layer.needs_weights:
            made = mixing.weights()
            weights = layer.weights(made)
        else:
            made = weights = layer.without_weights(mixing.v, (batch, heads, length, length))
        v = layer.values(mixing.v)
        if weights is made:
            return layer.context(own(None if v is mixing.v else v))
        return layer.context(product(weights, v.to(weights.dtype)))
