"""The pasts of several texts as one, so that one pass over a model gives each text its next token.

Keys and values of texts of alike lengths lie in one tensor a layer, a ``TextSlab``: a row a text, with places for the
tokens to come, so that a pass copies none of them. States of recurrent layers stay with their text; a pass joins them
before and writes them back after it. What an encoder made of each text lies beside it, and stays as it is.
Shapes: B texts of the pass, R rows of a slab, H heads, K keys, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from attention_service.models.costs.generation_memory import slab_places
from attention_service.models.generation.decoding.pasts.encoded_layers import EncodedLayer, encoded_layers, unread
from attention_service.models.generation.decoding.pasts.text_pasts import PastPart, encoded_past, own_past
from attention_service.models.generation.decoding.pasts.text_slabs import TextSlab
from attention_transformers.model_layers import UnsupportedModel

_CHUNKED: Final = "chunked_attention"
"""The kind of a layer whose query sees its own chunk of the text alone; its cache is that of a sliding window."""
_STATE_NAMES: Final = "conv_states", "recurrent_states"


@dataclass(eq=False)
class _SlabPass:
    """A slab in one pass."""

    slab: TextSlab
    rows: slice
    index: Tensor
    """The numbers of its rows ``[R]``."""
    ends: Tensor
    """The places of the new tokens ``[R]``."""
    longest: int

    def key_mask(self, reach: "_Reach") -> Tensor | None:
        """Return which keys each text sees."""
        if reach.window is None and len(set(self.slab.counts)) == 1:
            return None
        return reach.seen(self.ends, self.longest)


class _Reach(NamedTuple):
    """The keys that a query of a layer sees."""

    window: int | None
    """The last so many; None for all before."""
    chunked: bool
    """True for those of its own chunk of that size."""

    def seen(self, ends: Tensor, keys: int) -> Tensor:
        """Return which of the first keys the queries at these places ``[R]`` see, bool ``[R, keys]``."""
        own = ends[:, None]
        places = torch.arange(keys, device=ends.device)[None]
        seen_keys = places <= own
        if self.window is None:
            return seen_keys
        return seen_keys & (places >= own // self.window * self.window if self.chunked else places > own - self.window)

    def keys(self, end: int) -> range:
        """Return the keys that the query at a place sees."""
        first = 0
        if self.window is not None:
            first = end // self.window * self.window if self.chunked else max(0, end - self.window + 1)
        return range(first, end + 1)


class JoinedPast(Cache):
    """The pasts of several texts, as a model's pass takes them: one new token for each."""

    def __init__(self, *, direct: bool, kinds: Sequence[str] = ()) -> None:
        """``direct``: the model hands on keys and values as they come, so that its attention reads the slabs.

        ``kinds``: those of the layers, as the config names them.
        """
        super().__init__(layers=[])
        self._kinds = kinds
        self.slabs: list[TextSlab] = []
        self._direct = direct
        self._passes: list[_SlabPass] = []
        self._masks: dict[tuple[int, _Reach], Tensor | None] = {}
        self._returned: dict[int, tuple[Tensor, Tensor, _JoinedAttention | EncodedLayer]] = {}
        self.handed_on = True
        """True as long as every attention got keys and values as they were returned."""
        self.last: _JoinedAttention | None = None
        self.encoded: Cache | None = None
        """Outputs of encoders for the texts, in a pass of a decoder; None without an encoder."""

    # ── the texts ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def texts(self) -> list[DynamicCache]:
        """The pasts, in the order of the rows of a pass."""
        return [text for slab in self.slabs for text in slab.texts]

    @property
    def lengths(self) -> list[int]:
        """The tokens of each."""
        return [count for slab in self.slabs for count in slab.counts]

    @property
    def argument(self) -> Cache:
        """The past as the model takes it."""
        return self if self.encoded is None else EncoderDecoderCache(self, self.encoded)

    def add(self, past: Any, tokens: int) -> None:
        """Take in a past of so many tokens."""
        text, encoded, places = own_past(past), encoded_past(past), slab_places(tokens)
        behind = None if encoded is None else slab_places(encoded.get_seq_length() - 1)
        slab = next((slab for slab in self.slabs if (slab.places, slab.encoded_places) == (places, behind)), None)
        if slab is not None:
            slab.add(text, tokens, encoded)
            return
        slab = TextSlab(places, behind)
        slab.add(text, tokens, encoded)
        self.slabs = sorted([*self.slabs, slab], key=lambda slab: (slab.places, slab.encoded_places or 0))

    def remove(self, past: Any, *, give_back: bool) -> None:
        """Let a past go; ``give_back``: with its keys and values. Raises what the copy of them does."""
        text = own_past(past)
        try:
            for slab in self.slabs:
                if text in slab.texts:
                    slab.remove(text, give_back=give_back)
        finally:
            self.slabs = [slab for slab in self.slabs if slab.texts]
            self.layers = []
            self._passes.clear()
            self._masks.clear()
            self._returned.clear()
            self.last = self.encoded = None

    # ── a pass ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, device: torch.device) -> None:
        """Begin a pass over all texts."""
        self._passes, start = [], 0
        self._masks.clear()
        self._returned.clear()
        for slab in self.slabs:
            count = len(slab.texts)
            index, ends = torch.arange(count, device=device), torch.tensor(slab.counts, device=device)
            self._passes.append(_SlabPass(slab, slice(start, start + count), index, ends, max(slab.counts) + 1))
            start += count
        texts = self.texts
        self.layers = [
            _joined_layer(self, number, layers)
            for number, layers in enumerate(zip(*(t.layers for t in texts), strict=True))
        ]
        behind = [
            (slab_pass.slab.encoded, slab_pass.rows) for slab_pass in self._passes if slab_pass.slab.encoded is not None
        ]
        self.encoded = Cache(layers=encoded_layers(behind)) if behind else None
        for layer in () if self.encoded is None else self.encoded.layers:
            if isinstance(layer, EncodedLayer):
                self._returned[id(layer.given[0])] = *layer.given, layer

    def end(self) -> list[DynamicCache]:
        """Keep what the pass has added; without it, the next pass writes over that.

        Returns the pasts whose slab has no place for another token: they are to leave.
        """
        for layer in self.layers:
            if isinstance(layer, _JoinedStates):
                layer.write_back()
        full = []
        for slab in self.slabs:
            slab.counts = [count + 1 for count in slab.counts]
            full += [text for text, count in zip(slab.texts, slab.counts, strict=True) if count >= slab.places]
        return full

    def parts(self, key: Tensor, value: Tensor) -> list[PastPart]:
        """The keys and values that a call of the attention function is over, which was given these."""
        _, returned, layer = self._returned.get(id(key), (None, None, self.last))
        if isinstance(layer, EncodedLayer):
            return layer.parts
        if returned is not value:
            self.handed_on = False
        elif (self._direct or self.encoded is not None) and layer is not None:
            return layer.parts()
        expected = len(self.lengths), max(self.lengths) + 1
        if layer is None or self.encoded is not None or (len(key), key.shape[2]) != expected:
            raise UnsupportedModel(f"its attention gets keys {list(key.shape)} that are not those of its past")
        seen = [layer.reach.keys(count) for count in self.lengths]
        return [PastPart(slice(0, len(key)), key, value, layer.padded_mask(), seen)]

    def _mask(self, slab_pass: _SlabPass, reach: _Reach) -> Tensor | None:
        place = (id(slab_pass), reach)
        if place not in self._masks:
            self._masks[place] = slab_pass.key_mask(reach)
        return self._masks[place]


