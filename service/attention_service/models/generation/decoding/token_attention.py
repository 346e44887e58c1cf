"""The attention that chose each token: the weights of the last query of a pass, and what is told of them.

Notation as in ``core.problem``. Texts of one pass that ask for the same are told of at once.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attention_contract.schemas.openai import AttentionOfTokens
from attention_contract.schemas.weights import BY_KEY
from attention_contract.tensors import encode
from attention_service.core.edits import BoundEdit
from attention_service.core.inspection.statistics import (
    DEFAULT_STATISTICS,
    TOKEN_STATISTICS,
    GivenPairs,
    StatisticInputs,
)
from attention_service.core.inspection.summed_statistics import WeightSizes
from attention_service.core.inspection.weights import QueryTotals, weights_of
from attention_service.core.problem import Problem, Selection
from attention_service.core.tensors import to_numpy
from attention_service.models.inputs.input_stacks import span_middle
from attention_service.models.passes.attention_places import BOTH, AttentionPlace
from attention_service.models.passes.device_heads import DividedHeads
from attention_service.prompts.named_pairs import TextPairs
from attention_transformers.model_layers import LayerKey

NamedTokens = tuple[tuple[str, tuple[int, ...]], ...]
"""Parts of a prompt: the name and the positions of the tokens of each."""
_SMALL: Final = 2**16
"""Numbers of the keys of a layer up to which a copy of them costs less than a computation of their own."""


class PassWeights:
    """The weights of the last query of each text and layer in one pass."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Any, ...], list[tuple[TokenAttention, LayerKey, Problem]]] = {}
        """Small problems that are alike, whose weights are computed at once."""
        self._weights: list[tuple[LayerKey, Sequence[TokenAttention | None], Tensor, bool]] = []
        """Layer by layer, the texts and their weights ``[R, H, 1, K]``, and True if these are of the asked heads."""
        self._divided: dict[LayerKey, DividedHeads] = {}
        """The layers of which this device has its own heads alone."""

    def divide(self, layer: LayerKey, divided: DividedHeads) -> None:
        """Take in that the problems and weights of a layer are those of its heads on this device."""
        self._divided[layer] = divided

    def see(
        self, look: "TokenAttention", layer: LayerKey, last: Problem, edits: Sequence[BoundEdit], mask: object
    ) -> None:
        """Take the weights of the last query of a layer in the pass of one text, whose problem has this query alone.

        ``mask``: equal for layers that have the same mask.
        """
        divided = self._heads_of(look, layer) if self._divided else None
        heads = look.heads if divided is None else divided.own
        if edits or last.learned or last.k.numel() > _SMALL:
            self._weights.append((layer, [look], weights_of(last, Selection(heads=heads), edits), True))
            return
        alike = (heads, last.q.shape, last.k.shape, last.v.shape, id(last.spec), id(mask))
        self._waiting.setdefault(alike, []).append((look, layer, last))

    def add(self, layer: LayerKey, looks: "Sequence[TokenAttention | None]", weights: Tensor) -> None:
        """Take the weights ``[R, H, 1, K]`` of all heads of a layer here, of several texts."""
        self._weights.append((layer, looks, weights, False))

    def _heads_of(self, look: "TokenAttention", layer: LayerKey) -> DividedHeads | None:
        """The heads of a layer that a text asks for, if each device has its own."""
        divided = self._divided.get(layer)
        return None if divided is None else divided._replace(chosen=look.heads)

    def reports(self, tokens: "Mapping[TokenAttention, Sequence[int]]") -> "dict[TokenAttention, list[dict[str, Any]]]":
        """The fields of the schema ``TokensAttention`` of each layer, by text.

        ``tokens``: all that the pass has seen of each text.
        """
        self._compute()
        if self._divided:  # edits of some heads change the order on their device alone
            self._weights.sort(key=lambda of_layer: str(of_layer[0]))
        groups: dict[tuple[Any, ...], list[tuple[LayerKey, list[TokenAttention], Tensor]]] = {}
        for layer, looks, weights, selected in self._weights:
            by_settings: dict[Hashable, list[int]] = {}
            for at, look in enumerate(looks):
                if look is not None and look.wants(layer):
                    by_settings.setdefault(look.settings, []).append(at)
            for settings, chosen in by_settings.items():
                own = [look for at in chosen if (look := looks[at]) is not None]
                rows = weights if len(chosen) == len(looks) else weights[chosen]
                divided = self._heads_of(own[0], layer) if self._divided else None
                heads = own[0].heads if divided is None else divided.own
                if not selected and heads is not None:
                    rows = rows[:, list(heads)]
                placed = own[0].placed(layer, rows, [len(tokens[look]) for look in own])
                group = settings, own[0].kind(layer), placed.shape[1], divided
                groups.setdefault(group, []).append((layer, own, placed))
        by_text: dict[TokenAttention, dict[LayerKey, dict[str, Any]]] = {look: {} for look in tokens}
        for (*_, divided), alike in groups.items():
            keys = max(weights.shape[-1] for _, _, weights in alike)
            stacked = torch.cat([nn.functional.pad(x, (0, keys - x.shape[-1])) for _, _, x in alike])
            texts = [(layer, look) for layer, looks, _ in alike for look in looks]
            first = texts[0][1]
            row_fields = first.fields_of(stacked, [tokens[look] for _, look in texts], alike[0][0], divided)
            for (layer, look), fields in zip(texts, row_fields, strict=True):
                by_text[look][layer] = fields
        return {look: [{"layer": layer} | own[layer] for layer in look.layers] for look, own in by_text.items()}

    def _compute(self) -> None:
        """Compute the weights that wait."""
        for (heads, *_), alike in self._waiting.items():
            looks, layers, problems = zip(*alike, strict=True)
            first: Problem = problems[0]
            if len(problems) > 1:
                q, k, v = (torch.cat([getattr(problem, name) for problem in problems]) for name in ("q", "k", "v"))
                first = replace(first, q=q, k=k, v=v, mask=_repeated(first.mask, first.q, len(layers)))
            every_weight = weights_of(first, Selection(heads=heads))
            for look, layer, weights in zip(looks, layers, every_weight.chunk(len(layers)), strict=True):
                self._weights.append((layer, [look], weights, True))
        self._waiting.clear()


