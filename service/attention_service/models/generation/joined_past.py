"""The pasts of several texts as one, so that one pass over a model gives each text its next token.

Keys and values of texts of alike lengths lie in one tensor a layer, a ``Slab``: a row a text, with places for the
tokens to come, so that a pass copies none of them. States of recurrent layers stay with their text; a pass joins them
before and writes them back after it. Shapes: B texts of the pass, R rows of a slab, H heads, K keys, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from attention_transformers.model_layers import UnsupportedModel

_LEAST: Final = 64
"""Tokens that the smallest slab has places for; each larger one has twice as many."""
_ATTENDS: Final = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The layers of transformers whose keys and values a slab takes."""
_STATES: Final = "conv_states", "recurrent_states"


def unjoinable(past: object) -> str | None:
    """Return why a text's past cannot be joined with others; None if it can."""
    if type(past) is not DynamicCache:
        return f"it keeps its past in a {type(past).__name__}"
    others = {type(each) for each in past.layers} - {*_ATTENDS, LinearAttentionLayer}
    return f"it keeps a {min(each.__name__ for each in others)}" if others else None


@dataclass(eq=False)
class Part:
    """Texts of a pass whose keys and values lie in one tensor."""

    rows: slice
    """Their places in the pass."""
    key: Tensor
    """``[R, H, K, D]``"""
    value: Tensor
    key_mask: Tensor | None
    """Bool ``[R, K]``, True for a key that the text's query sees; None if it sees all."""


class Slab:
    """The keys and values of texts that have at most ``places`` tokens."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.texts: list[DynamicCache] = []
        self.counts: list[int] = []
        """The tokens of each text."""
        self._tensors: dict[int, list[Tensor]] = {}
        """Keys and values ``[rows, H, places, D]`` by layer; more rows than texts."""

    def add(self, text: DynamicCache, tokens: int) -> None:
        """Take over the keys and values of a text."""
        row = len(self.texts)
        for number, layer in enumerate(text.layers):
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
                held = [layer.keys, layer.values]
                own = self._tensors.setdefault(number, [])
                for at, x in enumerate(held):
                    if row == 0:
                        own.append(x.new_zeros((2, x.shape[1], self.places, x.shape[3])))
                    elif row == len(own[at]):
                        own[at] = torch.cat([own[at], torch.zeros_like(own[at])])
                    start = min(tokens, self.places) - x.shape[2]
                    own[at][row, :, start : start + x.shape[2]] = x[0]
                layer.keys = layer.values = layer.keys[:, :, :0]
        self.texts.append(text)
        self.counts.append(tokens)

    def remove(self, text: DynamicCache, *, give_back: bool) -> None:
        """Let a text go; ``give_back``: with its keys and values, as it goes on elsewhere."""
        row, last = self.texts.index(text), len(self.texts) - 1
        for number, own in self._tensors.items():
            layer: Any = text.layers[number]
            if give_back:
                count = self.counts[row]
                kept = count if not layer.is_sliding else min(count, layer.sliding_window - 1)
                layer.keys, layer.values = (x[row : row + 1, :, count - kept : count].clone() for x in own)
                if layer.is_sliding:
                    layer.cumulative_length = count
            if row != last:
                for x in own:
                    x[row] = x[last]
        self.texts[row], self.counts[row] = self.texts[last], self.counts[last]
        self.texts.pop()
        self.counts.pop()
        if not self.texts:
            self._tensors.clear()

    def tensors(self, layer: int) -> list[Tensor]:
        """The keys and values of a layer, ``[rows, H, places, D]``."""
        return self._tensors[layer]


@dataclass(eq=False)
class _SlabPass:
    """A slab in one pass."""

    slab: Slab
    rows: slice
    index: Tensor
    """The numbers of its rows ``[R]``."""
    ends: Tensor
    """The places of the new tokens ``[R]``."""
    longest: int

    def key_mask(self, window: int | None) -> Tensor | None:
        """Return which keys each text sees."""
        if window is None and len(set(self.slab.counts)) == 1:
            return None
        places = torch.arange(self.longest, device=self.ends.device)[None]
        seen = places <= self.ends[:, None]
        return seen if window is None else seen & (places > (self.ends - window)[:, None])


class JoinedPast(Cache):
    """The pasts of several texts, as a model's pass takes them: one new token for each."""

    def __init__(self, *, direct: bool) -> None:
        """``direct``: the model hands on keys and values as they come, so that its attention reads the slabs."""
        super().__init__(layers=[])
        self.slabs: list[Slab] = []
        self._direct = direct
        self._passes: list[_SlabPass] = []
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._returned: dict[int, tuple[Tensor, _JoinedAttention]] = {}
        self.handed_on = True
        """True as long as every attention got keys as they were returned."""
        self.last: _JoinedAttention | None = None

    # ── the texts ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def texts(self) -> list[DynamicCache]:
        """The pasts, in the order of the rows of a pass."""
        return [text for slab in self.slabs for text in slab.texts]

    @property
    def lengths(self) -> list[int]:
        """The tokens of each."""
        return [count for slab in self.slabs for count in slab.counts]

    def add(self, text: DynamicCache, tokens: int) -> None:
        """Take in a past of so many tokens."""
        places = _LEAST
        while places <= tokens:
            places *= 2
        slab = next((each for each in self.slabs if each.places == places), None)
        if slab is None:
            slab = Slab(places)
            self.slabs = sorted([*self.slabs, slab], key=lambda each: each.places)
        slab.add(text, tokens)

    def remove(self, text: DynamicCache, *, give_back: bool) -> None:
        """Let a past go; ``give_back``: with its keys and values."""
        for slab in self.slabs:
            if text in slab.texts:
                slab.remove(text, give_back=give_back)
        self.slabs = [each for each in self.slabs if each.texts]

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

    def end(self) -> None:
        """Keep what the pass has added; without it, the next pass writes over that."""
        for layer in self.layers:
            if isinstance(layer, _JoinedStates):
                layer.write_back()
        full = []
        for slab in self.slabs:
            slab.counts = [count + 1 for count in slab.counts]
            full += [(text, count) for text, count in zip(slab.texts, slab.counts, strict=True) if count >= slab.places]
        for text, count in full:
            self.remove(text, give_back=True)
            self.add(text, count)

    def parts(self, key: Tensor, value: Tensor) -> list[Part]:
        """The keys and values that a call of the attention function is over, which was given these."""
        _, layer = self._returned.get(id(key), (None, None))
        if layer is not None and self._direct:
            return layer.parts()
        if layer is None:
            self.handed_on = False
            layer = self.last
        if layer is None or len(key) != len(self.lengths) or key.shape[2] != max(self.lengths) + 1:
            raise UnsupportedModel(f"its attention gets keys {list(key.shape)} that are not those of its past")
        return [Part(slice(0, len(key)), key, value, layer.padded_mask())]

    def _mask(self, each: _SlabPass, window: int | None) -> Tensor | None:
        place = (id(each), window)
        if place not in self._masks:
            self._masks[place] = each.key_mask(window)
        return self._masks[place]