class _JoinedAttention(CacheLayerMixin):  # type: ignore[no-untyped-call]  # of ``__init_subclass__``
    """One layer's keys and values of all texts of a pass."""

    def __init__(self, past: JoinedPast, number: int, layers: Sequence[Any]) -> None:
        self.past, self.number, self.own = past, number, layers
        self.is_sliding = bool(layers[0].is_sliding)
        chunked = number < len(past._kinds) and past._kinds[number] == _CHUNKED
        self.reach = _Reach(int(layers[0].sliding_window) if self.is_sliding else None, chunked)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the texts have their prompts."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put the keys and values ``[B, H, 1, D]`` of the new tokens in place, and return those of all tokens."""
        past = self.past
        for slab_pass in past._passes:
            for own, new in zip(slab_pass.slab.tensors(self.number), (key_states, value_states), strict=True):
                own[slab_pass.index, :, slab_pass.ends] = new[slab_pass.rows, :, 0]
        past.last = self
        if past.encoded is not None:
            longest = self.get_seq_length() + 1
            key_states, value_states = (unread(x, len(x), longest) for x in (key_states, value_states))
        elif not past._direct:
            key_states, value_states = self._padded()
        past._returned[id(key_states)] = key_states, value_states, self
        return key_states, value_states

    def parts(self) -> list[PastPart]:
        """The keys and values by slabs."""
        parts = []
        for slab_pass in self.past._passes:
            key, value = (
                x[: len(slab_pass.index), :, : slab_pass.longest] for x in slab_pass.slab.tensors(self.number)
            )
            seen = [self.reach.keys(count) for count in slab_pass.slab.counts]
            parts.append(PastPart(slab_pass.rows, key, value, self.past._mask(slab_pass, self.reach), seen))
        return parts

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all texts, filled up to the longest."""
        parts = self.parts()
        longest = max(past_part.key.shape[2] for past_part in parts)
        key, value = (
            torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in tensors])
            for tensors in ([part.key for part in parts], [part.value for part in parts])
        )
        return key, value

    def padded_mask(self) -> Tensor:
        """The padded keys that each text sees, bool ``[B, K]``."""
        ends = torch.cat([slab_pass.ends for slab_pass in self.past._passes])
        return self.reach.seen(ends, max(self.past.lengths) + 1)

    def get_seq_length(self) -> int:
        """The tokens of the longest text."""
        return max(self.past.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The keys that a mask would be over; there is none."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class _JoinedStates(LinearAttentionLayer):
    """The recurrent states of all texts of a pass in one layer."""

    def __init__(self, past: JoinedPast, number: int, layers: Sequence[Any]) -> None:
        super().__init__(layers[0].number_of_states)
        self.past, self.number, self.own = past, number, layers
        first = layers[0]
        self.device, self.dtype, self.conv_kernel_size = first.device, first.dtype, dict(first.conv_kernel_size)
        self.has_previous_state = dict(first.has_previous_state)
        self.is_conv_states_initialized = dict(first.is_conv_states_initialized)
        self.is_recurrent_states_initialized = dict(first.is_recurrent_states_initialized)
        for name in _STATE_NAMES:
            for at, state in getattr(first, name).items():
                if state is not None:
                    getattr(self, name)[at] = torch.cat([getattr(layer, name)[at] for layer in layers])

    def write_back(self) -> None:
        """Give each text its states."""
        for name in _STATE_NAMES:
            for at, state in getattr(self, name).items():
                if state is not None:
                    for row, layer in enumerate(self.own):
                        getattr(layer, name)[at] = state[row : row + 1].clone()


class _JoinedBoth(_JoinedStates, _JoinedAttention):  # type: ignore[no-untyped-call, override]
    """A layer with keys and values, and recurrent states."""

    is_compileable = False

    def __init__(self, past: JoinedPast, number: int, layers: Sequence[Any]) -> None:
        _JoinedStates.__init__(self, past, number, layers)
        _JoinedAttention.__init__(self, past, number, layers)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize states alone."""
        _JoinedStates.lazy_initialization(self, *args, **kwargs)


def _joined_layer(past: JoinedPast, number: int, layers: Sequence[Any]) -> Any:
    if isinstance(layers[0], DummyLayer):
        return layers[0]
    attends, states = isinstance(layers[0], CacheLayerMixin), isinstance(layers[0], LinearAttentionCacheLayerMixin)
    kind = _JoinedBoth if attends and states else _JoinedStates if states else _JoinedAttention
    return kind(past, number, layers)
