"""The attention of each token as the schema ``TokensAttention`` has it: statistics by the core, keys, weights.

Notation: N weights of one query each, of several texts and layers; H heads, K keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_contract.schemas.weights import BY_KEY
from attention_service.core.inspection.statistics import StatisticInputs
from attention_service.core.inspection.summed_statistics import WeightSizes
from attention_service.core.inspection.weights import QueryTotals
from attention_vllm.bound_asks import BoundAsk

Fields = dict[str, Any]
"""The fields of the schema, with numpy arrays."""


@dataclass(eq=False)
class TokenWeights:
    """The weights of one layer from which the next token of one text is chosen."""

    bound: BoundAsk
    name: str
    """The request."""
    layer: int
    length: int
    """The keys."""
    weights: Tensor
    """``[H, K]`` of all heads, K at least ``length``."""
    heads: tuple[int, ...] | None = None
    """The heads to tell of; None for all."""
    able: frozenset[str] = frozenset()
    """The statistics of some attentions that the layer has."""


def token_reports(
    told: Sequence[TokenWeights], tokens: Mapping[str, Sequence[int] | None]
) -> dict[str, dict[int, Fields]]:
    """Tell of weights, by request and layer. ``tokens``: those of each request, where they are known."""
    groups: dict[Any, list[TokenWeights]] = {}
    for each in told:
        count = each.weights.shape[0] if each.heads is None else len(each.heads)
        groups.setdefault((each.bound.settings, each.able, count), []).append(each)
    found: dict[str, dict[int, Fields]] = {}
    for (_, _, heads), alike in groups.items():
        # A rank may have none of the heads that a request asks for.
        for each, fields in zip(alike, _fields(alike, tokens) if heads else [{} for _ in alike], strict=True):
            found.setdefault(each.name, {})[each.layer] = fields
    return found


def _fields(alike: Sequence[TokenWeights], tokens: Mapping[str, Sequence[int] | None]) -> list[Fields]:
    """The fields of weights that are to be told of alike."""
    bound, wanted = alike[0].bound, alike[0].bound.ask.attention
    keys = max(each.weights.shape[1] for each in alike)
    parts = []
    for each in alike:  # weights of keys behind the last are 0
        own = each.weights if each.heads is None else each.weights[list(each.heads)]
        parts.append(own if own.shape[1] == keys else pad(own, (0, keys - own.shape[1])))
    weights = torch.stack(parts)[:, :, None]  # [N, H, 1, K]
    found: list[Fields] = [{} for _ in alike]
    if bound.names:
        for fields, means in zip(found, _statistics(alike, weights, tokens), strict=True):
            fields["statistics"] = means
    if wanted.top_k:
        top = weights[:, :, 0].topk(min(wanted.top_k, keys), -1)
        names, values = top.indices.masked_fill(top.values == 0, -1).cpu().numpy(), top.values.cpu().numpy()
        for at, (fields, each) in enumerate(zip(found, alike, strict=True)):
            most = min(wanted.top_k, each.length)
            fields["top_keys"] = {"keys": names[at, :, :most], "weights": values[at, :, :most]}
    if wanted.weights:
        whole = weights[:, :, 0].cpu().numpy()
        for at, (fields, each) in enumerate(zip(found, alike, strict=True)):
            fields["weights"] = whole[at, :, : each.length]
    return found


def _statistics(
    alike: Sequence[TokenWeights], weights: Tensor, tokens: Mapping[str, Sequence[int] | None]
) -> list[Fields]:
    bound, options = alike[0].bound, alike[0].bound.ask.attention.statistic_options
    count, heads, _, keys = weights.shape
    device = weights.device
    lengths = torch.tensor([[each.length] for each in alike], device=device)
    of_keys = query_tokens = None
    if bound.reads_tokens:
        rows = []
        for each in alike:
            own = [*(tokens.get(each.name) or ())][: each.length]
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
    inputs = StatisticInputs(options.window, options.sinks, of_keys, query_tokens, classes, able=alike[0].able)
    totals = QueryTotals(WeightSizes(count, heads, 1, keys, device), bound.names, inputs)
    totals.add(weights.double(), torch.ones_like(lengths, dtype=torch.bool), lengths - 1)
    means = _arrays(totals.means())
    return [_of_row(means, at, each.length) for at, each in enumerate(alike)]


def _arrays(means: Mapping[str, Any]) -> Fields:
    """Statistics in float32, with the same nesting."""
    return {
        name: _arrays(mean) if isinstance(mean, dict) else mean.float().cpu().numpy() for name, mean in means.items()
    }


def _of_row(means: Mapping[str, Any], at: int, length: int) -> Fields:
    """The statistics of one of the texts."""
    found: Fields = {}
    for name, mean in means.items():
        if isinstance(mean, dict):
            found[name] = _of_row(mean, at, length)
        else:
            found[name] = mean[at, :, :length] if name in BY_KEY else mean[at]
    return found
