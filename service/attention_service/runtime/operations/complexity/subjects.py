"""Subjects of a cost report: a workload with variable sizes, its device, and the memory there."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.costs.complexity import Alternative, ComplexityRequest, RawComplexityRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.attention import taps_of
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import Kernel
from attention_service.core.kernels.materialized import Materialized
from attention_service.core.multihead import Sizes
from attention_service.core.problem import Problem, Selection, Widths
from attention_service.core.slices import phase
from attention_service.core.stages import TAPS, stages
from attention_service.cost import Clock, Datasheet, Estimate, kind_of, parameter_count
from attention_service.cost.datasheet import HARDWARE, find
from attention_service.cost.rehearsal import LARGEST, Seen
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.raw_binding import two_widths
from attention_service.runtime.binding.selection import check_taps
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity.alternatives import WIDTHS, Given, labels
from attention_service.runtime.operations.complexity.valid_sizes import at, check, resized
from attention_service.runtime.operations.differentiation import INPUTS, Targets
from attention_service.runtime.operations.forward import PLAIN, Forward
from attention_service.runtime.operations.gradients import Gradients
from attention_service.runtime.planning.blank_requests import new_request, sizes_of, unsent
from attention_service.runtime.planning.kernel_choice import FAR, able_kernels, choose_kernel, least_bytes
from attention_service.runtime.planning.rehearsals import seen
from attention_service.runtime.planning.request_sizes import RequestSizes

OUTPUT = frozenset({"output"})
Passes = Literal["forward", "gradients"]
LARGEST_SIZE = 2**31 - 1
"""Largest size of one dimension of a shape."""


@dataclass(frozen=True)
class DeviceMemory:
    """A device and its available memory."""

    device: Device
    capacity: int
    """Bytes with nothing else in flight, by which kernels are chosen."""
    free: int
    """Bytes that are free now."""
    session_free: int | None = None
    """Bytes that pages of sessions may still take; None for ``free``."""


@dataclass(frozen=True, eq=False)
class Subject:
    """One attention with variable sizes."""

    label: str
    base: BoundRequest
    """A blank request."""
    taps: frozenset[str]
    """Returned taps."""
    kernel: str | None
    """The requested kernel."""
    place: DeviceMemory
    given: Given | None = None
    """The alternative; None for the request itself."""

    @property
    def clock(self) -> Clock:
        """The clock of its device."""
        return self.place.device.clock

    def at(self, dimension: str, value: int) -> BoundRequest:
        """Return a blank request with one size changed. Raises InvalidRequest for an impossible size."""
        if value < (0 if dimension == "past" else 1):
            raise InvalidRequest(f"expected a {dimension} of at least {0 if dimension == 'past' else 1}, got {value}")
        try:
            bound = at(self.base, dimension, value)
        except ValueError as fault:
            raise InvalidRequest(str(fault)) from None
        check(bound)
        return bound

    def kernel_of(self, bound: BoundRequest, computation: Passes = "forward", capacity: int | None = None) -> str:
        """Return the planner's kernel in ``capacity`` bytes. Raises KernelUnsuitable if none can compute it."""
        device, capacity = self.place.device, self.place.capacity if capacity is None else capacity
        able = able_kernels(bound, device, self.kernel)

        def peak(kernel: str) -> int:
            return self.peak_bytes(bound, kernel, computation, far=capacity)

        return choose_kernel(bound, able, self.clock, capacity, peak, backward=computation == "gradients")

    def peak_bytes(
        self, bound: BoundRequest, kernel: str, computation: Passes, taps: frozenset[str] = OUTPUT, *, far: int
    ) -> int:
        """The peak of a pass; of one that needs far more than ``far`` bytes a lower bound."""
        if (least := least_bytes(bound, kernel)) > FAR * far:
            return least
        if computation == "gradients":
            return self.gradients(bound, kernel).peak_bytes
        return self.forward(bound, kernel, taps).peak_bytes

    def forward(self, bound: BoundRequest, kernel: str, taps: frozenset[str] = OUTPUT) -> Seen:
        """One forward pass with this kernel; of the materialized one each stage is a phase."""
        request: ForwardRequest = PLAIN.model_copy(
            update={"return_": [tap for tap in ("output", *taps_of(bound.spec)) if tap in taps]}
        )

        def operate(bound: BoundRequest, by: str | Kernel) -> Forward:
            return Forward(bound, request, Selection(), StagesAsPhases() if isinstance(by, Materialized) else by)

        smaller = partial(self.forward, kernel=kernel, taps=taps)
        return self._once(("forward", kernel, taps), bound, lambda: seen(bound, kernel, operate, smaller=smaller))

    def gradients(self, bound: BoundRequest, kernel: str) -> Seen:
        """Gradients of everything that comes in and is learned."""
        least = least_bytes(bound, kernel)
        if least > FAR * LARGEST:
            return Seen({"attention": {"workspace": least}}, {})
        smaller = partial(self.gradients, kernel=kernel)
        make = partial(seen, bound, kernel, plain_gradients, first="attention", smaller=smaller)
        return self._once(("gradients", kernel), bound, make)

    def time(self, rehearsal: Seen, bound: BoundRequest, kernel: str, computation: str = "forward") -> Estimate:
        """The predicted time of a pass that was rehearsed."""
        return self.clock.predict(rehearsal.total(), bound.itemsize, kind_of(computation, kernel, bound.dtype))

    def _once(self, question: Hashable, bound: BoundRequest, make: Callable[[], Seen]) -> Seen:
        """Rehearse once for all reports of one device."""
        sizes, device = bound.sizes, self.place.device
        latent = None if sizes is None or sizes.latent is None else sizes.latent.model_dump_json()
        module = None if sizes is None else (sizes.inputs, sizes.biases.model_dump_json(), latent)
        spec = bound.spec.model_dump_json()
        key = "seen", question, spec, bound.dtype, bound.widths, module, device.threads, sizes_of(bound), *bound.arrays
        return device.plans.get(self.clock, key, make)


