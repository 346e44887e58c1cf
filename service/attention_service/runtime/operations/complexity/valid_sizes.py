"""Possible sizes: those of a valid request to the same module, or with the same spec."""

from attention_contract.schemas.complexity import Shape
from attention_service.core.methods.limits import check_spec
from attention_service.core.positions import check_position
from attention_service.cost import Workload
from attention_service.modules.parameter_input import check_widths
from attention_service.runtime.binding.position_checks import check_shape
from attention_service.runtime.binding.raw_binding import check_raw_spec
from attention_service.runtime.binding.recurrence_binding import check_keys, check_past


def check(work: Workload) -> None:
    """Raise InvalidRequest, naming the field, for sizes that a request would be refused for."""
    spec, sizes = work.spec, work.sizes
    check_spec(spec)
    check_position(spec, work.widths, () if sizes is None else sizes.inputs)
    if sizes is None:
        check_raw_spec(spec)
    else:
        check_widths(spec, sizes.d_model, sizes.key_width)
    check_shape(spec, shape_at(work))
    check_keys(spec, work.sequence_keys, "shape.queries" if work.queries == work.new_keys else "shape.keys")
    if work.past:
        check_past(spec, "shape.past")


def shape_at(work: Workload) -> Shape:
    """Return the shape of a workload, with every default filled in."""
    return Shape.model_construct(batch=work.batch, queries=work.queries, keys=work.new_keys, past=work.past)
