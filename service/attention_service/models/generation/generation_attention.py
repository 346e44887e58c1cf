"""The attention of a generation: what chose each token, and edits that hold for all of it.

Notation as in ``core.problem``. A token is chosen by the last query of the pass before it, so of each attention the
weights of this query are computed again, by the stages, beside whatever computed the output.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from attention_contract.schemas.attention import Edit
from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.tensors import encode
from attention_service.core.attention import attend
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import BoundEdit, apply, narrowed
from attention_service.core.inspection.statistics import DEFAULT_STATISTICS, StatisticInputs
from attention_service.core.inspection.weights import Totals, weights_of
from attention_service.core.problem import Problem, Selection
from attention_service.core.tensors import to_numpy
from attention_service.models.inputs.model_inputs import span_middle
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import BOTH, AttentionPlace
from attention_service.models.passes.layer_attention import AttentionPass, problem_of
from attention_service.models.passes.module_hooks import after
from attention_service.runtime.operations.compute import bind_edits
from attention_transformers.function_calls import attention_call
from attention_transformers.model_layers import LayerKey
from attention_transformers.registration import forget_function, register_function

_BY_QUERY: Final = ("position_bias", "indices")
"""Arguments of an attention function that have a dimension of queries, the last but one."""
_SMALL: Final = 2**16
"""Numbers of the keys of a layer up to which a copy of them costs less than a computation of their own."""
_UNKNOWN: Final = ("softcap", "s_aux", "indices", "block_indices", "sinks")
"""Arguments of an attention function that PyTorch's own does not know."""


