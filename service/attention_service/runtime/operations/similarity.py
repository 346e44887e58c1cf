"""Comparison of heads and layers, sent in a request or recorded in files: planned, and run tile by tile."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch

from attention_contract.errors import AttentionError, InvalidRequest
from attention_contract.recording_tensors import AXES, RecordedStack, TensorPlace, place_of
from attention_contract.schemas.analyses.similarity import (
    ComparedPart,
    Measure,
    RecordingSimilarityRequest,
    SimilarityRequest,
)
from attention_contract.schemas.recordings import RecordingInfo, RecordingQuery
from attention_contract.tensors import Array
from attention_service.core.inspection.similarity import divergences, linear_cka
from attention_service.cost import SimilarityWork
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.binding.bound_request import check_empty, wrong_shape
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.analysis.base import analysis_job
from attention_service.runtime.operations.analysis.heads import Heads, Recorded, RecordedHeads, SentHeads
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job
from attention_service.runtime.scheduling.operation import Fields, Results

TILES: Final = "tiles"
"""The kernel that a reply names."""


@dataclass(frozen=True, eq=False)
class BoundComparison:
    """One comparison, checked."""

    measure: Measure
    a: Heads
    b: Heads | None
    """None for the heads or layers of ``a``."""
    about: Fields = field(default_factory=dict)
    """Further fields of the reply."""

    def results(self, device: torch.device) -> Results:
        """Compare all pairs."""
        compare = divergences if self.measure == "jensen_shannon" else linear_cka
        with self.a.opened(device) as a, nullcontext() if self.b is None else self.b.opened(device) as b:
            return {"measure": self.measure, "values": compare(a, b)} | self.about


def prepare(request: SimilarityRequest, device: Device) -> Job:
    """Bind and plan a comparison of the request's tensors. Raises ShapeMismatch."""
    a = _sent(request.a, "a")
    b = None if request.b is None else _sent(request.b, "b")
    check_empty({"a": request.a} if request.b is None else {"a": request.a, "b": request.b})
    if b is not None and request.b is not None:
        if request.measure == "jensen_shannon" and (b.rows, b.widths[0]) != (a.rows, a.widths[0]):
            raise wrong_shape("b", f"weights of {a.rows} queries and {a.widths[0]} keys, as in a", request.b)
        if b.rows != a.rows:
            raise wrong_shape("b", f"features of {a.rows} tokens, as in a", request.b)

    return _job(BoundComparison(request.measure, a, b), device, off_loop=False)


def _sent(array: Array, name: str) -> SentHeads:
    if array.ndim not in {2, 3} or 0 in array.shape[:-2] or not array.shape[-1]:
        raise wrong_shape(name, "[heads, queries, keys] or [heads, tokens, width], of one head without heads", array)
    return SentHeads(array if array.ndim == 3 else array[None], ("a", "b"))


def prepare_recorded(
    store: RecordingStore, recording: str, request: RecordingSimilarityRequest, owner: str | None, device: Device
) -> Job:
    """Bind and plan a comparison of recorded tensors.

    Raises RecordingNotFound, which names the field, and InvalidRequest.
    """
    info = store.get(recording, RecordingQuery(), owner)
    other, columns = info, None
    rows = _recorded(info, request.tensor, request.layers, "layers")
    if request.with_ is not None:
        other = _other(store, request.with_, owner)
        layers = request.layers if request.with_layers is None else request.with_layers
        columns = _recorded(other, request.tensor, layers, "with_layers" if request.with_layers else "with")
        _check_same_tokens(info, rows[0], other, columns[0])
    a = RecordedHeads(store, info.id, owner, rows, "tensor")
    b = None if columns is None else RecordedHeads(store, other.id, owner, columns, "tensor")
    parts = _parts(info, rows)
    about = {"id": info.id, "with": other.id, "tokens": a.rows, "rows": parts}
    about["columns"] = parts if columns is None else _parts(other, columns)
    measure: Measure = "jensen_shannon" if request.tensor == "weights" else "cka"
    return _job(BoundComparison(measure, a, b, about), device, off_loop=True)


def _other(store: RecordingStore, recording: str, owner: str | None) -> RecordingInfo:
    try:
        return store.get(recording, RecordingQuery(), owner)
    except AttentionError as fault:
        fault.param = "with"
        raise


def _recorded(info: RecordingInfo, kind: str, layers: Sequence[str] | None, param: str) -> list[Recorded]:
    """The tensors of one kind, in the order of the layers. Raises InvalidRequest unless they have the same tokens."""
    recorded: dict[str, Recorded] = info.placed(kind)
    order = sorted(
        recorded, key=lambda name: (recorded[name][0].stack, recorded[name][0].number, recorded[name][0].cross)
    )
    if missing := [name for name in layers or () if name not in recorded]:
        raise InvalidRequest.at(
            param, f"no {kind} of {missing[0]!r} is recorded in {info.id}; there are {', '.join(order) or 'none'}"
        )
    if not order:
        raise InvalidRequest.at(
            "tensor", f"the recording {info.id} holds no {kind}; it has {', '.join(_kinds(info)) or 'no tensors'}"
        )
    chosen = [recorded[name] for name in layers or order]
    for place, _ in chosen:
        if _stacks(place) != _stacks(chosen[0][0]):
            raise InvalidRequest.at(
                param,
                f"{chosen[0][0].layer} and {place.layer} have different tokens; name layers of one stack, and either "
                "self-attention or cross-attention",
            )
    return chosen


def _kinds(info: RecordingInfo) -> list[str]:
    return sorted({place.kind for tensor in info.tensors if (place := place_of(tensor.name)) is not None})


def _stacks(place: TensorPlace) -> tuple[RecordedStack, ...]:
    """The stacks whose tokens count the rows, and the keys of weights."""
    axes = AXES[place.kind]
    stacks = {"queries": place.stack, "keys": place.key_stack}
    return tuple(stacks[axis] for axis in axes if axis in stacks)


def _check_same_tokens(info: RecordingInfo, of: Recorded, other: RecordingInfo, others: Recorded) -> None:
    for stack, its in zip(_stacks(of[0]), _stacks(others[0]), strict=True):
        if info.tokens[stack] != other.tokens[its]:
            raise InvalidRequest.at(
                "with",
                f"the recording {other.id} has other tokens than {info.id}; compare recordings of the same text by "
                "the same tokenizer",
            )


def _parts(info: RecordingInfo, places: Sequence[Recorded]) -> list[ComparedPart]:
    parts = []
    for place, shape in places:
        if AXES[place.kind][0] != "heads":
            parts.append(ComparedPart(layer=place.layer))
            continue
        attention = info.attention(place.layer)
        labels = [str(head) for head in range(shape[0])]
        if attention is not None and len(attention.heads) == shape[0]:
            labels = list(attention.heads)
        parts += [ComparedPart(layer=place.layer, head=label) for label in labels]
    return parts


def _job(bound: BoundComparison, device: Device, *, off_loop: bool) -> Job:
    b = bound.b or bound.a
    work = SimilarityWork(bound.a.rows, bound.a.widths, b.widths, bound.measure == "cka", bound.b is None)
    plan = Plan(TILES, work.flops, work.peak_bytes, device.clock.rated(work.seconds), off_loop)
    return analysis_job(bound, "similarity", plan, device)