def plain_gradients(bound: BoundRequest, kernel: str | Kernel) -> Gradients:
    """Gradients of everything that comes in and is learned, and nothing beside them."""
    names = [name for name in INPUTS if name in bound.arrays]
    learned = bound.learned if bound.module is None else bound.module.parameters
    request = unsent(GradientsRequest, wrt=[], return_=[], edits=[], **{name: bound.arrays[name] for name in names})
    return Gradients(bound, request, Selection(), Targets(tuple(names), (), tuple(learned)), kernel)


class StagesAsPhases(Materialized):
    """The materialized kernel, each of whose stages is a phase of a rehearsal."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute every stage, and keep those that are asked for."""
        wanted, tapped = {*taps, "context"} & {*TAPS}, {}
        known = [tap for tap in TAPS if tap != "lse" or tap in wanted]
        for tap, x in stages(problem, known, edits):
            if tap in wanted:
                tapped[tap] = x
            del x
            following = known[known.index(tap) + 1] if tap != "context" else "select"
            if following not in {"k", "v"}:
                phase(following, "taps" if following == "select" else following)
        return tapped


@dataclass(frozen=True)
class RequestedSubjects:
    """A request, its module and its place: the inputs of every subject."""

    module: Module | None
    request: ComplexityRequest
    place: DeviceMemory
    """The server's own place."""

    @cached_property
    def subject(self) -> Subject:
        """Return the request's own subject."""
        return self._subject(Alternative(hardware=self.request.hardware), "request")

    def alternatives(self) -> list[Subject]:
        """Return the alternatives. Raises InvalidRequest, naming the field, for an impossible one."""
        subjects = []
        for index, (other, label) in enumerate(zip(self.request.compare, labels(self.request.compare), strict=True)):
            given = Given(index, other)
            try:
                subjects.append(replace(self._subject(other, label), given=given))
            except InvalidRequest as fault:
                raise given.blamed(fault) from None
        return subjects

    def _subject(self, other: Alternative, label: str) -> Subject:
        """Return the request with the alternative's changes."""
        request = self.request
        taps = request.return_ if other.return_ is None else other.return_
        dtype, spec = other.dtype or self._dtype, other.spec or self._spec
        base = self._base(spec, dtype)
        if widths := {name: value for name in WIDTHS if (value := getattr(other, name)) is not None}:
            base = _resized(base, widths)
        check_taps(taps, spec)
        check(base)
        place = self._place(other.hardware or request.hardware, dtype, base)
        if request.memory_bytes is not None:
            place = DeviceMemory(place.device, request.memory_bytes, request.memory_bytes)
        base = base.replaced(threads=place.device.threads)
        return Subject(label, base, frozenset(taps), other.kernel or request.kernel, place)

    @property
    def _spec(self) -> AttentionSpec:
        return self.module.config.spec if self.module is not None else _raw(self.request).spec

    @property
    def _dtype(self) -> str:
        if self.module is not None:
            return self.module.config.dtype or "float32"
        return _raw(self.request).dtype

    def _base(self, spec: AttentionSpec, dtype: str) -> BoundRequest:
        shape, sizes = self.request.shape, None
        if self.module is not None:
            sizes = replace(self.module.sizes, spec=spec)
            widths = sizes.widths
        else:
            raw = _raw(self.request)
            heads, value_dim = raw.num_heads, raw.value_dim or raw.head_dim
            own = _own_key_dim(raw, spec)
            widths = Widths(heads, raw.num_kv_heads or heads, raw.head_dim, value_dim, own_key_dim=own)
        new = shape.queries if shape.keys is None else shape.keys
        tokens = RequestSizes(shape.batch, shape.queries, new, shape.past)
        return new_request(spec, widths, dtype, tokens, sizes=sizes, inputs=self._inputs(sizes))

    def _inputs(self, sizes: Sizes | None) -> set[str]:
        """Return the required inputs: keys default to a module's query, and values to the keys, if the widths fit."""
        if sizes is None or self.request.shape.keys is not None:
            return {"query", "key", "value"}
        query, key, value = sizes.inputs
        return {"query"} | ({"key"} if key != query else set()) | ({"value"} if value != key else set())

    def _place(self, name: str | None, dtype: str, base: BoundRequest) -> DeviceMemory:
        """Return the place of this name, with all memory except a module's parameters; default: the server's own."""
        if name is None:
            return self.place
        hardware = find(name)
        if hardware is None:
            known = ", ".join(device.name for device in HARDWARE.hardware)
            raise InvalidRequest.at("hardware", f"{name!r} is not in the table; expected one of {known}")
        if dtype not in hardware.tflops:
            raise InvalidRequest.at(
                "hardware",
                f"the maker of the {hardware.name} states no rate for {dtype}; ask for {' or '.join(hardware.tflops)}",
            )
        clock = Datasheet.of(hardware, dtype)
        device = Device(torch.device("cuda"), hardware.name, hardware.memory_bytes, clock)
        resident = 0 if base.sizes is None else parameter_count(base) * base.itemsize
        free = max(hardware.memory_bytes - resident, 0)
        return DeviceMemory(device, free, free)


def _raw(request: ComplexityRequest) -> RawComplexityRequest:
    if not isinstance(request, RawComplexityRequest):
        raise TypeError("a request without a module needs sizes")
    return request


def _own_key_dim(request: RawComplexityRequest, spec: AttentionSpec) -> int | None:
    """Return the width of the keys where it differs from the queries'. Raises InvalidRequest for a spec with one."""
    if request.key_dim in {None, request.head_dim}:
        return None
    if not two_widths(spec):
        raise InvalidRequest.at(
            "key_dim",
            f"this spec takes keys as wide as the queries, head_dim = {request.head_dim}; leave it out, or take the "
            "score additive or bilinear",
        )
    return request.key_dim


def _resized(bound: BoundRequest, widths: dict[str, int]) -> BoundRequest:
    """Return a blank request with other widths. Raises InvalidRequest, naming the last, for impossible ones."""
    try:
        return resized(bound, **widths)
    except ValueError as fault:
        name = next(reversed(widths))
        raise InvalidRequest.at(name, str(fault)) from None
