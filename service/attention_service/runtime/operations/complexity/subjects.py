"""Subjects of a cost report: a workload with variable sizes, its device, and the memory there."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.complexity import Alternative, ComplexityRequest, Cost, RawComplexityRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.multihead import Sizes
from attention_service.core.problem import added_keys
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import (
    Datasheet,
    Workload,
    cost_of,
    decode_step,
    exactly,
    parameter_count,
    sent_always,
)
from attention_service.cost.hardware import HARDWARE, find
from attention_service.modules.resident import Module
from attention_service.runtime.binding.raw_binding import two_widths
from attention_service.runtime.binding.selection import check_taps
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity.alternatives import WIDTHS, Given, labels
from attention_service.runtime.operations.complexity.valid_sizes import check, shape_at
from attention_service.runtime.planning.kernel_choice import FORWARD, Computation, able_kernels, choose_kernel

GRADIENTS = Computation("gradients")
LARGEST_SIZE = 2**31 - 1
"""Largest size of one dimension of a shape."""


@dataclass(frozen=True)
class Place:
    """A device and its available memory."""

    device: Device
    room: int
    """Bytes with nothing else in flight, by which kernels are chosen."""
    free: int
    """Bytes that are free now."""
    session_free: int | None = None
    """Bytes that pages of sessions may still take; None for ``free``."""


@dataclass(frozen=True)
class Subject:
    """One attention with variable sizes."""

    label: str
    base: Workload
    dtype: str
    kernel: str | None
    """The requested kernel."""
    place: Place
    given: Given | None = None
    """The alternative; None for the request itself."""

    def at(self, dimension: str, value: int) -> Workload:
        """Return the workload with one size changed. Raises InvalidRequest for an impossible size."""
        if value < (0 if dimension == "past" else 1):
            raise InvalidRequest(f"expected a {dimension} of at least {0 if dimension == 'past' else 1}, got {value}")
        try:
            work = self.base.at(dimension, value)
        except ValueError as fault:
            raise InvalidRequest(str(fault)) from None
        check(work)
        return work

    def kernel_of(self, work: Workload, purpose: Computation = FORWARD) -> str:
        """Return the planner's kernel. Raises KernelUnsuitable if no kernel can compute the workload."""
        return choose_kernel(work, self.dtype, self.place.device, self.kernel, self.place.room, purpose)

    def cost(self, work: Workload) -> Cost:
        """Return the cost of a workload, with the kernels that the planner would choose."""
        try:
            gradients = self.kernel_of(work, GRADIENTS)
        except KernelUnsuitable:
            gradients = None
        step = decode_step(work)
        return cost_of(
            work,
            shape_at(work),
            self.kernel_of(work),
            self.place.device.clock,
            able=able_kernels(exactly(work), self.dtype, self.place.device, None),
            gradients=gradients,
            decode=None if step is None else self.kernel_of(step),
        )


