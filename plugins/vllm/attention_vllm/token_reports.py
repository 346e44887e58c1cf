"""The attention of each token as the schema ``TokensAttention`` has it: statistics by the core, keys, weights.

Notation: N weights of one query each, of R texts in L layers; H heads, K keys.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_contract.schemas.weights import BY_KEY
from attention_service.core.inspection.statistics import GivenPairs, StatisticInputs
from attention_service.core.inspection.summed_statistics import WeightSizes
from attention_service.core.inspection.weights import QueryTotals
from attention_vllm.bound_asks import BoundAsk

Fields = dict[str, Any]
"""The fields of the schema, with numpy arrays."""


class ToldText(NamedTuple):
    """A text whose next token is told of."""

    bound: BoundAsk
    name: str
    """The request."""
    length: int
    """The keys."""


@dataclass(eq=False)
class TokenWeights:
    """The weights of layers alike from which the next tokens of texts are chosen."""

    layers: Sequence[int]
    texts: Sequence[ToldText]
    weights: Tensor
    """``[L, R, H, K]`` of all heads, K at least the longest ``length``."""
    able: frozenset[str] = frozenset()
    """The statistics of some attentions that the layers have."""


def token_reports(
    told: Sequence[TokenWeights], tokens: Mapping[str, Sequence[int] | None]
) -> dict[str, dict[int, Fields]]:
    """Tell of weights, by request and layer. ``tokens``: those of each request, where they are known."""
    groups: dict[Hashable, list[tuple[TokenWeights, list[int]]]] = {}
    for weights in told:
        by_settings: dict[Hashable, list[int]] = {}
        for at, text in enumerate(weights.texts):
            heads = text.bound.heads[weights.layers[0]].heads
            by_settings.setdefault((text.bound.settings, heads, weights.able), []).append(at)
        for settings, chosen in by_settings.items():
            groups.setdefault(settings, []).append((weights, chosen))
    reports: dict[str, dict[int, Fields]] = {text.name: {} for weights in told for text in weights.texts}
    for alike in groups.values():
        rows = [(layer, own.texts[at]) for own, chosen in alike for layer in own.layers for at in chosen]
        for (layer, text), fields in zip(rows, _fields(alike, [text for _, text in rows], tokens), strict=True):
            reports[text.name][layer] = fields
    return reports


def _fields(
    alike: Sequence[tuple[TokenWeights, list[int]]],
    texts: Sequence[ToldText],
    tokens: Mapping[str, Sequence[int] | None],
) -> list[Fields]:
    """The fields of layers and the rows there that are to be told of alike. ``texts``: those of each."""
    first, bound = alike[0][0], texts[0].bound
    heads, wanted = bound.heads[first.layers[0]].heads, bound.ask.attention
    fields_of_rows: list[Fields] = [{} for _ in texts]
    if heads == ():  # a rank may have none of the heads that a request asks for
        return fields_of_rows
    keys = max(own.weights.shape[3] for own, _ in alike)
    parts = []
    for own, chosen in alike:  # weights of keys behind the last are 0
        part = own.weights if len(chosen) == len(own.texts) else own.weights[:, chosen]
        part = part if heads is None else part[:, :, list(heads)]
        parts.append(pad(part, (0, keys - part.shape[3])).flatten(0, 1))
    weights = torch.cat(parts)  # [N, H, K]
    if bound.names:
        for fields, means in zip(fields_of_rows, _statistics(texts, weights, tokens, first.able), strict=True):
            fields["statistics"] = means
    if wanted.top_k:
        top = weights.topk(min(wanted.top_k, keys), -1)
        names, values = top.indices.masked_fill(top.values == 0, -1).cpu().numpy(), top.values.cpu().numpy()
        for at, (fields, text) in enumerate(zip(fields_of_rows, texts, strict=True)):
            most = min(wanted.top_k, text.length)
            fields["top_keys"] = {"keys": names[at, :, :most], "weights": values[at, :, :most]}
    if wanted.weights:
        whole = weights.cpu().numpy()
        for at, (fields, text) in enumerate(zip(fields_of_rows, texts, strict=True)):
            fields["weights"] = whole[at, :, : text.length]
    return fields_of_rows


def _statistics(
    texts: Sequence[ToldText], weights: Tensor, tokens: Mapping[str, Sequence[int] | None], able: frozenset[str]
) -> list[Fields]:
    """The statistics of weights ``[N, H, K]``."""
    bound, options = texts[0].bound, texts[0].bound.ask.attention.statistic_options
    count, heads, keys = weights.shape
    device = weights.device
    lengths = torch.tensor([text.length for text in texts], device=device)[:, None]
    of_keys = query_tokens = None
    if bound.reads_tokens:
        rows = []
        for text in texts:
            own = [*(tokens.get(text.name) or ())][: text.length]
            rows.append([*own, *[-1] * (keys - len(own))])
        of_keys = torch.tensor(rows, device=device)
        query_tokens = of_keys.gather(1, lengths - 1)
    classes: dict[str, Tensor] = {}
    for name, ids in options.token_classes.items():
        if of_keys is not None:
            classes[name] = torch.isin(of_keys, torch.tensor(ids, device=device, dtype=of_keys.dtype))
    for name, places in bound.spans.items():
        inside = torch.zeros(keys, dtype=torch.bool, device=device)
        inside[list(places)] = True
        classes[name] = inside.expand(count, keys)
    pairs = None
    if bound.pairs is not None:
        of_queries = [bound.pairs.keys_of(text.length - 1) for text in texts]
        pairs = GivenPairs.of_single_queries(of_queries, bound.pairs.candidates, keys, device)
    inputs = StatisticInputs(options.window, options.sinks, of_keys, query_tokens, classes, able=able, pairs=pairs)
    totals = QueryTotals(WeightSizes(count, heads, 1, keys, device), bound.names, inputs)
    totals.add(weights[:, :, None], torch.ones_like(lengths, dtype=torch.bool), lengths - 1)
    return _by_row(_arrays(totals.means()), texts)


def _arrays(means: Mapping[str, Any]) -> Fields:
    """Statistics in float32, with the same nesting."""
    return {
        name: _arrays(mean) if isinstance(mean, dict) else mean.float().cpu().numpy() for name, mean in means.items()
    }


def _by_row(means: Mapping[str, Any], texts: Sequence[ToldText]) -> list[Fields]:
    """The statistics of each text."""
    rows: list[Fields] = [{} for _ in texts]
    for name, mean in means.items():
        values = _by_row(mean, texts) if isinstance(mean, dict) else mean
        for row, text, value in zip(rows, texts, values, strict=True):
            row[name] = value[:, : text.length] if name in BY_KEY else value
    return rows
