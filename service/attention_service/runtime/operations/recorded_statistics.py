"""Statistics of the weights of a recording: every layer and head, its file read some rows at a time."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.recording_tensors import TensorPlace
from attention_contract.schemas.analyses.recording_statistics import (
    RecordingStatistics,
    RecordingStatisticsRequest,
    StatisticsOfAttention,
)
from attention_contract.schemas.recordings import RecordingInfo, RecordingQuery
from attention_contract.schemas.weights import HeadStatistics
from attention_service.core.blocks import SCORES_AT_ONCE, rows_at_once
from attention_service.core.cancellation import checkpoint
from attention_service.core.inspection.head_reader import row_tiles
from attention_service.core.inspection.statistics import CLASS_SHARES, DEFAULT_STATISTICS, StatisticInputs
from attention_service.core.inspection.summed_statistics import WeightSizes
from attention_service.core.inspection.weights import QueryTotals
from attention_service.core.problem import Selection
from attention_service.core.tensors import to_numpy
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.binding.bound_statistics import check_able
from attention_service.runtime.operations.analysis.heads import Recorded, check_recorded

_TILES: Final = 12
"""Float64 copies of a block that the statistics hold at a time, at most."""


def held_bytes(info: RecordingInfo, request: RecordingStatisticsRequest) -> int:
    """Bytes that ``statistics_of`` holds. Raises InvalidRequest for layers and classes that are missing."""
    shapes = [shape for _, shape in _attentions(info, request)]
    return max(
        _TILES * 8 * heads * min(queries, rows_at_once(1, heads, keys)) * keys for heads, queries, keys in shapes
    )


def statistics_of(
    store: RecordingStore, recording: str, request: RecordingStatisticsRequest, owner: str | None
) -> RecordingStatistics:
    """Read the weights of a recording block by block, and reduce them to statistics of each head.

    Raises RecordingNotFound, InvalidRequest, and InternalError for a file that cannot be read.
    """
    info = store.get(recording, RecordingQuery(), owner)
    recorded = _attentions(info, request)
    with store.reading(recording, owner) as file:
        attentions = [_one(file, info, place, shape, request) for place, shape in recorded]
    return RecordingStatistics(id=info.id, attentions=attentions)


def _attentions(info: RecordingInfo, request: RecordingStatisticsRequest) -> list[Recorded]:
    """The places and shapes of the recorded weights that the request covers."""
    names = request.statistics or ()
    check_able(names, ())
    if CLASS_SHARES in names and not request.classes:
        raise InvalidRequest.at(
            "classes", "the statistic classes has no class; send the labels of the tokens of each class"
        )
    shapes = info.placed("weights")
    order = [attention.name for attention in info.attentions if attention.name in shapes]
    check_recorded(request.layers, shapes, order, "weights")
    return [shapes[name] for name in request.layers or order]


def _one(
    file: Any, info: RecordingInfo, place: TensorPlace, shape: tuple[int, ...], request: RecordingStatisticsRequest
) -> StatisticsOfAttention:
    heads, queries, keys = shape
    sizes = WeightSizes(1, heads, queries, keys, torch.device("cpu"))
    totals = QueryTotals(sizes, _names(request), _inputs(info, place, request))
    part = file.get_slice(f"{place.layer}.weights")
    for rows in row_tiles(queries, heads * keys, SCORES_AT_ONCE):
        checkpoint()
        weights = part[:, rows.start : rows.stop][None]  # [1, H, R, K]
        weights = (weights.float() if weights.element_size() == 2 else weights).double()  # half to double is slow
        positions = torch.arange(rows.start, rows.stop)[None]
        real = torch.ones_like(positions, dtype=torch.bool)
        totals.add(weights, real, positions, Selection(queries=rows), visible=weights != 0)  # no masks are recorded
    means = {name: _host(mean) for name, mean in totals.means().items()}
    attention = info.attention(place.layer)
    return StatisticsOfAttention(
        name=place.layer,
        heads=attention.heads if attention is not None else [str(head) for head in range(heads)],
        queries=int(totals.queries),
        statistics=HeadStatistics(**means),
    )


def _names(request: RecordingStatisticsRequest) -> tuple[str, ...]:
    return DEFAULT_STATISTICS if request.statistics is None else tuple(dict.fromkeys(request.statistics))


def _inputs(info: RecordingInfo, place: TensorPlace, request: RecordingStatisticsRequest) -> StatisticInputs:
    """The labels of the tokens as numbers: equal labels are equal tokens."""
    queries, keys = info.tokens[place.stack], info.tokens[place.key_stack]
    numbers = {label: number for number, label in enumerate(dict.fromkeys([*keys, *queries]))}
    of_keys, of_queries = (torch.tensor([[numbers[label] for label in labels]]) for labels in (keys, queries))
    classes = {
        name: torch.from_numpy(np.isin(np.array(keys, object), np.array(labels, object)))[None]
        for name, labels in request.classes.items()
    }
    return StatisticInputs(request.window, request.sinks, of_keys, of_queries, classes)


def _host(mean: Any) -> Any:
    """``[H]`` of one sequence, in float64."""
    return {name: _host(part) for name, part in mean.items()} if isinstance(mean, Mapping) else to_numpy(mean[0])
