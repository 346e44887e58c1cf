"""Checks of a position encoding against the widths of a module or a request."""

from collections.abc import Sequence

from attention_contract.errors import InvalidRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.positions.base import POSITIONS
from attention_service.core.problem import Widths


def check_position(spec: AttentionSpec, widths: Widths, inputs: Sequence[int] = (), at: str = "spec") -> None:
    """Raise InvalidRequest if an encoding does not fit these widths; the error names the option under ``at``.

    inputs: how wide query, key and value of a module come; none for raw attention.
    """
    fault = POSITIONS.of(spec.position).fault(widths, inputs)
    if fault is not None:
        option, why = fault
        param = f"{at}.position.{option}" if option else f"{at}.position"
        raise InvalidRequest.at(param, why)
