"""``attach``: a model whose attention runs on the service, is recorded there and edited there."""

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, get_args

from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_client import Client
from attention_client.arguments import EditLike
from attention_client.array_likes import as_array, plain
from attention_client.torch.connection import Connection
from attention_client.transformers.interface import attend, connect
from attention_client.transformers.local_attention import AttentionFunction, local_attention
from attention_client.transformers.session_layer import new_tokens
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit, Tap
from attention_contract.tensors import Array
from attention_contract.validation import validate
from attention_transformers.model_layers import (
    AttentionModule,
    LayerKey,
    UnsupportedModel,
    attention_modules,
    own_attentions,
    type_names,
)
from attention_transformers.model_masks import MASK_FUNCTION, uncompiled
from attention_transformers.registration import forget_function, register_function

Taps = dict[str, NDArray[Any]]


def attach(
    model: PreTrainedModel,
    client: Client,
    *,
    layers: Sequence[LayerKey] | None = None,
    record: Sequence[Tap] = (),
    edits: Mapping[LayerKey, Sequence[EditLike]] | None = None,
) -> "Attached":
    """Run the attention of a model on the service until ``detach``, or until the block ends.

    ``layers`` are those that run there; the others keep the model's former implementation. By default all run there.
    ``record`` names the taps that ``Attached.recorded`` keeps: q, k, v, scores, capped_scores, masked_scores, weights,
    context. ``edits`` are interventions by layer, such as ``{3: [{"tap": "weights", "heads": [0], "set": 0}]}``.
    A layer is a number, or ``"encoder.3"``, ``"decoder.3"`` and ``"cross.3"`` in a model of several stacks:
    ``Attached.layers`` lists them. Everything else of the model stays the same: caches, generation, gradients.

    Raises UnsupportedModel for a model that does not use the attention interface of transformers, and InvalidRequest
    for layers, taps and edits that do not exist. Warns of attentions of the model that do not use it and stay local.
    The model's calls raise the client's errors.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    return Attached(model, connect(client), layers, record, edits or {})


class Attached:
    """A model whose attention runs on the service. ``attach`` makes it; threads may call the model."""

    layers: tuple[LayerKey, ...]
    """The layers that run on the service, in the model's order."""
    recorded: dict[LayerKey, Taps]
    """The taps of ``record`` by layer, with their batch dimension, of the last forward pass.

    A layer that a pass does not run keeps its arrays: in generation those of an encoder stay while the decoder steps.
    Of a vision layer that attends to windows one after another, these are the taps of its last window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        connection: Connection,
        layers: Sequence[LayerKey] | None,
        record: Sequence[Tap],
        edits: Mapping[LayerKey, Sequence[EditLike]],
    ) -> None:
        modules = attention_modules(model)
        self._connection = connection
        self._record = _checked_taps(record)
        self.layers = _chosen([key for module in modules for key in module.keys], layers)
        self._edits = _checked_edits(edits, self.layers)
        self.recorded = {}
        self._passes = threading.local()
        self._lock = threading.Lock()
        self._modules = {id(one.module): one for one in modules}
        chosen = set(self.layers)
        self._local: dict[int, AttentionFunction] = {
            id(one.module): local_attention(one.module, one.implementation)
            for one in modules
            if not chosen.issuperset(one.keys)
        }
        with ExitStack() as undo:
            undo.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            undo.callback(model.register_forward_hook(self._end, always_call=True).remove)
            self._name = undo.enter_context(attending_by(model, self._attend))
            self._check(model, modules)
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Give the model its former attention back. ``recorded`` stays. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of the model is then told to be attached itself

    def _check(self, model: PreTrainedModel, modules: Sequence[AttentionModule]) -> None:
        refused = {type(one.module).__name__ for one in modules if one.implementation != self._name}
        if refused:
            raise UnsupportedModel(
                f"{type(model).__name__} does not let its attention implementation be changed in {sorted(refused)}; "
                "load it with attn_implementation=register(client)",
                param="model",
            )
        own = type_names(own_attentions(model))
        if own:
            warnings.warn(
                f"{type(model).__name__} computes these attentions itself, and they stay local: {', '.join(own)}",
                stacklevel=4,
            )

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = self._layer(module)
        if layer not in self.layers:
            if new_tokens(key) is not None:
                raise UnsupportedModel.at(
                    "past_key_values",
                    f"the keys of layer {layer} are in a session, and its attention is local; give the cache the "
                    f"layers of attach: SessionCache(model, client, layers={list(self.layers)})",
                )
            return self._local[id(module)](module, query, key, value, attention_mask, *args, **options)
        if getattr(self._passes, "output_attentions", False):  # not every model hands it on
            options["output_attentions"] = True
        output, taps = attend(
            self._connection, module, query, key, value, attention_mask,
            edits=self._edits.get(layer, ()), record=self._record, **options,
        )  # fmt: skip
        if self._record:
            self._keep(layer, {tap: as_array(taps[tap]) for tap in self._record})
        return output, taps.get("weights")

    def _layer(self, module: nn.Module) -> LayerKey:
        one = self._modules.get(id(module))
        if one is None:
            raise UnsupportedModel(
                f"this {type(module).__name__} is not of the model that was attached; attach its copy too, or detach "
                "before you copy a model",
                param="model",
            )
        if len(one.keys) == 1:
            return one.keys[0]
        calls: dict[str, int] = getattr(self._passes, "calls", {})
        number = calls[one.path] = calls.get(one.path, -1) + 1
        return one.keys[number % len(one.keys)]

    def _begin(self, _module: nn.Module, _inputs: Any, options: Mapping[str, Any]) -> None:
        self._passes.taps, self._passes.calls = {}, {}
        self._passes.output_attentions = bool(options.get("output_attentions"))

    def _end(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        taps, self._passes.taps, self._passes.output_attentions = self._passes.taps, None, False
        if output is not None:  # None after an error
            self._publish(taps)

    def _keep(self, layer: LayerKey, taps: Taps) -> None:
        """Keep the taps of one layer until the pass of its thread ends; without a pass, publish them at once."""
        current = getattr(self._passes, "taps", None)
        if current is None:
            self._publish({layer: taps})
        else:
            current[layer] = taps

    def _publish(self, taps: dict[LayerKey, Taps]) -> None:
        with self._lock:
            recorded = self.recorded | taps
            self.recorded = {layer: recorded[layer] for layer in self.layers if layer in recorded}


@contextmanager
def attending_by(model: PreTrainedModel, function: AttentionFunction) -> Iterator[str]:
    """Let a model attend by a function until the block ends. The value is the name of this implementation."""
    former = _implementations(model)
    name = register_function(uncompiled(function), MASK_FUNCTION)
    try:
        model.set_attn_implementation(name)
        yield name
    finally:
        for config, implementation in former:
            config._attn_implementation = implementation
        forget_function(name)


def _implementations(model: nn.Module) -> list[tuple[Any, str]]:
    """Return the configs of a model with their attention implementations, parents before children."""
    implementations: dict[int, tuple[Any, str]] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in implementations or not hasattr(config, "_attn_implementation"):
            return
        implementations[id(config)] = (config, config._attn_implementation)
        for name in config.sub_configs:
            visit(getattr(config, name, None))

    for module in model.modules():
        visit(getattr(module, "config", None))
    return list(implementations.values())


def _chosen(existing: Sequence[LayerKey], layers: Sequence[LayerKey] | None) -> tuple[LayerKey, ...]:
    if layers is None:
        return tuple(existing)
    _refuse_unknown("layers", layers, existing)
    return tuple(key for key in existing if key in set(layers))


def _checked_taps(record: Sequence[Tap]) -> tuple[Tap, ...]:
    known = [tap for tap in get_args(Tap) if tap not in {"lse", "output"}]
    unknown = [record] if isinstance(record, str) else [tap for tap in record if tap not in known]
    if unknown:
        raise InvalidRequest.at("record", f"expected a list of {', '.join(known)}; got {unknown}")
    return tuple(dict.fromkeys(record))


def _checked_edits(
    edits: Mapping[LayerKey, Sequence[EditLike]], layers: Sequence[LayerKey]
) -> dict[LayerKey, tuple[Edit, ...]]:
    _refuse_unknown("edits", edits, layers)
    return {layer: tuple(validate(Edit, plain(edit)) for edit in several) for layer, several in edits.items()}


def _refuse_unknown(param: str, layers: Iterable[LayerKey], existing: Sequence[LayerKey]) -> None:
    unknown = [layer for layer in layers if layer not in existing]
    if unknown:
        raise InvalidRequest.at(param, f"expected layers among {list(existing)}; got {unknown}")


@contextmanager
def local_taps(model: PreTrainedModel) -> Iterator[dict[LayerKey, dict[str, Array]]]:
    """Yield a dict that each pass fills with q, k, v, weights and context by layer, with their batch dimension.

    The model attends by its own eager functions until the block ends. Raises UnsupportedModel for a model that does not
    use the attention interface of transformers.
    """
    modules = attention_modules(model)
    taps: dict[LayerKey, dict[str, Array]] = {}
    keys = {id(one.module): one.keys for one in modules}
    functions = {id(one.module): local_attention(one.module, "eager") for one in modules}
    calls: dict[int, int] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        place = id(module)
        calls[place] = calls.get(place, -1) + 1
        layer = keys[place][calls[place] % len(keys[place])]
        output, weights = functions[place](module, query, key, value, mask, *args, **options)
        tensors = {"q": query, "k": key, "v": value, "weights": weights, "context": output.transpose(1, 2)}
        taps[layer] = {tap: as_array(tensor) for tap, tensor in tensors.items() if tensor is not None}
        return output, weights

    with attending_by(model, attend):
        yield taps
