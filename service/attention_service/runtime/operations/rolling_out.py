"""Rollout and flow of weights, sent in a request or recorded in a file: planned, and run layer by layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attention_contract.errors import AttentionError, InternalError, InvalidRequest, InvalidTensor
from attention_contract.recording_tensors import Place
from attention_contract.schemas.recordings import RecordingInfo, RecordingQuery
from attention_contract.schemas.rollout import RecordingRolloutRequest, RolloutOptions, RolloutRequest
from attention_service.core.arrays import to_torch
from attention_service.core.rollout import UnfitWeightsError, flows, mixed, relevance, rolled_out
from attention_service.cost.time import Rates
from attention_service.modules.faults import reason
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.binding.bound import check_empty, wrong_shape
from attention_service.runtime.binding.selection import check_indices, check_label_count
from attention_service.runtime.device import Device
from attention_service.runtime.operations.operation import Fields, Results, Uploaded, on_host
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job, Prepared

_KERNEL: Final = {"rollout": "products", "flow": "dinic", "relevance": "products"}
"""The kernel that a reply names."""
_MOST_EDGES: Final = 2**31 - 1
_EDGE_S, _FLOW_S = 5e-8, 3e-4
"""Seconds of a flow: for each edge, and to begin. Measured on one core."""
_EDGE_BYTES: Final = 48
"""Bytes of an edge while a flow is searched."""
Layers = Callable[[ExitStack, torch.device], Iterator[Iterator[Tensor]]]
"""The heads ``[L, L]`` of each layer, the last layer first, until the stack is left."""


@dataclass(frozen=True, eq=False)
class BoundRollout:
    """One rollout or flow, checked."""

    options: RolloutOptions
    layers: Layers
    count: int
    heads: int
    """The heads of all layers together."""
    tokens: int
    refused: Callable[[str], AttentionError]
    """Makes the error for numbers that are no weights."""
    about: Fields = field(default_factory=dict)
    """Further fields of the reply."""

    @property
    def queries(self) -> Sequence[int]:
        """The tokens to trace back."""
        return range(self.tokens) if self.options.queries is None else self.options.queries


def prepare(request: RolloutRequest, device: Device) -> Job:
    """Bind and plan the rollout of the request's weights. Raises ShapeMismatch and InvalidRequest."""
    weights = request.weights
    check_empty({"weights": weights})
    if weights.ndim not in {3, 4} or not weights.size or weights.shape[-1] != weights.shape[-2]:
        expected = "[layers, heads, tokens, tokens], or [layers, tokens, tokens] of one head"
        raise wrong_shape("weights", expected, weights)
    check_label_count("labels", request.labels, weights.shape[-1], "token")
    by_head = weights if weights.ndim == 4 else weights[:, None]

    def layers(stack: ExitStack, device: torch.device) -> Iterator[Iterator[Tensor]]:
        return ((head.to(device) for head in to_torch(layer)) for layer in by_head[::-1])

    def refused(wanted: str) -> AttentionError:
        return InvalidTensor(f"weights: {wanted}", param="weights")

    count, heads, tokens, _ = by_head.shape
    return _job(BoundRollout(request, layers, count, count * heads, tokens, refused), device, laborious=False)


def prepare_recorded(
    store: RecordingStore, recording: str, request: RecordingRolloutRequest, owner: str | None, device: Device
) -> Job:
    """Bind and plan the rollout of recorded weights. Raises RecordingNotFound and InvalidRequest."""
    info = store.get(recording, RecordingQuery(), owner)
    places = _places(info, request)
    first, _ = places[0]

    def layers(stack: ExitStack, device: torch.device) -> Iterator[Iterator[Tensor]]:
        file: Any = stack.enter_context(safe_open(store.path(recording, owner), framework="pt"))
        for place, heads in reversed(places):
            part = file.get_slice(f"{place.layer}.weights")
            yield (part[head : head + 1][0].to(device) for head in range(heads))

    def refused(wanted: str) -> AttentionError:
        return InvalidRequest(f"layers: {wanted} in the recorded weights", param="layers")

    tokens = info.tokens[first.stack]
    about = {"id": info.id, "layers": [place.layer for place, _ in places], "tokens": tokens}
    heads = sum(heads for _, heads in places)
    bound = BoundRollout(request, layers, len(places), heads, len(tokens), refused, about)
    return _job(bound, device, laborious=True)