class TokenAttention:
    """The report on the attention of one text's tokens."""

    def __init__(
        self, wanted: AttentionOfTokens, places: Sequence[AttentionPlace], prompt: int, spans: NamedTokens = (),
        pairs: TextPairs | None = None,
    ) -> None:  # fmt: skip
        """``places``: the layers to tell of; ``prompt``: the tokens of the prompt; ``spans``: named parts of it."""
        self._wanted = wanted
        self._places = {place.key: place for place in places}
        self._prompt = prompt
        self.heads = None if wanted.heads is None else tuple(wanted.heads)
        self._names = DEFAULT_STATISTICS if wanted.statistics is None else tuple(dict.fromkeys(wanted.statistics))
        self._spans = spans
        self._pairs = pairs
        classes = wanted.statistic_options.token_classes
        self._compares_tokens = bool(classes) or not TOKEN_STATISTICS.isdisjoint(self._names)
        self.settings: Hashable = (wanted.model_dump_json(exclude={"layers", "edits", "keep"}), spans, pairs)
        """Equal for texts that ask for the same."""
        self._kinds = {key: self._kind(place) for key, place in self._places.items()}

    @property
    def layers(self) -> Sequence[LayerKey]:
        """The layers that are told of."""
        return [*self._places]

    def wants(self, layer: LayerKey) -> bool:
        """True if a layer is told of."""
        return layer in self._places

    def kind(self, layer: LayerKey) -> Hashable:
        """Equal for layers whose keys stand for the same; those that are no tokens of the text differ by text."""
        return self._kinds[layer]

    def _kind(self, place: AttentionPlace) -> Hashable:
        cross = is_cross(place.key)
        alone = cross or place.keys_of != "tokens"
        return (cross, place.keys, place.compression, place.own_statistics, id(self) if alone else None)

    def placed(self, layer: LayerKey, weights: Tensor, lengths: Sequence[int]) -> Tensor:
        """The weights ``[R, H, 1, K]`` of texts of so many tokens, by the position of the key.

        The sliding cache of a text that runs alone has only the last keys. Behind the tokens come the keys of a layer
        that are no tokens of the same text.
        """
        if len(lengths) > 1 or is_cross(layer):
            return weights
        place, behind = self._places[layer], 0
        if place.keys == BOTH:
            behind = self._prompt
        elif place.compression is not None:
            behind = place.compression.count(lengths[0])
        own = weights.shape[-1] - behind
        missing = lengths[0] - own
        return torch.cat([weights.new_zeros((*weights.shape[:-1], missing)), weights], -1) if missing > 0 else weights

    def fields_of(
        self, weights: Tensor, tokens: Sequence[Sequence[int]], layer: LayerKey, divided: DividedHeads | None = None
    ) -> list[dict[str, Any]]:
        """Tell of ``weights [N, H, 1, K]``, of several texts and layers that are alike; ``tokens``: those of each.

        ``divided``: given if the heads are those of this device; told are all that are asked for.
        """
        place = self._places[layer]
        count, heads, _, keys = weights.shape
        device, dtype = weights.device, torch.promote_types(weights.dtype, torch.float32)
        cross, keys_of = is_cross(layer), place.keys_of
        row_fields: list[dict[str, Any]] = [{} for _ in range(count)]
        found: dict[str, Any] = {}
        seen = [keys if cross or keys_of != "tokens" else len(row_tokens) for row_tokens in tokens]
        if self._names:
            lengths = torch.tensor([len(row_tokens) for row_tokens in tokens], device=device)[:, None]
            of_keys = torch.full((count, keys), -1, device=device)
            if not cross and self._compares_tokens:
                of_keys = _padded(tokens, keys, device)
            last = torch.tensor([[row_tokens[-1]] for row_tokens in tokens], device=device)
            own = 0 if cross else len(tokens[0])
            inputs = replace(
                self._inputs(of_keys, last, self._begin(place, own)),
                key_positions=_positions(place, own, keys),
                able=place.own_statistics,
                pairs=None if self._pairs is None else self._pairs_of(self._pairs, tokens, keys, device),
            )
            totals = QueryTotals(WeightSizes(count, heads, 1, keys, device), self._names, inputs)
            totals.add(weights.double(), torch.ones_like(lengths, dtype=torch.bool), lengths - 1)
            found["statistics"] = {name: _arrays(mean, dtype) for name, mean in totals.means().items()}
        if self._wanted.top_k:
            top = weights[:, :, 0].to(dtype).topk(min(self._wanted.top_k, keys), -1)
            names = top.indices.masked_fill(top.values == 0, -1)
            found["top"] = {"keys": to_numpy(names), "weights": to_numpy(top.values)}
        if self._wanted.weights:
            found["weights"] = to_numpy(weights[:, :, 0].to(dtype))
        if divided is not None:
            found = divided.of_all_chosen(found)
        if self._names:
            means = {name: _numbers(mean) for name, mean in found["statistics"].items()}
            for fields, own_means, own_keys in zip(row_fields, _by_row(means, count), seen, strict=True):
                by_key = {name: _narrow(own_means[name], own_keys) for name in BY_KEY & own_means.keys()}
                fields["statistics"] = own_means | by_key
        if self._wanted.top_k:
            names, values = found["top"]["keys"], _numbers(found["top"]["weights"])
            for at, fields in enumerate(row_fields):
                most = min(self._wanted.top_k, seen[at])
                fields["top_keys"] = {"keys": _narrow(names[at], most), "weights": _narrow(values[at], most)}
        if self._wanted.weights:
            whole = _numbers(found["weights"])
            for at, fields in enumerate(row_fields):
                fields["weights"] = _narrow(whole[at], seen[at])
        return row_fields

    def _begin(self, place: AttentionPlace, own: int) -> int | None:
        """The key of a layer that is the first token of the prompt; None if the layer does not see it."""
        if place.queries != "target" or is_cross(place.key):
            return 0
        return own if place.keys == BOTH else None  # an encoder-decoder's prompt is the encoder's

    @staticmethod
    def _pairs_of(pairs: TextPairs, tokens: Sequence[Sequence[int]], keys: int, device: torch.device) -> GivenPairs:
        """The pairs of the last token of each text."""
        own = [pairs.keys_of(len(row_tokens) - 1) for row_tokens in tokens]
        return GivenPairs.of_single_queries(own, pairs.candidates, keys, device)

    def _inputs(self, tokens: Tensor, query_tokens: Tensor, begin: int | None) -> StatisticInputs:
        options = self._wanted.statistic_options
        classes = {
            name: torch.isin(tokens, torch.tensor(ids, device=tokens.device, dtype=tokens.dtype))
            for name, ids in options.token_classes.items()
        }
        for name, positions in self._spans:
            classes[name] = torch.zeros_like(tokens, dtype=torch.bool)
            if begin is not None:
                classes[name][:, [begin + at for at in positions]] = True
        return StatisticInputs(options.window, options.sinks, tokens, query_tokens, classes)


