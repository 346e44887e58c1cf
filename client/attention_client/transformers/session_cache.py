"""``SessionCache``: a cache of ``transformers`` whose keys and values stay on the server."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from attention_client import Client
from attention_client.calls.session_calls import KEEP_BYTES, Sessions
from attention_client.streams.step_stream import StepStream
from attention_client.transformers.identity_modules import IdentityModules, RawAttention
from attention_client.transformers.interface import connect
from attention_client.transformers.session_layer import Past, SessionLayer, padded
from attention_contract.errors import AttentionError, InvalidRequest
from attention_transformers.model_layers import UnsupportedModel
from attention_transformers.model_masks import MASK_FUNCTION

_WINDOWS = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}
"""The types of layers that sessions hold; True for those whose masks are windows."""


class SessionCache(Cache):
    """A cache whose layers are decode sessions: ``model.generate(…, past_key_values=SessionCache(model, client))``.

    The model must be attached. A step of a layer then sends the queries, keys and values of the new tokens alone. Each
    layer has a session, of a module in the server's memory that takes them as they are. ``close``, or the end of a
    ``with`` block, ends the sessions and deletes the modules. Use a cache in one thread at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client,
        *,
        layers: Sequence[int] | None = None,
        keep_bytes: int = KEEP_BYTES,
        stream: bool = False,
        **opening: Any,
    ) -> None:
        """``layers``: those of ``attach``; the others keep their tensors here. ``opening``: fields of sessions.open.

        ``stream`` sends the steps as messages of one connection, which has the lowest latency.
        After the server has lost a session, it is computed again from up to ``keep_bytes`` of inputs of each layer.
        Raises InvalidRequest for layers that the model does not have, and TypeError for a client that is not a
        blocking one.
        """
        connect(client)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
        self._config = model.config.get_text_config(decoder=True)
        self._client = client
        self._modules = IdentityModules(client)
        self._sessions = Sessions(self._modules)
        self._opening: dict[str, Any] = {"keep_bytes": keep_bytes, **opening}
        self.stream: StepStream | None = self._sessions.stream() if stream else None
        types, kwargs = get_layer_types_and_kwargs(self._config)
        if unknown := set(layers or ()) - set(range(len(types))):
            raise InvalidRequest.at("layers", f"expected numbers below {len(types)}; got {sorted(unknown, key=str)}")
        chosen = range(len(types)) if layers is None else layers
        super().__init__(
            layers=[
                self._layer(kind, several, remote=number in chosen)
                for number, (kind, several) in enumerate(zip(types, kwargs, strict=True))
            ]
        )

    def _layer(self, kind: str, options: dict[str, Any], *, remote: bool) -> Any:
        if kind not in _WINDOWS:
            return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)
        if remote:
            window = options["sliding_window"] if kind == "sliding_attention" else None
            return SessionLayer(self, window, sliding=_WINDOWS[kind])
        layer: Any = DynamicLayer()  # type: ignore[no-untyped-call]
        # All layers of a kind share one mask, so that this one holds all keys, too.
        layer.is_sliding = _WINDOWS[kind]
        return layer

    # ── pasts from elsewhere ─────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, model: PreTrainedModel, client: Client, **options: Any) -> Self:
        """Return a cache that begins with the keys and values of another one. They travel with the next pass.

        A layer that a sliding window has cut begins with what the window left. Raises TypeError for another cache.
        """
        if not isinstance(cache, DynamicCache):
            raise TypeError(f"cache: expected a DynamicCache, got {type(cache).__name__}")
        made = cls(model, client, **options)
        theirs: Any
        for number, (ours, theirs) in enumerate(zip(made.layers, cache.layers, strict=False)):
            if not isinstance(ours, SessionLayer) and type(ours) is not DynamicLayer:
                made.layers[number] = copy.deepcopy(theirs)
            elif theirs.get_seq_length():
                missing = theirs.get_seq_length() - theirs.keys.shape[2]
                past = padded(theirs.keys, missing), padded(theirs.values, missing)
                if isinstance(ours, SessionLayer):
                    ours.begin(past, cut=missing > 0)
                else:
                    ours.update(*past)
        return made

    def to_dynamic(self) -> DynamicCache:
        """Return a DynamicCache of the same keys and values, which are fetched from the server."""
        made = DynamicCache(config=self._config)
        pasts = self._apply(self.layers, _past_of)
        for number, (ours, theirs, past) in enumerate(zip(self.layers, made.layers, pasts, strict=True)):
            if past is not None and isinstance(theirs, CacheLayerMixin):
                theirs.update(*past)  # a sliding window cuts them
            elif type(ours) is not DynamicLayer and not isinstance(ours, SessionLayer):
                made.layers[number] = copy.deepcopy(ours)
        return made

    def fork(self) -> "SessionCache":
        """Return a copy, whose sessions share the server's memory with those of this cache."""
        made: SessionCache = copy.copy(self)
        made.layers = [
            SessionLayer(made, layer.window, sliding=layer.is_sliding)
            if isinstance(layer, SessionLayer)
            else copy.deepcopy(layer)
            for layer in self.layers
        ]
        made.stream = None if self.stream is None else self._sessions.stream()
        sources = dict(zip(made._session_layers, self._session_layers, strict=True))
        made._apply(list(sources), lambda layer: layer.copy_of(sources[layer]))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "SessionCache":
        return self.fork()

    # ── changes of all layers ────────────────────────────────────────────────────────────────────────────────────────

    def reset(self) -> None:
        """Forget everything and end the sessions."""
        self._apply(self.layers, lambda layer: layer.reset())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b continue what ``beam_idx[b]`` was, as beam search does."""
        self._apply(self.layers, lambda layer: layer.reorder_cache(beam_idx))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, as assisted decoding does."""
        self._apply(self.layers, lambda layer: layer.crop(tokens_to_remove))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence ``repeats`` times."""
        self._apply(self.layers, lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self._apply(self.layers, lambda layer: layer.batch_select_indices(indices))

    def close(self) -> None:
        """End the sessions, and delete the modules that were made for them."""
        self.reset()
        if self.stream is not None:
            self.stream.close()
        self._modules.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        try:
            self.close()
        except AttentionError:
            if fault is None:
                raise

    # ── what layers ask of their cache ───────────────────────────────────────────────────────────────────────────────

    def open(self, layer: SessionLayer, raw: RawAttention, sinks: Tensor | None, sequences: int) -> None:
        """Open the session of a layer. Layers of the same window most likely have the same attention: open theirs too.

        Sinks differ from layer to layer, and so do the modules.
        """
        name = self._modules.name(raw, sinks)
        alike = [layer]
        if sinks is None:
            others = (other for other in self._session_layers if other.session is None and other.window == layer.window)
            alike += [other for other in others if other is not layer]

        def begin(layer: SessionLayer) -> None:
            key, value = layer.past or (None, None)
            layer.session = self._sessions.open(
                name, sequences=sequences, past_key=key, past_value=value, **self._opening
            )
            layer.raw = raw

        self._apply(alike, begin)

    def roll_back(self, length: int) -> None:
        """Truncate every layer to a length, after a pass that failed in the middle."""
        for layer in self.layers:
            if type(layer) is DynamicLayer:
                layer.crop(min(length - layer.get_seq_length(), 0))
        self._apply(self._session_layers, lambda layer: layer.truncate(length))

    def check_attached(self) -> None:
        """Raise UnsupportedModel unless the model's attention runs on the service."""
        implementation = self._config._attn_implementation
        if ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is not MASK_FUNCTION:
            raise UnsupportedModel.at(
                "past_key_values",
                "a SessionCache needs a model whose attention runs on the service, and this one's is "
                f"{implementation!r}; call it within `with attach(model, client):`",
            )

    @property
    def _session_layers(self) -> list[SessionLayer]:
        return [layer for layer in self.layers if isinstance(layer, SessionLayer)]

    def _apply(self, layers: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
        """Change layers, several at once: their sessions are independent. ``change`` takes a ``layer``."""
        return self._client.map(change, [{"layer": layer} for layer in layers])


def _past_of(layer: Any) -> Past | None:
    """All keys and values of a layer of keys and values; None of an empty layer, and of one that holds other things."""
    if isinstance(layer, SessionLayer):
        return layer.fetch()
    plain = type(layer) is DynamicLayer and layer.get_seq_length()
    return (layer.keys, layer.values) if plain else None