def _places(info: RecordingInfo, request: RecordingRolloutRequest) -> list[tuple[Place, int]]:
    """The places of the weights to go through in the order of the model, and how many heads each has."""
    recorded = info.placed("weights")
    found = {name: (place, heads) for name, (place, (heads, *_)) in recorded.items() if not place.cross}
    order = sorted(found.values(), key=lambda each: (each[0].stack != "encoder", each[0].number))
    names = [place.layer for place, _ in order]
    if missing := [name for name in request.layers or () if name not in found]:
        raise InvalidRequest(
            f"layers: no weights of self-attention of {missing[0]!r} are recorded; there are "
            f"{', '.join(names) or 'none'}",
            param="layers",
        )
    if not order:
        raise InvalidRequest("id: the recording holds no weights of self-attention; record the tap weights", param="id")
    stack = order[0][0].stack if request.layers is None else found[request.layers[0]][0].stack
    chosen = [(place, heads) for place, heads in order if place.stack == stack]
    if request.layers is not None:
        if others := [name for name in request.layers if found[name][0].stack != stack]:
            raise InvalidRequest(
                f"layers: {request.layers[0]} and {others[0]} are of different stacks; name layers of one",
                param="layers",
            )
        chosen = [(place, heads) for place, heads in chosen if place.layer in request.layers]
    return chosen


def _job(bound: BoundRollout, device: Device, *, laborious: bool) -> Job:
    check_indices("queries", bound.options.queries, bound.tokens, "tokens")
    size, rows, flow = bound.tokens**2, len(bound.queries), bound.options.method == "flow"
    edges = bound.count * size
    if flow and edges > _MOST_EDGES:
        raise InvalidRequest(
            f"method: the flow over {bound.count} layers of {bound.tokens} tokens has {edges} edges; at most "
            f"{_MOST_EDGES} fit. Take rollout, or fewer layers",
            param="method",
            limit=_MOST_EDGES,
            actual=edges,
        )
    flops = 4 * bound.heads * size + (0 if flow else 2 * rows * size * (bound.count - 1))

    def seconds(rates: Rates) -> float:
        searched = rows * bound.tokens * (_EDGE_S * edges + _FLOW_S) if flow else 0.0
        read = 64 * bound.heads * size / rates.bytes_per_s
        return searched + read + 4 * flops / rates.flops_per_s + 20 * bound.heads * rates.overhead_s

    held = 8 * (6 * size + 3 * rows * bound.tokens) + (_EDGE_BYTES * edges if flow else 0)
    plan = Plan(_KERNEL[bound.options.method], flops, held, device.clock.rated(seconds), laborious)
    return Job(Prepared("rollout", plan, "float64", device.torch, RollingOut, watched=False), bound)


@dataclass(eq=False, slots=True)
class RollingOut:
    """The rollout or the flow of one request."""

    bound: BoundRollout
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def upload(self, device: torch.device) -> Uploaded:
        """Nothing: each layer is read when it is needed."""
        self.device = device
        return Uploaded({})

    def launch(self, uploaded: Uploaded) -> Results:
        """Go through the layers from the last to the first. Raises InternalError for a file that cannot be read."""
        bound, options = self.bound, self.bound.options
        with ExitStack() as stack:
            try:
                layers = map(self._layer, bound.layers(stack, self.device))
                trace = flows if options.method == "flow" else rolled_out
                return {"values": trace(layers, bound.queries)} | bound.about
            except UnfitWeightsError as fault:
                raise bound.refused(str(fault)) from fault
            except (SafetensorError, OSError) as fault:
                raise InternalError(f"a recording cannot be read: {reason(fault)}") from fault

    def _layer(self, heads: Iterator[Tensor]) -> Tensor:
        """The matrix of one layer."""
        options = self.bound.options
        if options.method == "relevance":
            return relevance(heads)
        return mixed(heads, options.combine, options.residual, options.discard)

    def collect(self, results: Results) -> Fields:
        """Copy the values to the host."""
        return on_host(results)
