"""Rollout and flow of weights, sent in a request or recorded in a file: planned, and run layer by layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.rollout import RecordingRolloutRequest, RolloutOptions, RolloutRequest
from attention_contract.schemas.recordings import RecordingInfo, RecordingQuery
from attention_service.core.inspection.head_reader import HeadReader
from attention_service.core.inspection.rollout import flows, mixed, relevance, rolled_out
from attention_service.cost.clock import Rates
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.binding.bound_request import check_empty, wrong_shape
from attention_service.runtime.binding.selection import check_indices, check_label_count
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.analysis.base import analysis_job
from attention_service.runtime.operations.analysis.heads import (
    Heads,
    Recorded,
    RecordedHeads,
    SentHeads,
    check_recorded,
)
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.operation import Fields, Results

_KERNEL: Final = {"rollout": "products", "flow": "dinic", "relevance": "products"}
"""The kernel that a reply names."""
_STACKS: Final = ("encoder", "layers", "decoder", "vision")
"""The stacks, the one first that is gone through by default."""
_MOST_EDGES: Final = 2**31 - 1
_EDGE_S, _FLOW_S = 5e-8, 3e-4
"""Seconds of a flow: for each edge, and to begin. Measured on one core."""
_EDGE_BYTES: Final = 48
"""Bytes of an edge while a flow is searched."""


@dataclass(frozen=True, eq=False)
class BoundRollout:
    """One rollout or flow, checked."""

    options: RolloutOptions
    heads: Heads
    """Heads ``[L, L]`` of all layers, the first layer first."""
    counts: Sequence[int]
    """Number of heads of each layer."""
    about: Fields = field(default_factory=dict)
    """Further fields of the reply."""

    @property
    def queries(self) -> Sequence[int]:
        """The tokens to trace back."""
        return range(self.heads.rows) if self.options.queries is None else self.options.queries

    def results(self, device: torch.device) -> Results:
        """Go through the layers from the last to the first."""
        trace = flows if self.options.method == "flow" else rolled_out
        with self.heads.opened(device) as heads:
            return {"values": trace(self._layers(heads), self.queries)} | self.about

    def _layers(self, heads: HeadReader) -> Iterator[Tensor]:
        """The matrix of each layer, the last first."""
        options, tokens, end = self.options, range(heads.rows), len(heads.widths)
        for count in reversed(self.counts):
            parts, end = range(end - count, end), end - count
            layer = (heads.read(range(part, part + 1), tokens)[0] for part in parts)
            if options.method == "relevance":
                yield relevance(layer)
            else:
                yield mixed(layer, options.combine, options.residual, options.discard)


def prepare(request: RolloutRequest, device: Device) -> Job:
    """Bind and plan the rollout of the request's weights. Raises ShapeMismatch and InvalidRequest."""
    weights = request.weights
    check_empty({"weights": weights})
    if weights.ndim not in {3, 4} or not weights.size or weights.shape[-1] != weights.shape[-2]:
        expected = "[layers, heads, tokens, tokens], or [layers, tokens, tokens] of one head"
        raise wrong_shape("weights", expected, weights)
    check_label_count("labels", request.labels, weights.shape[-1], "token")
    count, *heads, tokens, _ = weights.shape
    sent = SentHeads(weights.reshape(-1, tokens, tokens), ("weights",))
    return _job(BoundRollout(request, sent, (heads[0] if heads else 1,) * count), device, off_loop=False)


def prepare_recorded(
    store: RecordingStore, recording: str, request: RecordingRolloutRequest, owner: str | None, device: Device
) -> Job:
    """Bind and plan the rollout of recorded weights. Raises RecordingNotFound and InvalidRequest."""
    info = store.get(recording, RecordingQuery(), owner)
    places = _places(info, request)
    stack = places[0][0].stack
    about = {
        "id": info.id,
        "layers": [place.layer for place, _ in places],
        "tokens": info.tokens[stack],
        "unseen": {name: why for name, why in info.unseen.items() if name.startswith(f"{stack}.")},
    }
    heads = RecordedHeads(store, recording, owner, places, "layers")
    return _job(BoundRollout(request, heads, [shape[0] for _, shape in places], about), device, off_loop=True)


def _places(info: RecordingInfo, request: RecordingRolloutRequest) -> list[Recorded]:
    """The weights to go through, in the order of the model."""
    recorded = {name: placed for name, placed in info.placed("weights").items() if not placed[0].cross}
    order = sorted(recorded.values(), key=lambda placed: (_STACKS.index(placed[0].stack), placed[0].number))
    unseen = [name for name in request.layers or info.unseen if name in info.unseen]
    if unseen and (request.layers or not recorded):
        raise InvalidRequest.at("layers", f"no rollout goes through {unseen[0]}: {info.unseen[unseen[0]]}")
    check_recorded(request.layers, recorded, [place.layer for place, _ in order], "weights of self-attention")
    stack = order[0][0].stack if request.layers is None else recorded[request.layers[0]][0].stack
    chosen = [placed for placed in order if placed[0].stack == stack]
    if request.layers is not None:
        if others := [name for name in request.layers if recorded[name][0].stack != stack]:
            raise InvalidRequest.at(
                "layers", f"{request.layers[0]} and {others[0]} are of different stacks; name layers of one"
            )
        chosen = [placed for placed in chosen if placed[0].layer in request.layers]
    return chosen


def _job(bound: BoundRollout, device: Device, *, off_loop: bool) -> Job:
    tokens, layers, heads = bound.heads.rows, len(bound.counts), sum(bound.counts)
    check_indices("queries", bound.options.queries, tokens, "tokens")
    size, rows, flow = tokens**2, len(bound.queries), bound.options.method == "flow"
    edges = layers * size
    if flow and edges > _MOST_EDGES:
        raise InvalidRequest.at(
            "method",
            f"the flow over {layers} layers of {tokens} tokens has {edges} edges; at most {_MOST_EDGES} are allowed. "
            "Take rollout, or fewer layers",
            limit=_MOST_EDGES,
            actual=edges,
        )
    flops = 4 * heads * size + (0 if flow else 2 * rows * size * (layers - 1))

    def seconds(rates: Rates) -> float:
        searched = rows * tokens * (_EDGE_S * edges + _FLOW_S) if flow else 0.0
        read = 64 * heads * size / rates.bytes_per_s
        return searched + read + 4 * flops / rates.flops_per_s + 20 * heads * rates.overhead_s

    held = 8 * (6 * size + 3 * rows * tokens) + (_EDGE_BYTES * edges if flow else 0)
    plan = Plan(_KERNEL[bound.options.method], flops, held, device.clock.rated(seconds), off_loop)
    return analysis_job(bound, "rollout", plan, device)
