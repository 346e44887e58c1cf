"""Replies as pictures. Drawing needs the extra ``plot``."""

from importlib.util import find_spec

from attention_contract.errors import NotAcceptable
from attention_contract.schemas.complexity import ComplexityReply, ComplexityRequest, Sweep
from attention_contract.wire import JSON, PICTURES

_HALVINGS = 6


def check_drawable(media_type: str) -> None:
    """Raise NotAcceptable for a picture that this server has nothing to draw with."""
    if media_type in PICTURES and find_spec("matplotlib") is None:
        raise NotAcceptable(
            f"Accept: {media_type} is drawn by matplotlib, which this server lacks; install its extra plot "
            f"(attention-service[plot]), or ask for {JSON}",
            offered=[JSON],
        )


def with_sweep(request: ComplexityRequest) -> ComplexityRequest:
    """Return the request with a sweep to draw; the default is doublings up to its length, or to its past."""
    if request.sweep is not None:
        return request
    shape = request.shape
    dimension, last = "length", shape.queries
    if shape.keys not in {None, shape.queries}:
        dimension, last = "keys", shape.keys or 1
    if last == 1 and shape.past:
        dimension, last = "past", shape.past
    values = sorted({max(1, last >> halving) for halving in range(_HALVINGS + 1)})
    if len(values) == 1:
        values = [1 << doubling for doubling in range(_HALVINGS + 1)]
    return request.model_copy(update={"sweep": Sweep.model_validate({"dimension": dimension, "values": values})})


def draw(reply: ComplexityReply, sweep: Sweep, media_type: str) -> bytes:
    """The picture of a reply along the sweep that it has the costs of."""
    from attention_service.api import drawing  # noqa: PLC0415 - where the extra is installed

    return drawing.draw(reply, sweep, PICTURES[media_type])
