"""Comparison of heads and layers, sent in a request or recorded in files: planned, and run tile by tile."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attention_contract.errors import AttentionError, InternalError, InvalidRequest, InvalidTensor
from attention_contract.recording_tensors import AXES, Place, RecordedStack, place_of
from attention_contract.schemas.recordings import RecordingInfo, RecordingQuery
from attention_contract.schemas.similarity import ComparedPart, Measure, RecordingSimilarityRequest, SimilarityRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import to_torch
from attention_service.core.similarity import Compared, UnfitNumbers, divergences, linear_cka
from attention_service.cost import SimilarityWork
from attention_service.modules.faults import reason
from attention_service.modules.recording_store import RecordingStore
from attention_service.runtime.binding.bound import check_empty, wrong_shape
from attention_service.runtime.device import Device
from attention_service.runtime.operations.operation import Fields, Results, Uploaded, on_host
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job, Prepared

TILES: Final = "tiles"
"""The kernel that a reply names."""
Open = Callable[[ExitStack, torch.device], Compared]
"""Opens one side of a comparison until the stack is left."""


@dataclass(frozen=True, eq=False)
class Side:
    """The heads or layers of one side."""

    open: Open
    widths: tuple[int, ...]
    rows: int


@dataclass(frozen=True, eq=False)
class BoundComparison:
    """One comparison, checked."""

    measure: Measure
    a: Side
    b: Side | None
    """None for the heads or layers of ``a``."""
    refused: Callable[[str], AttentionError]
    """Makes the error for numbers that have no similarity."""
    about: Fields = field(default_factory=dict)
    """Further fields of the reply."""


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

    def refused(wanted: str) -> AttentionError:
        return InvalidTensor(f"a, b: {wanted}", param="a")

    return _job(BoundComparison(request.measure, a, b, refused), device, laborious=False)


def _sent(array: Array, name: str) -> Side:
    if array.ndim not in {2, 3} or 0 in array.shape[:-2] or not array.shape[-1]:
        raise wrong_shape(name, "[heads, queries, keys] or [heads, tokens, width], of one head without heads", array)
    heads = array if array.ndim == 3 else array[None]

    def opened(stack: ExitStack, device: torch.device) -> Compared:
        held = to_torch(heads).to(device)
        return Compared(lambda parts, rows: held[_slice(parts), _slice(rows)].double(), widths, rows)

    widths, rows = (heads.shape[2],) * heads.shape[0], heads.shape[1]
    return Side(opened, widths, rows)


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
    sides = [
        None if places is None else _side(store, of.id, places, of, owner)
        for of, places in ((info, rows), (other, columns))
    ]
    a, b = sides
    if a is None:
        raise TypeError("a recording is compared")

    def refused(wanted: str) -> AttentionError:
        return InvalidRequest(f"tensor: {wanted} in the recorded {request.tensor}", param="tensor")

    parts = _parts(info, rows)
    about = {"id": info.id, "with": other.id, "tokens": a.rows, "rows": parts}
    about["columns"] = parts if columns is None else _parts(other, columns)
    measure: Measure = "jensen_shannon" if request.tensor == "weights" else "cka"
    return _job(BoundComparison(measure, a, b, refused, about), device, laborious=True)


def _other(store: RecordingStore, recording: str, owner: str | None) -> RecordingInfo:
    try:
        return store.get(recording, RecordingQuery(), owner)
    except AttentionError as fault:
        fault.param = "with"
        raise


Recorded = tuple[Place, tuple[int, ...]]
"""The place and the shape of a recorded tensor."""


def _recorded(info: RecordingInfo, kind: str, layers: Sequence[str] | None, param: str) -> list[Recorded]:
    """The tensors of one kind, in the order of the layers. Raises InvalidRequest unless they have the same tokens."""
    found: dict[str, Recorded] = info.placed(kind)
    order = sorted(found, key=lambda name: (found[name][0].stack, found[name][0].number, found[name][0].cross))
    if missing := [name for name in layers or () if name not in found]:
        raise InvalidRequest(
            f"{param}: no {kind} of {missing[0]!r} is recorded in {info.id}; there are {', '.join(order) or 'none'}",
            param=param,
        )
    if not order:
        raise InvalidRequest(
            f"tensor: the recording {info.id} holds no {kind}; it has {', '.join(_kinds(info)) or 'no tensors'}",
            param="tensor",
        )
    chosen = [found[name] for name in layers or order]
    for place, _ in chosen:
        if _stacks(place) != _stacks(chosen[0][0]):
            raise InvalidRequest(
                f"{param}: {chosen[0][0].layer} and {place.layer} have different tokens; name layers of one stack, and "
                "either self-attention or cross-attention",
                param=param,
            )
    return chosen


def _kinds(info: RecordingInfo) -> list[str]:
    return sorted({place.kind for tensor in info.tensors if (place := place_of(tensor.name)) is not None})


def _stacks(place: Place) -> tuple[RecordedStack, ...]:
    """The stacks whose tokens count the rows, and the keys of weights."""
    axes = AXES[place.kind]
    stacks = {"queries": place.stack, "keys": place.key_stack}
    return tuple(stacks[axis] for axis in axes if axis in stacks)


def _check_same_tokens(info: RecordingInfo, of: Recorded, other: RecordingInfo, others: Recorded) -> None:
    for stack, its in zip(_stacks(of[0]), _stacks(others[0]), strict=True):
        if info.tokens[stack] != other.tokens[its]:
            raise InvalidRequest(
                f"with: the recording {other.id} has other tokens than {info.id}; compare recordings of the same text "
                "by the same tokenizer",
                param="with",
            )


def _parts(info: RecordingInfo, places: Sequence[Recorded]) -> list[ComparedPart]:
    found = []
    for place, shape in places:
        if AXES[place.kind][0] != "heads":
            found.append(ComparedPart(layer=place.layer))
            continue
        attention = info.attention(place.layer)
        labels = [str(head) for head in range(shape[0])]
        if attention is not None and len(attention.heads) == shape[0]:
            labels = list(attention.heads)
        found += [ComparedPart(layer=place.layer, head=label) for label in labels]
    return found


def _side(
    store: RecordingStore, recording: str, places: Sequence[Recorded], info: RecordingInfo, owner: str | None
) -> Side:
    """Heads or layers of a recording, read from its file."""
    heads = [
        (f"{place.layer}.{place.kind}", head)
        for place, shape in places
        for head in (range(shape[0]) if len(shape) == 3 else (None,))
    ]
    widths = tuple(shape[-1] for _, shape in places for _ in range(shape[0] if len(shape) == 3 else 1))

    def opened(stack: ExitStack, device: torch.device) -> Compared:
        file: Any = stack.enter_context(safe_open(store.path(recording, owner), framework="pt"))
        slices = {name: file.get_slice(name) for name in dict.fromkeys(name for name, _ in heads)}

        def read(parts: range, rows: range) -> Tensor:
            found = []
            for name, head in heads[_slice(parts)]:
                part = slices[name]
                at = part[_slice(rows)] if head is None else part[head : head + 1, _slice(rows)][0]
                found.append(at.to(device).double())
            return torch.stack(found)

        return Compared(read, widths, places[0][1][-2])

    return Side(opened, widths, places[0][1][-2])


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)


def _job(bound: BoundComparison, device: Device, *, laborious: bool) -> Job:
    b = bound.b or bound.a
    work = SimilarityWork(bound.a.rows, bound.a.widths, b.widths, bound.measure == "cka", bound.b is None)
    plan = Plan(TILES, work.flops, work.peak_bytes, device.clock.rated(work.seconds), laborious)
    return Job(Prepared("similarity", plan, "float64", device.torch, Comparison, watched=False), bound)


@dataclass(eq=False, slots=True)
class Comparison:
    """The similarity of every pair of one request."""

    bound: BoundComparison
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def upload(self, device: torch.device) -> Uploaded:
        """Nothing: each tile is read when it is needed."""
        self.device = device
        return Uploaded({})

    def launch(self, uploaded: Uploaded) -> Results:
        """Compare all pairs. Raises InternalError for a file that cannot be read."""
        bound = self.bound
        with ExitStack() as stack:
            try:
                a = bound.a.open(stack, self.device)
                b = None if bound.b is None else bound.b.open(stack, self.device)
                values = (divergences if bound.measure == "jensen_shannon" else linear_cka)(a, b)
            except UnfitNumbers as fault:
                raise bound.refused(str(fault)) from fault
            except (SafetensorError, OSError) as fault:
                raise InternalError(f"a recording cannot be read: {reason(fault)}") from fault
        return {"measure": bound.measure, "values": values} | bound.about

    def collect(self, results: Results) -> Fields:
        """Copy the similarities to the host."""
        return on_host(results)
