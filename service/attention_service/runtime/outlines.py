"""Outlines: what requests that differ in their numbers alone have in common, found once and looked up after that."""

from collections.abc import Hashable
from dataclasses import dataclass

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.tensors import Array
from attention_service.core.types import Selection
from attention_service.modules.resident import Module
from attention_service.runtime.bound import Bound
from attention_service.runtime.direct import Direct
from attention_service.runtime.joining import Kind, Size
from attention_service.runtime.planning import Plan

_INPUTS = ("query", "key", "value")
_PLAIN = frozenset({*_INPUTS, "return_", "average_heads", "kernel", "version", "encoding"})
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
    direct: Direct | None
    """How they are answered by as few calls as there can be; None for what asks for more."""
    size: Size
    common: tuple[Hashable, ...] | None
    """What those that run together with it share beside the module; None for what runs alone."""

    def filled(self, module: Module, inputs: dict[str, Array]) -> Bound:
        """The same with the numbers of a request that is like the first."""
        if not self.bound.layout.batched:
            inputs = {name: array[None] for name, array in inputs.items()}
        return self.bound.of(module=module, arrays=inputs)


def inputs_of(request: ForwardRequest) -> dict[str, Array]:
    """The tensors of a request that has an outline, by their field."""
    return {name: array for name in _INPUTS if (array := getattr(request, name)) is not None}


def likeness(module: Module | None, request: ForwardRequest) -> Hashable | None:
    """Equal for requests that have one outline; None where it can't be told as quickly as the outline is made."""
    if module is None or type(request) is not ForwardRequest:
        return None
    values = request.__dict__
    if not all(_absent(values[name]) for name in request.model_fields_set - _PLAIN):
        return None
    key, value = request.key, request.value
    return (
        module.version,
        _form(request.query),
        None if key is None else _form(key),
        None if value is None else _form(value),
        tuple(request.return_),
        request.average_heads,
        request.kernel,
    )


def _absent(value: object) -> bool:
    return value is None or value is False or (isinstance(value, list) and not value)


def _form(array: Array) -> Hashable:
    return type(array), array.dtype, array.shape