class _JoinedAttention(CacheLayerMixin):  # type: ignore[no-untyped-call]  # of ``__init_subclass__``
    """One layer's keys and values of all texts of a pass."""

    def __init__(self, past: JoinedPast, number: int, layers: Sequence[Any]) -> None:
        self.past, self.number, self.own = past, number, layers
        self.is_sliding = bool(layers[0].is_sliding)
        self.window = int(layers[0].sliding_window) if self.is_sliding else None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the texts have their prompts."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put the keys and values ``[B, H, 1, D]`` of the new tokens in place, and return those of all tokens."""
        past = self.past
        for each in past._passes:
            for own, new in zip(each.slab.tensors(self.number), (key_states, value_states), strict=True):
                own[each.index, :, each.ends] = new[each.rows, :, 0]
        past.last = self
        if not past._direct:
            key_states, value_states = self._padded()
        past._returned[id(key_states)] = key_states, self
        return key_states, value_states

    def parts(self) -> list[Part]:
        """The keys and values by slabs."""
        found = []
        for each in self.past._passes:
            key, value = (x[: len(each.index), :, : each.longest] for x in each.slab.tensors(self.number))
            found.append(Part(each.rows, key, value, self.past._mask(each, self.window)))
        return found

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all texts, filled up to the longest."""
        parts = self.parts()
        longest = max(each.key.shape[2] for each in parts)
        key, value = (
            torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in each])
            for each in ([part.key for part in parts], [part.value for part in parts])
        )
        return key, value

    def padded_mask(self) -> Tensor:
        """Which of the padded keys each text sees, bool ``[B, K]``."""
        lengths = torch.tensor(self.past.lengths, device=self.past._passes[0].ends.device)[:, None]
        places = torch.arange(max(self.past.lengths) + 1, device=lengths.device)[None]
        seen = places <= lengths
        return seen if self.window is None else seen & (places > lengths - self.window)

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
        for name in _STATES:
            for at, state in getattr(first, name).items():
                if state is not None:
                    getattr(self, name)[at] = torch.cat([getattr(each, name)[at] for each in layers])

    def write_back(self) -> None:
        """Give each text its states."""
        for name in _STATES:
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
    attends, states = isinstance(layers[0], CacheLayerMixin), isinstance(layers[0], LinearAttentionCacheLayerMixin)
    kind = _JoinedBoth if attends and states else _JoinedStates if states else _JoinedAttention
    return kind(past, number, layers)
