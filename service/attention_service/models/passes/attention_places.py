"""The attentions of a model: where each stands, which tokens it is over, and its sizes, seen in a short run."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_contract.schemas.models import KeysOf, LayerKind
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core.inspection.statistics import statistics_of
from attention_service.core.problem import Widths
from attention_service.core.tensors import torch_dtype_name
from attention_service.models.passes.attention_pass import AttentionPass, widths_of
from attention_service.models.passes.layer_keys import Compression, LayerWindows
from attention_service.models.passes.module_hooks import State, after, turned, with_channels_last
from attention_service.models.passes.module_taps import (
    CHOSEN,
    CHOSEN_SHARE,
    GATE,
    MODULE_TAPS,
    NOTHING_BESIDE,
    ModuleTaps,
)
from attention_service.models.passes.unrun_models import NOT_RUNNING, does_not_run
from attention_service.models.passes.ways import AttentionWay
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.planning.blank_requests import raw_request
from attention_service.runtime.planning.request_sizes import RequestSizes
from attention_transformers.function_calls import RawAttentionInputs
from attention_transformers.model_layers import AttentionModule, LayerKey, layer_path

TEXT, TARGET = 5, 3
"""Tokens of the short run: of the text, and of the target of a model with an encoder and a decoder."""
_LAYER_NAME: Final = re.compile(r"\d{1,4}|[a-z_]{1,32}\.\d{1,4}")
_UNNUMBERED: Final = "attention."
"""The beginning of the keys of attentions that transformers does not number by one list of layers."""
VISION: Final = "vision"
"""The stack of the layers that see images, in a model that reads text too."""
AUDIO: Final = "audio"
"""The stack of the layers that hear sounds, in a model that reads text too."""
MEDIA: Final = frozenset({VISION, AUDIO})
TokensOf = Literal["text", "target", "media", "target and text"] | None
"""The tokens that queries or keys stand for; None for others."""
BOTH: Final = "target and text"
_AROUND: Final = frozenset({"output", "hidden"})
"""The states around an attention."""
NO_LAYER: Final = "it is no part of a layer whose states are seen, so hidden and mlp of a layer are not told"
"""The reason for which an attention that is in no layer has no states of one."""


@dataclass(frozen=True, eq=False)
class AttentionPlace:
    """One attention of a model."""

    key: LayerKey
    module: nn.Module
    """The module that attends: what it returns is the tap ``output``."""
    layer: nn.Module
    """The layer that it belongs to: what that returns are the hidden states. The module itself if it is in none."""
    first_layer: nn.Module
    """Layer 0 of the same stack."""
    turn: int
    """Number of this call of a shared module in a pass; 0 if not shared."""
    queries: TokensOf
    keys: TokensOf
    compression: Compression | None
    """The keys behind those of the tokens, if there are any."""
    length: int
    """The keys of the short run."""
    widths: Widths
    spec: AttentionSpec
    dtype: str
    output_width: int
    taps: frozenset[str] | None
    """The taps that can be asked for of an attention that the model computes itself; None for all of its spec."""
    time_first: bool
    """True if the states around it are ``[L, B, width]``."""
    channels_first: bool = False
    """True if the states around it are grids ``[B, width, rows, columns]``, as those of ViTDet."""
    calls: int = 1
    """The calls of the attention function that it is, over values side by side."""
    beside: ModuleTaps = NOTHING_BESIDE
    """The taps that its module makes beside its softmax."""
    mixes: LayerKind = "attention"
    """The kind of its mixing of tokens."""
    state_width: int = 0
    """The numbers of its running state for each value, if it has one."""
    windows: LayerWindows | None = None
    """The windows within which it attends; None if it attends over all tokens."""
    biased: bool = False
    """True if the model gives each head a bias of its own for each query and key, as T5 does."""

    @cached_property
    def kind(self) -> Hashable:
        """Equal for attentions over the same tokens that have the same widths, spec and taps."""
        cut = None if self.windows is None else self.windows.order.shape
        sizes = (self.widths, self.dtype, self.output_width, self.taps, self.beside, self.mixes, cut)
        return (self.queries, self.keys, self.compression, id(self.spec), *sizes)

    @property
    def number(self) -> int:
        """The number of its layer in its stack."""
        return int(str(self.key).rpartition(".")[2])

    @cached_property
    def own_statistics(self) -> frozenset[str]:
        """The statistics that it has and some others lack: of its spec, and of a choice of keys."""
        chooses = {CHOSEN_SHARE} if CHOSEN in self.beside.names else frozenset()
        return statistics_of(self.spec) | chooses

    @cached_property
    def keys_of(self) -> KeysOf:
        """The kind of its keys."""
        if self.windows is not None:
            return "windows"
        if self.keys == BOTH:
            return "decoder + encoder"
        return "tokens" if self.compression is None else "compressed"

    @cached_property
    def reach(self) -> int | None:
        """Window size in keys, the query's own included; None if unlimited."""
        windows = (mask for mask in self.spec.masks if isinstance(mask, SlidingWindow) and mask.right == 0)
        return next((mask.left + 1 for mask in windows if mask.left is not None), None)

    def cached_numbers(self, tokens: int) -> int:
        """The numbers that transformers' cache holds of so many tokens: behind a window, without the oldest key."""
        return self.token_numbers * (tokens if self.reach is None else min(tokens, self.reach - 1))

    @cached_property
    def token_numbers(self) -> int:
        """The numbers that a cache holds of a token.

        Of multi-head latent attention (DeepSeek-AI 2024, section 2.1) they are its latent and its rotated key.
        """
        module: Any = self.module
        if self._caches_latents:
            return int(module.kv_lora_rank + module.qk_rope_head_dim)
        return self.widths.kv_heads * (self.widths.head_dim + self.widths.value_dim // self.calls)

    def expansion_flops(self, tokens: int) -> int:
        """FLOPs of making keys and values of so many cached tokens, as each pass does of latents; 0 of others."""
        module: Any = self.module
        return 2 * tokens * int(module.kv_b_proj.weight.numel()) if self._caches_latents else 0

    @property
    def _caches_latents(self) -> bool:
        return hasattr(self.module, "kv_lora_rank")

    def bound(self, batch: int, queries: int, keys: int, *, batched: bool = True) -> BoundRequest:
        """Return the attention of so many tokens as a bound request without numbers."""
        return raw_request(self.spec, self.widths, self.dtype, RequestSizes(batch, queries, keys), batched=batched)

    def refusal(self, tap: str) -> str | None:
        """The reason for which a tap of this attention is not seen; None if it is. ``ModelRunner.refuses`` asks it."""
        if tap in MODULE_TAPS:
            return None if tap in self.beside.names else self._lacks(tap)
        if tap == "hidden" and self.layer is self.module:
            return NO_LAYER
        if self.taps is None or tap in self.taps:
            return None
        if self.mixes != "attention":
            return f"it mixes tokens by a running state, which has no {tap}"
        return f"the model computes this attention itself, and {tap} is not seen there"

    def _lacks(self, tap: str) -> str:
        if tap == GATE:
            return "no gate that is seen multiplies its context, head by head"
        if self.beside.shares:
            return f"its keys are those that an earlier layer chose; ask that layer for {tap}"
        return "no indexer that is seen chooses among its keys"

    def batch_first(self, change: State) -> State:
        """A change of states ``[B, …, width]`` as one of those around this attention."""
        if self.channels_first:
            return with_channels_last(change)
        return turned(change) if self.time_first else change


def kinds_of(places: Iterable[AttentionPlace]) -> list[tuple[AttentionPlace, int]]:
    """Return one attention of each kind, and the number of those of its kind."""
    counts = Counter([place.kind for place in places])
    ones = {place.kind: place for place in places}
    return [(ones[kind], count) for kind, count in counts.items()]


def turns_of(module: nn.Module, places: Iterable[AttentionPlace]) -> int:
    """The calls of an attention, or of a layer, in one pass: more than one if layers share it."""
    return 1 + max((place.turn for place in places if module in (place.module, place.layer)), default=0)


class _Sizes(AttentionPass):
    """A pass that notes the inputs of each attention."""

    sees_all_heads = True

    def __init__(self) -> None:
        super().__init__({})
        self.seen: dict[LayerKey, RawAttentionInputs] = {}
        self._specs: dict[tuple[int, int | None], tuple[AttentionSpec, AttentionSpec]] = {}
        """The spec of causal attentions, with the one that it is made of, by the id of that and the window."""

    def notes(self, layer: LayerKey) -> bool:
        return True

    def saw(self, layer: LayerKey, raw: RawAttentionInputs, window: int | None) -> None:
        if _is_causal(raw):  # the text may be shorter than the window
            mask = SlidingWindow(left=window - 1, right=0) if window else Causal()
            causal = raw.spec.model_copy(update={"masks": [mask]})
            spec, _ = self._specs.setdefault((id(raw.spec), window), (causal, raw.spec))
            raw = replace(raw, spec=spec)
        self.seen.setdefault(layer, raw)


def _is_causal(raw: RawAttentionInputs) -> bool:
    """True if no query sees a key behind its own: by the weights, the spec or the mask."""
    if raw.weights is not None:
        return raw.query.shape[2] == raw.key.shape[2] and not bool(raw.weights.triu(1).any())
    if raw.mask is None or raw.query.shape[2] != raw.key.shape[2]:
        return raw.spec.masks == [Causal()]
    seen = raw.mask if raw.mask.dtype == torch.bool else raw.mask > torch.finfo(raw.mask.dtype).min / 2
    return not bool(seen.triu(1).any())


def named_layers(
    modules: Sequence[AttentionModule], media: type | None = None, stack: str = VISION
) -> list[tuple[AttentionModule, tuple[LayerKey, ...]]]:
    """Return each module with the keys of its layers; ``attention.3`` where transformers numbers no layers.

    ``media``: the config of the layers that see images or hear sounds, in a model that reads text too: these are
    ``vision.3`` or ``audio.3``, by the name of their ``stack``, and those of its one other stack ``3``.
    """
    if not all(_LAYER_NAME.fullmatch(str(key)) for one in modules for key in one.keys):
        return [(one, (f"{_UNNUMBERED}{number}",)) for number, one in enumerate(modules)]
    named = [(one, one.keys) for one in modules]
    if media in {None, type(None)}:
        return named
    sees = [isinstance(getattr(one.module, "config", None), media) for one in modules]
    stacks = {str(one.keys[0]).rpartition(".")[0] for one, own in zip(modules, sees, strict=True) if not own}
    short: list[tuple[AttentionModule, tuple[LayerKey, ...]]] = [
        (one, tuple(_short(key, stack if own else None) for key in one.keys) if own or len(stacks) == 1 else one.keys)
        for one, own in zip(modules, sees, strict=True)
    ]
    unique = {key for _, keys in short for key in keys}
    return short if len(unique) == sum(len(keys) for _, keys in short) else named


def _tokens_of(key: LayerKey, length: int, text: int) -> TokensOf:
    of: dict[int, TokensOf] = {TARGET + text: BOTH, TARGET: "target", text: "text"}
    return "media" if stack_of(key) in MEDIA else of.get(length)


def stack_of(key: LayerKey) -> str:
    """The stack of a layer as recordings name it: ``layers``, ``encoder``, ``decoder``, or another name."""
    stack = str(key).rpartition(".")[0]
    return {"": "layers", "cross": "decoder"}.get(stack, stack)


def _short(key: LayerKey, stack: str | None) -> LayerKey:
    number = int(str(key).rpartition(".")[2])
    return number if stack is None else f"{stack}.{number}"


def find_places(
    model: PreTrainedModel,
    attention: AttentionWay,
    layers: Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]],
    run: Callable[[AttentionPass], Any],
    text: int = TEXT,
) -> dict[str, AttentionPlace]:
    """Run the model over ``TARGET`` tokens and those of a text. Return its attentions in the order in which they ran.

    By the text of their keys. ``text``: the tokens of the text, or the frames of a sound. Raises InvalidCheckpoint for
    a model that does not run.
    """
    probe = _Sizes()
    outputs: dict[LayerKey, torch.Size] = {}

    def shape_of(keys: tuple[LayerKey, ...]) -> Callable[[Tensor], None]:
        return lambda state: outputs.update(dict.fromkeys(keys, state.shape))

    try:
        with torch.no_grad(), ExitStack() as stack:
            for one, keys in layers:
                stack.callback(after(one.module, shape_of(keys)))
            run(probe)
    except NOT_RUNNING as fault:
        raise does_not_run(model, fault) from fault
    where = {key: one for one, keys in layers for key in keys}
    keys_of = {key: keys for _, keys in layers for key in keys}
    places: dict[str, AttentionPlace] = {}
    for key, raw in probe.seen.items():
        one = where[key]
        path = layer_path(one.path, nested=str(key).startswith(_UNNUMBERED))
        layer = one.module if path is None else model.get_submodule(path)
        compression, length = Compression.of(one.module), raw.key.shape[2]
        shape, taps = outputs.get(key, torch.Size([0])), attention.taps_of(one.module)
        sizes = len(raw.query), raw.query.shape[2]
        stated = len(shape) == 3 and shape[:2] == sizes
        time_first = taps is not None and not stated and shape[:2] == sizes[::-1]
        compressed = 0 if compression is None else compression.count(raw.query.shape[2])
        places[str(key)] = AttentionPlace(
            key,
            one.module,
            layer,
            layer if path is None else model.get_submodule(f"{path.rpartition('.')[0]}.0"),
            keys_of[key].index(key),
            _tokens_of(key, raw.query.shape[2], text),
            _tokens_of(key, length - compressed, text),
            compression,
            length,
            replace(widths_of(raw), value_dim=raw.value.shape[3] * attention.calls_of(one.module)),
            raw.spec,
            torch_dtype_name(raw.query.dtype),
            shape[-1],
            taps if taps is None or not (stated or time_first) else taps | _AROUND,
            time_first,
            calls=attention.calls_of(one.module),
            beside=attention.taps_beside(one.module),
            biased=raw.mask is not None and raw.mask.ndim == 4 and min(raw.mask.shape[1:3]) > 1,
        )
    return places