class TokenAttention:
    """Keeps the weights of the last query of each attention, pass by pass, and tells of them token by token."""

    def __init__(
        self, wanted: AttentionOfTokens, places: Sequence[AttentionPlace], pads: Sequence[int], prompts: Sequence[int]
    ) -> None:
        """``places``: the layers to tell of. ``pads``: the padding before each choice; ``prompts``: its length."""
        self._wanted = wanted
        self._places = {place.key: place for place in places}
        self._longest = max(prompts)
        self._heads = None if wanted.heads is None else tuple(wanted.heads)
        self._names = DEFAULT_STATISTICS if wanted.statistics is None else tuple(dict.fromkeys(wanted.statistics))
        self._rows: dict[LayerKey, Tensor] = {}
        """``[B, heads, 1, K]`` by layer, of the last pass."""
        self._waiting: dict[Hashable, list[tuple[LayerKey, Problem]]] = {}
        """Small problems that are alike, whose weights are computed at once."""
        groups: dict[tuple[int, int], list[int]] = {}
        for choice, sizes in enumerate(zip(pads, prompts, strict=True)):
            groups.setdefault(sizes, []).append(choice)
        self._groups = groups

    def wants(self, layer: LayerKey) -> bool:
        """True if a layer is told of."""
        return layer in self._places

    def see(self, layer: LayerKey, last: Problem, edits: Sequence[BoundEdit], mask: object) -> None:
        """Take the weights of the last query of a layer, whose problem has this query alone.

        ``mask``: equal for layers that have the same mask.
        """
        if edits or last.learned or last.k.numel() > _SMALL:
            self._rows[layer] = weights_of(last, Selection(heads=self._heads), edits)
            return
        alike = (last.q.shape, last.k.shape, last.v.shape, id(last.spec), id(mask))
        self._waiting.setdefault(alike, []).append((layer, last))

    def _compute(self) -> None:
        """Compute the weights that wait."""
        for alike in self._waiting.values():
            layers, problems = zip(*alike, strict=True)
            first: Problem = problems[0]
            if len(problems) > 1:
                q, k, v = (torch.cat([getattr(each, name) for each in problems]) for name in ("q", "k", "v"))
                first = replace(first, q=q, k=k, v=v, mask=_repeated(first.mask, first.q, len(layers)))
            found = weights_of(first, Selection(heads=self._heads))
            self._rows.update(zip(layers, found.chunk(len(layers)), strict=True))
        self._waiting.clear()

    def of(self, tokens: Tensor) -> list[list[dict[str, Any]]]:
        """The fields of the schema ``TokensAttention`` of each layer, choice by choice.

        ``tokens [B, T]``: all that the pass has seen, with the padding.
        """
        self._compute()
        found: list[list[dict[str, Any]]] = [[] for _ in range(len(tokens))]
        for (pad, prompt), choices in self._groups.items():
            rows = {layer: self._placed(layer, choices, slice(pad, tokens.shape[1]), prompt) for layer in self._places}
            by_shape: dict[Hashable, list[LayerKey]] = {}
            for layer, weights in rows.items():
                place = self._places[layer]
                by_shape.setdefault((weights.shape, is_cross(layer), place.keys, place.compression), []).append(layer)
            told: dict[LayerKey, list[dict[str, Any]]] = {}
            for alike in by_shape.values():
                stacked = torch.cat([rows[layer] for layer in alike])
                each = self._told_of(stacked, tokens[choices, pad:].repeat(len(alike), 1), self._places[alike[0]], pad)
                for at, layer in enumerate(alike):
                    told[layer] = each[at * len(choices) : (at + 1) * len(choices)]
            for at, choice in enumerate(choices):
                found[choice] = [{"layer": layer} | told[layer][at] for layer in self._places]
        return found

    def _placed(self, layer: LayerKey, choices: list[int], place: slice, prompt: int) -> Tensor:
        """The weights of some choices, by the position of the key. A sliding cache has only the last of them.

        Behind the tokens come the keys of a layer that are no tokens of the same text.
        """
        weights = self._rows[layer][choices]
        if is_cross(layer):
            return weights[..., :prompt]
        own, behind = self._split(layer, weights, place.stop)
        own = nn.functional.pad(own, (place.stop - own.shape[-1], 0))[..., place]
        return torch.cat([own, behind[..., :prompt] if self._places[layer].keys == BOTH else behind], -1)

    def _split(self, layer: LayerKey, weights: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The weights of tokens of the text, and those of other keys."""
        place = self._places[layer]
        others = self._longest if place.keys == BOTH else 0
        if place.compression is not None:
            others = place.compression.count(tokens)
        own = weights.shape[-1] - others
        return weights[..., :own], weights[..., own:]

    def _told_of(self, weights: Tensor, tokens: Tensor, place: AttentionPlace, pad: int) -> list[dict[str, Any]]:
        """``weights [N, H, 1, K]``, of several choices and layers like one; ``tokens [N, T]``, behind padding."""
        count, heads, _, keys = weights.shape
        found: list[dict[str, Any]] = [{} for _ in range(count)]
        if self._names:
            position = torch.full((count, 1), tokens.shape[1] - 1, device=weights.device)
            own = 0 if is_cross(place.key) else tokens.shape[1]
            of_keys = torch.cat([tokens[:, :own], tokens.new_full((count, keys - own), -1)], 1)
            inputs = replace(self._inputs(of_keys, tokens[:, -1:]), key_positions=_positions(place, own, keys, pad))
            totals = Totals((count, heads, 1), weights.device, self._names, inputs)
            totals.add(weights.double(), torch.ones_like(position, dtype=torch.bool), position)
            means = {name: _arrays(mean) for name, mean in totals.means().items()}
            for at, told in enumerate(found):
                told["statistics"] = {name: _row(mean, at) for name, mean in means.items()}
        if self._wanted.top_k:
            top = weights[:, :, 0].float().topk(min(self._wanted.top_k, keys), -1)
            names, values = to_numpy(top.indices.masked_fill(top.values == 0, -1)), _told(top.values)
            for at, told in enumerate(found):
                told["top_keys"] = {"keys": names[at], "weights": values[at]}
        if self._wanted.weights:
            whole = _told(weights[:, :, 0])
            for at, told in enumerate(found):
                told["weights"] = whole[at]
        return found

    def _inputs(self, tokens: Tensor, query_tokens: Tensor) -> StatisticInputs:
        options = self._wanted.statistic_options
        classes = {
            name: torch.isin(tokens, torch.tensor(ids, device=tokens.device, dtype=tokens.dtype))
            for name, ids in options.token_classes.items()
        }
        return StatisticInputs(options.window, options.sinks, tokens, query_tokens, classes)


class PromptPadding:
    """The padding of the prompts of a batch, by which an edit of all keys is one of each choice's own."""

    def __init__(self, before: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """``before``: the padding before each prompt; ``lengths``: their tokens, without it."""
        self._before = torch.tensor(before, device=device)[:, None]
        self._lengths = torch.tensor(lengths, device=device)[:, None]
        self._none = len(set(lengths)) == 1

    def real(self, layer: LayerKey, keys: range) -> Tensor | None:
        """Return bool ``[B, K]``, True for the keys of a layer that are no padding; None if all are."""
        if self._none:
            return None
        place = torch.arange(keys.start, keys.stop, device=self._before.device)
        of_prompt = isinstance(layer, str) and layer.startswith(("cross.", "encoder."))
        return place < self._lengths if of_prompt else place >= self._before


class GenerationAttention:
    """The attention function of one generation: PyTorch's own, as ``generate`` has it, unless more is asked of it."""

    def __init__(
        self,
        loaded: LoadedModel,
        look: TokenAttention | None,
        edits: Mapping[LayerKey, Sequence[Edit]],
        padding: PromptPadding,
    ) -> None:
        self.look = look
        self.seen = 0
        """The tokens of the passes before."""
        self.begun = False
        """True once an attention ran."""
        self._model, self._core, self._places = loaded.model, loaded.attention, loaded.places
        device, dtype = loaded.model.device, loaded.model.dtype
        self._padding = padding
        self._edits = {layer: bind_edits(stated, device, dtype, real_keys=True) for layer, stated in edits.items()}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend as transformers asks. Returns the output ``[B, Lq, H, Dv]``."""
        self.begun = True
        look, edits, real = self.look, list[BoundEdit](), None
        if look is not None or self._edits:
            checkpoint()
            layer = self._core.layer_of(module)
            keys = self._keys(layer, query, key)
            edits = self._in_time(layer, query, key, keys)
            real = self._padding.real(layer, keys) if edits else None
            if look is not None and look.wants(layer):
                last = last_query(module, query, key, value, attention_mask, options)
                last = last if real is None else replace(last, key_mask=real)
                shared = last if any(options.get(name) is not None for name in _BY_QUERY) else attention_mask
                look.see(layer, last, narrowed(edits, Selection(queries=(query.shape[2] - 1,)), 1, 1), shared)
        if edits or any(options.get(name) is not None for name in _UNKNOWN):
            raw = attention_call(module, query, key, value, attention_mask, **options).raw()
            kernel = self._core.kernel(raw, edits=bool(edits))[1]
            problem = problem_of(raw) if real is None else replace(problem_of(raw), key_mask=real)
            return attend(problem, (), edits=edits, kernel=kernel).context.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make this the attention of the model until the block ends."""
        name = register_function(self, sdpa_mask if self._model._supports_sdpa else eager_mask)
        try:
            self._model.set_attn_implementation(name)
            with ExitStack() as undo:
                undo.enter_context(self._core.running(AttentionPass({})))  # counts the calls of shared modules anew
                for layer, edits in self._edits.items():
                    if any(edit.tap == "output" for edit in edits):
                        place = self._places[str(layer)]
                        undo.callback(after(place.module, self._edited(place)))
                yield
        finally:
            self._core.use(self._model)
            forget_function(name)

    def _edited(self, place: AttentionPlace) -> Callable[[Tensor], Tensor]:
        """The tap ``output`` after its edits, ``[B, L, d_model]``."""

        def change(state: Tensor) -> Tensor:
            rows = Selection(queries=range(self.seen, self.seen + state.shape[1]))
            edits = [edit for edit in self._edits[place.key] if edit.tap == "output"]
            return apply(narrowed(edits, rows, 1, 1), "output", state)

        return change

    def _in_time(self, layer: LayerKey, query: Tensor, key: Tensor, keys: range) -> list[BoundEdit]:
        """The edits of a layer as they apply to one call, whose first query stands somewhere among all tokens."""
        edits = [edit for edit in self._edits.get(layer, ()) if edit.tap != "output"]
        if not edits:
            return []
        rows = Selection(queries=range(self.seen, self.seen + query.shape[2]))
        return narrowed(edits, rows, query.shape[1], key.shape[1], keys=keys)

    def _keys(self, layer: LayerKey, query: Tensor, key: Tensor) -> range:
        """The positions of the keys of a call: a sliding cache has only the last ones."""
        keys = key.shape[2]
        first = 0 if is_cross(layer) else max(self.seen + query.shape[2] - keys, 0)
        return range(first, first + keys)


def _repeated(mask: Tensor | None, query: Tensor, times: int) -> Tensor | None:
    """A mask of one query, for the sequences of several layers."""
    if mask is None or mask.ndim < 4 or len(mask) == 1:
        return mask
    return mask.expand(len(query), *mask.shape[1:]).repeat(times, 1, 1, 1)


def _positions(place: AttentionPlace, own: int, keys: int, pad: int) -> Tensor | None:
    """The positions of the text's own tokens and of the keys behind them; None if there are none behind."""
    if place.keys_of == "tokens" or own == keys:
        return None
    spans = () if place.compression is None else place.compression.spans(own + pad)
    behind = [span_middle(span) - pad for span in spans] or [torch.nan] * (keys - own)
    return torch.tensor([*range(own), *behind], dtype=torch.float64)


def is_cross(layer: LayerKey) -> bool:
    """True if the keys of a layer are those of an encoder."""
    return isinstance(layer, str) and layer.startswith("cross.")


def last_query(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> Problem:
    """The problem of the last query alone."""
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., -1:, :]
    cut = {name: given[..., -1:, :] for name in _BY_QUERY if (given := options.get(name)) is not None}
    return problem_of(attention_call(module, query[:, :, -1:], key, value, mask, **{**options, **cut}).raw())


def _arrays(mean: Any) -> Any:
    """Statistics as float32 arrays, with the same nesting."""
    return {name: _arrays(each) for name, each in mean.items()} if isinstance(mean, dict) else _told(mean)


def _told(found: Tensor) -> Any:
    """Numbers as float32, in a form that JSON has."""
    array = to_numpy(found.float())
    return array if np.isfinite(array).all() else encode(array, "list")


def _row(mean: Any, at: int) -> Any:
    return {name: each[at] for name, each in mean.items()} if isinstance(mean, dict) else mean[at]
