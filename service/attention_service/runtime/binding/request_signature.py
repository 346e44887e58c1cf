"""Outlines: what requests that differ in their numbers alone have in common, found once and looked up after that."""

from collections.abc import Hashable
from dataclasses import dataclass

from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.tensors import Array
from attention_service.core.types import Selection
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound, widened
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.scheduling.joining import Kind, Size

_INPUTS = ("query", "key", "value")
_PLAIN = frozenset({*_INPUTS, "return_", "average_heads", "kernel", "version", "encoding"})
_PLAIN_OF_RAW = _PLAIN - {"version"} | {"spec", "num_heads", "num_kv_heads"}
"""Fields of which shapes and dtypes are checked, and numbers are not."""


@dataclass(frozen=True)
class Outline:
    """A bound and planned request without its numbers and its module."""

    bound: Bound
    selection: Selection
    plan: Plan
    kind: Kind
    watched: bool
    """Whether requests of its kind are among those that a calibration measures."""
    size: Size
    common: tuple[Hashable, ...] | None
    """What those that run together with it share beside the module; None for what runs alone."""

    def filled(self, module: Module | None, inputs: dict[str, Array]) -> Bound:
        """The same with the numbers of a request that is like the first."""
        layout = self.bound.layout
        if not (layout.batched and layout.headed):
            inputs = {name: widened(array, layout) for name, array in inputs.items()}
        return self.bound.of(module=module, arrays=inputs)


def inputs_of(request: ForwardRequest) -> dict[str, Array]:
    """The tensors of a request that has an outline, by their field."""
    return {name: array for name in _INPUTS if (array := getattr(request, name)) is not None}


def likeness(module: Module | None, request: ForwardRequest) -> Hashable | None:
    """Equal for requests that have one outline; None where it can't be told as quickly as the outline is made.

    module: None for raw attention.
    """
    if type(request) is not (RawForwardRequest if module is None else ForwardRequest):
        return None
    values, plain = request.__dict__, _PLAIN_OF_RAW if module is None else _PLAIN
    if not all(_absent(values[name]) for name in request.model_fields_set - plain):
        return None
    key, value = request.key, request.value
    return (
        _spec_of(request) if module is None else module.version,
        _form(request.query),
        None if key is None else _form(key),
        None if value is None else _form(value),
        tuple(request.return_),
        request.average_heads,
        request.kernel,
    )


def _spec_of(request: ForwardRequest) -> Hashable:
    """What raw attention brings where another has its module."""
    if not isinstance(request, RawForwardRequest):
        raise TypeError("only raw attention brings its spec")
    return request.spec.model_dump_json(), request.num_heads, request.num_kv_heads


def _absent(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list | dict) and not value)


def _form(array: Array) -> Hashable:
    return type(array), array.dtype, array.shape