def _repeated(mask: Tensor | None, query: Tensor, times: int) -> Tensor | None:
    """A mask of one query, for the sequences of several layers."""
    if mask is None or mask.ndim < 4 or len(mask) == 1:
        return mask
    return mask.expand(len(query), *mask.shape[1:]).repeat(times, 1, 1, 1)


def _padded(tokens: Sequence[Sequence[int]], keys: int, device: torch.device) -> Tensor:
    """The tokens of each text, filled up with −1 ``[N, keys]``; those of a text in several layers are read once."""
    texts = {id(row_tokens): row_tokens for row_tokens in tokens}
    places = {text: at for at, text in enumerate(texts)}
    rows = torch.tensor(
        [[*row_tokens, *[-1] * (keys - len(row_tokens))] for row_tokens in texts.values()], device=device
    )
    return rows[[places[id(row_tokens)] for row_tokens in tokens]]


def _positions(place: AttentionPlace, own: int, keys: int) -> Tensor | None:
    """The positions of the text's own tokens and of the keys behind them; None if there are none behind."""
    if place.keys_of == "tokens" or own == keys:
        return None
    spans = () if place.compression is None else place.compression.spans(own)
    behind = [span_middle(span) for span in spans] or [torch.nan] * (keys - own)
    return torch.tensor([*range(own), *behind], dtype=torch.float64)


def is_cross(layer: LayerKey) -> bool:
    """True if the keys of a layer are those of an encoder."""
    return isinstance(layer, str) and layer.startswith("cross.")


def _arrays(mean: Any, dtype: torch.dtype) -> Any:
    """Statistics as arrays, with the same nesting."""
    if isinstance(mean, dict):
        return {name: _arrays(part, dtype) for name, part in mean.items()}
    return to_numpy(mean.to(dtype))


def _numbers(found: Any) -> Any:
    """Numbers in a form that JSON has, with the same nesting."""
    if isinstance(found, dict):
        return {name: _numbers(part) for name, part in found.items()}
    return found if np.isfinite(found).all() else encode(found, "list")


def _by_row(means: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Statistics of several texts as those of each, with the same nesting."""
    nested = {name: _by_row(mean, count) for name, mean in means.items() if isinstance(mean, dict)}
    return [
        {name: nested[name][at] if name in nested else mean[at] for name, mean in means.items()} for at in range(count)
    ]


def _narrow(rows: Any, count: int) -> Any:
    """The first entries of each row."""
    return np.ascontiguousarray(rows[:, :count]) if isinstance(rows, np.ndarray) else [row[:count] for row in rows]
