"""The reply: costs along a sweep, growth, limits and alternatives."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attention_contract.errors import InvalidRequest, KernelUnsuitable
from attention_contract.schemas.costs.complexity import (
    Compared,
    ComplexityReply,
    ComplexityRequest,
    Cost,
    Growth,
    Omitted,
)
from attention_service import cost
from attention_service.core.cancellation import checkpoint
from attention_service.core.methods import approximation_of
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.operations.complexity.alternatives import renamed
from attention_service.runtime.operations.complexity.capacity import last_that, limits
from attention_service.runtime.operations.complexity.crossovers import crossovers
from attention_service.runtime.operations.complexity.growth import growth
from attention_service.runtime.operations.complexity.session_price import price
from attention_service.runtime.operations.complexity.shape_cost import cost_of
from attention_service.runtime.operations.complexity.subjects import (
    LARGEST_SIZE,
    DeviceMemory,
    RequestedSubjects,
    Subject,
)
from attention_service.runtime.operations.complexity.valid_sizes import at

MOST_COSTS = 512
"""Maximum number of costs in one reply: values of the sweep, for the request and each alternative."""
LARGEST_COUNT = 2**63 - 1
"""The largest 64-bit integer, which every reader of the reply can hold."""


def report(
    module: Module | None, request: ComplexityRequest, place: DeviceMemory, until: float = math.inf
) -> ComplexityReply:
    """Return the costs of every requested shape, the limits, and the same for every alternative.

    Parts that are not known ``until`` a time of ``time.monotonic`` are left out: values of the sweep beyond the first,
    alternatives, crossovers. Raises InvalidRequest for impossible sizes and taps.
    """
    requested = RequestedSubjects(module, request, place)
    subject = requested.subject
    others = requested.alternatives()
    _check_alternatives(request)
    costs, omitted = _costs(subject, request, until), list[Omitted]()
    if request.sweep is not None and len(costs) < len(request.sweep.values):
        sweep = request.sweep.model_copy(update={"values": request.sweep.values[: len(costs)]})
        request = request.model_copy(update={"sweep": sweep})
        omitted.append("costs")
    first, rest = _compared(subject, request, costs), list[Compared]()
    for other in others:
        if time.monotonic() > until or len(costs := _costs(other, request, until)) < len(first.costs):
            omitted.append("compared")
            break
        rest.append(_compared(other, request, costs))
    dimension, values = swept(request)
    crossing, whole = crossovers([subject, *others[: len(rest)]], dimension, values, until) if rest else ([], True)
    if not whole:
        omitted.append("crossovers")
    return ComplexityReply(
        device_name=first.device_name,
        parameter_count=first.parameter_count,
        costs=first.costs,
        growth=first.growth,
        limits=first.limits,
        projections_crossover=_projections_crossover(subject.base),
        compared=[first, *rest] if rest else [],
        crossovers=crossing,
        omitted=omitted or None,
        session=None if request.session is None else price(subject, request.session),
    )


def _check_alternatives(request: ComplexityRequest) -> None:
    """Raise InvalidRequest for alternatives without a value of the sweep, and for more costs than one reply has."""
    values = len(request.sweep.values) if request.sweep else 1
    if values * (1 + len(request.compare)) > MOST_COSTS:
        raise InvalidRequest.at(
            "sweep.values",
            f"{values} values for each of {1 + len(request.compare)} make more than {MOST_COSTS} costs; give fewer "
            "values, or compare fewer",
            limit=MOST_COSTS,
        )
    for index, other in enumerate(request.compare):
        if request.sweep and getattr(other, request.sweep.dimension, None) is not None:
            param = f"compare.{index}.{request.sweep.dimension}"
            raise InvalidRequest.at(param, "the sweep varies it; leave it out, or sweep something else")


def swept(request: ComplexityRequest) -> tuple[str, list[int]]:
    """Return the varied size and its values; without a sweep the length, and its one value."""
    if request.sweep is None:
        return "length", [request.shape.queries]
    return request.sweep.dimension, request.sweep.values


def _compared(subject: Subject, request: ComplexityRequest, costs: list[Cost]) -> Compared:
    with _named(subject):
        fits = limits(subject)
    return Compared(
        label=subject.label,
        device_name=subject.place.device.name,
        parameter_count=cost.parameter_count(subject.base),
        costs=costs,
        growth=_growth(subject, request, costs),
        limits=fits,
    )


def _costs(subject: Subject, request: ComplexityRequest, until: float) -> list[Cost]:
    """Return one cost per value of the sweep, at least one and otherwise no more than are known ``until`` then.

    Raises InvalidRequest, naming the field, for an impossible value.
    """
    if request.sweep is None:
        with _named(subject):
            return [_counted(subject, subject.base)]
    dimension, costs = request.sweep.dimension, list[Cost]()
    for index, value in enumerate(request.sweep.values):
        checkpoint()
        if costs and time.monotonic() > until:
            break
        with _named(subject, f"sweep.values.{index}", f"at {dimension} {value}: "):
            costs.append(_counted(subject, subject.at(dimension, value)))
    return costs


@contextmanager
def _named(subject: Subject, param: str | None = None, when: str = "") -> Iterator[None]:
    """Errors name a field of the request: an alternative's own field, otherwise ``param`` if given.

    The request itself is checked before any alternative, so its own fields are valid.
    """
    try:
        yield
    except InvalidRequest as fault:
        if subject.given is not None:
            raise subject.given.blamed(fault, when) from None
        if param is not None and not isinstance(fault, KernelUnsuitable):
            raise renamed(fault, param) from None
        raise


def _growth(subject: Subject, request: ComplexityRequest, costs: list[Cost]) -> Growth:
    dimension, values = swept(request)
    kernel = costs[max(range(len(values)), key=values.__getitem__)].kernel
    try:
        return growth(subject, dimension, values, kernel)
    except ValueError as fault:  # one value alone, whose double can't be
        raise InvalidRequest.at("sweep.values", f"{fault}; give two different values") from None


def _projections_crossover(base: BoundRequest) -> int | None:
    """Return the length from which scores and their weighted sum take as many products as the projections."""
    if base.module is None or approximation_of(base.spec) is not None:
        return None

    def fewer(length: int) -> bool:
        stages = cost.flops(at(base, "length", length), masked=False)
        return stages.scores + stages.values < stages.projections + stages.output_projection

    below = last_that(fewer, LARGEST_SIZE)
    return None if below == LARGEST_SIZE else below + 1


def _counted(subject: Subject, bound: BoundRequest) -> Cost:
    """Return the cost of a shape. Raises InvalidRequest if a count does not fit a 64-bit integer."""
    counted = cost_of(subject, bound)
    if _largest(counted.model_dump()) > LARGEST_COUNT:
        sizes_sent = counted.shape.model_dump(exclude_none=True)
        param = f"shape.{max(sizes_sent, key=sizes_sent.__getitem__)}"
        sizes = ", ".join(f"{name} {size}" for name, size in sizes_sent.items())
        raise InvalidRequest.at(param, f"{sizes}: the counts do not fit 64 bits; ask for smaller sizes")
    return counted


def _largest(value: Any) -> int:
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    return value if isinstance(value, int) else 0