@dataclass(frozen=True)
class RequestedSubjects:
    """A request, its module and its place: the inputs of every subject."""

    module: Module | None
    request: ComplexityRequest
    place: Place
    """The server's own place."""

    @cached_property
    def subject(self) -> Subject:
        """Return the request's own subject."""
        return self._subject(Alternative(hardware=self.request.hardware), "request")

    def alternatives(self) -> list[Subject]:
        """Return the alternatives. Raises InvalidRequest, naming the field, for an impossible one."""
        found = []
        for index, (other, label) in enumerate(zip(self.request.compare, labels(self.request.compare), strict=True)):
            given = Given(index, other)
            try:
                found.append(replace(self._subject(other, label), given=given))
            except InvalidRequest as fault:
                raise given.blamed(fault) from None
        return found

    def _subject(self, other: Alternative, label: str) -> Subject:
        """Return the request with the alternative's changes."""
        request = self.request
        taps = request.return_ if other.return_ is None else other.return_
        dtype = other.dtype or self._dtype
        base = self._base(other.spec or self._spec)
        base = replace(base, itemsize=TORCH_DTYPES[dtype].itemsize, half=dtype == "float16", reply=dtype)
        base = replace(base, taps=frozenset(taps), sent=sent_always(base))
        base = _resized(base, {name: value for name in WIDTHS if (value := getattr(other, name)) is not None})
        check_taps(taps, base.spec)
        check(base)
        place = self._place(other.hardware or request.hardware, dtype, base)
        if request.memory_bytes is not None:
            place = Place(place.device, request.memory_bytes, request.memory_bytes)
        base = replace(base, threads=place.device.threads)
        return Subject(label, base, dtype, other.kernel or request.kernel, place)

    @property
    def _spec(self) -> AttentionSpec:
        return self.module.config.spec if self.module is not None else _raw(self.request).spec

    @property
    def _dtype(self) -> str:
        if self.module is not None:
            return self.module.config.dtype or "float32"
        return _raw(self.request).dtype

    def _base(self, spec: AttentionSpec) -> Workload:
        shape = self.request.shape
        if self.module is not None:
            sizes = replace(self.module.sizes, spec=spec)
            heads, kv_heads, head_dim, value_dim = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.value_dim
            own_key_dim = None
        else:
            sizes, raw = None, _raw(self.request)
            heads, head_dim = raw.num_heads, raw.head_dim
            own_key_dim = _own_key_dim(raw, spec)
            kv_heads, value_dim = raw.num_kv_heads or heads, raw.value_dim or head_dim
        new = shape.queries if shape.keys is None else shape.keys
        return Workload(
            batch=shape.batch,
            queries=shape.queries,
            keys=shape.past + new + added_keys(spec),
            past=shape.past,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            own_key_dim=own_key_dim,
            itemsize=TORCH_DTYPES[self._dtype].itemsize,
            spec=spec,
            sizes=sizes,
            inputs=frozenset(self._inputs(sizes)),
        )

    def _inputs(self, sizes: Sizes | None) -> set[str]:
        """Return the required inputs: keys default to a module's query, and values to the keys, if the widths fit."""
        if sizes is None or self.request.shape.keys is not None:
            return {"query", "key", "value"}
        query, key, value = sizes.inputs
        return {"query"} | ({"key"} if key != query else set()) | ({"value"} if value != key else set())

    def _place(self, name: str | None, dtype: str, base: Workload) -> Place:
        """Return the place of this name, with all memory except a module's parameters; default: the server's own."""
        if name is None:
            return self.place
        hardware = find(name)
        if hardware is None:
            known = ", ".join(device.name for device in HARDWARE.hardware)
            raise InvalidRequest(f"hardware: {name!r} is not in the table; expected one of {known}", param="hardware")
        if dtype not in hardware.tflops:
            raise InvalidRequest(
                f"hardware: the maker of the {hardware.name} states no rate for {dtype}; ask for "
                f"{' or '.join(hardware.tflops)}",
                param="hardware",
            )
        clock = Datasheet.of(hardware, dtype)
        device = Device(torch.device("cuda"), hardware.name, hardware.memory_bytes, clock)
        resident = 0 if base.sizes is None else parameter_count(base) * base.itemsize
        free = max(hardware.memory_bytes - resident, 0)
        return Place(device, free, free)


def _raw(request: ComplexityRequest) -> RawComplexityRequest:
    if not isinstance(request, RawComplexityRequest):
        raise TypeError("a request without a module must bring its sizes")
    return request


def _own_key_dim(request: RawComplexityRequest, spec: AttentionSpec) -> int | None:
    """Return the width of the keys where it differs from the queries'. Raises InvalidRequest for a spec with one."""
    if request.key_dim in {None, request.head_dim}:
        return None
    if not two_widths(spec):
        raise InvalidRequest(
            f"key_dim: this spec takes keys as wide as the queries, head_dim = {request.head_dim}; leave it out, or "
            "take the score additive or bilinear",
            param="key_dim",
        )
    return request.key_dim


def _resized(work: Workload, widths: dict[str, int]) -> Workload:
    """Return the workload with other widths. Raises InvalidRequest, naming the last, for impossible ones."""
    try:
        return work.resized(**widths) if widths else work
    except ValueError as fault:
        name = next(reversed(widths))
        raise InvalidRequest(f"{name}: {fault}", param=name) from None
