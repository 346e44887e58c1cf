"""Complexity: what a shape or a sweep of shapes would cost, without computing it."""

from typing import Any

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.complexity import ComplexityReply, ComplexityRequest, Cost, RawComplexityRequest, Shape
from attention_service.core import cost
from attention_service.core.arrays import TORCH_DTYPES
from attention_service.core.cost import Workload
from attention_service.core.methods.limits import check_spec
from attention_service.core.positions import check_position
from attention_service.core.types import Widths, added_keys
from attention_service.modules.resident import Module
from attention_service.runtime.device import Device
from attention_service.runtime.placing import check_shape
from attention_service.runtime.planning import choose_kernel
from attention_service.runtime.selecting import check_taps

LARGEST_COUNT = 2**63 - 1
"""What a reader of the reply can hold in a 64-bit integer."""


def report(module: Module | None, request: ComplexityRequest, device: Device, room: int) -> ComplexityReply:
    """The costs of every shape asked for, where a request may need ``room`` bytes at most.

    Raises InvalidRequest for what can't be: sizes, or taps of the spec.
    """
    dtype = _dtype(module, request)
    if module is None:
        check_spec(_raw(request).spec)
    check_taps(request.return_, module.config.spec if module is not None else _raw(request).spec)
    costs = []
    for shape in _shapes(request):
        work = _workload(module, request, shape, device)
        kernel = choose_kernel(work, dtype, device, request.kernel, room)
        costs.append(cost.cost_of(work, shape, kernel, device.clock))
        _check_counts(costs[-1], shape)
    base = _workload(module, request, request.shape, device)
    dimension = request.sweep.dimension if request.sweep else "length"
    values = request.sweep.values if request.sweep else [request.shape.queries]
    return ComplexityReply(
        parameter_count=cost.parameter_count(base),
        costs=costs,
        growth=cost.growth(base, dimension, values, costs[-1].kernel),
    )


def _check_counts(counted: Cost, shape: Shape) -> None:
    """Raise InvalidRequest for a shape whose counts not every reader of JSON has room for."""
    if _largest(counted.model_dump()) > LARGEST_COUNT:
        sizes = ", ".join(f"{name} {size}" for name, size in shape.model_dump(exclude_none=True).items())
        raise InvalidRequest(f"shape: {sizes}: its counts do not fit 64 bits; ask for smaller sizes", param="shape")


def _largest(value: Any) -> int:
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    return value if isinstance(value, int) else 0


def _dtype(module: Module | None, request: ComplexityRequest) -> str:
    if module is not None:
        return module.config.dtype or "float32"
    return _raw(request).dtype


def _raw(request: ComplexityRequest) -> RawComplexityRequest:
    if not isinstance(request, RawComplexityRequest):
        raise TypeError("a request without a module must bring its sizes")
    return request


def _workload(module: Module | None, request: ComplexityRequest, shape: Shape, device: Device) -> Workload:
    if module is not None:
        sizes, spec = module.sizes, module.config.spec
        widths = (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.value_dim)
    else:
        raw = _raw(request)
        sizes, spec = None, raw.spec
        widths = (raw.num_heads, raw.num_kv_heads or raw.num_heads, raw.head_dim, raw.value_dim or raw.head_dim)
        check_position(spec, Widths(*widths))
    check_shape(spec, shape)
    heads, kv_heads, head_dim, value_dim = widths
    return Workload(
        batch=shape.batch,
        queries=shape.queries,
        keys=shape.past + (shape.queries if shape.keys is None else shape.keys) + added_keys(spec),
        past=shape.past,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        itemsize=TORCH_DTYPES[_dtype(module, request)].itemsize,
        spec=spec,
        sizes=sizes,
        taps=frozenset(request.return_),
        inputs=frozenset({"query"} if module is not None and shape.keys is None else {"query", "key", "value"}),
        threads=device.threads,
    )


def _shapes(request: ComplexityRequest) -> list[Shape]:
    if request.sweep is None:
        return [request.shape]
    dimension, shapes = request.sweep.dimension, []
    least = 0 if dimension == "past" else 1
    for index, value in enumerate(request.sweep.values):
        if value < least:
            param = f"sweep.values.{index}"
            raise InvalidRequest(f"{param}: expected a {dimension} of at least {least}, got {value}", param=param)
        varied: dict[str, int] = {"queries": value, "keys": value} if dimension == "length" else {dimension: value}
        shapes.append(request.shape.model_copy(update=varied))
    return shapes
