"""Replies as pictures. Drawing needs the extra ``plot``."""

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest, NotAcceptable
from attention_contract.operations import Operation
from attention_contract.schemas.analyses.attribution import SIGNED_METHODS, AttributionRequest
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.attention import ForwardRequest, Select, token_counts
from attention_contract.schemas.costs.complexity import ComplexityRequest
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.schemas.model_requests import ModelWeightsRequest
from attention_contract.schemas.picture_options import DIVERGING, SEQUENTIAL, PictureOptions
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.validation import validate
from attention_contract.wire import JSON
from attention_service import __version__
from attention_service.runtime.scheduling.budget import Budget

ResultT = TypeVar("ResultT")

_HALVINGS = 6
_CELLS = 1024
"""Cells a side, at least, of weights that are pooled before they are drawn."""
_SHARED_RANGE = 2**22
"""Numbers of all selected heads up to which a picture of one head has the colour range of all of them."""
_one_at_a_time: RunVar[CapacityLimiter] = RunVar("drawing")
"""Matplotlib draws in one thread at a time; the others' threads stay free while they wait."""


def check_drawable(media_type: str) -> None:
    """Raise NotAcceptable for a picture if this server has nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise NotAcceptable(
            f"Accept: {media_type} is drawn by matplotlib, which this server lacks; install its extra plot "
            f"(attention-service[plot]), or ask for {JSON}",
            offered=[JSON],
        )


def options_of(query: Mapping[str, str], operation: Operation[Any]) -> PictureOptions:
    """Read the options of a picture. Raises InvalidRequest for a view that the operation lacks."""
    options = validate(PictureOptions, query, by_name=False)
    if options.view is not None and options.view not in operation.pictures:
        raise InvalidRequest.at(
            "view", f"{operation.name} has no view {options.view!r}; expected {' or '.join(operation.pictures)}"
        )
    return options


def with_needs(request: Any, options: PictureOptions, heads: int | None, past: int = 0) -> Any:
    """Return the request with what its picture needs, and without what it does not show.

    ``heads``: those of the module; None for raw attention, which has those of the query. ``past``: tokens of the
    session. Raises InvalidRequest if the request and the options contradict each other.
    """
    if isinstance(request, ComplexityRequest):
        return _with_sweep(request)
    if isinstance(request, ForwardRequest):
        _check_palette(options, signed=True)
        return request.model_copy(update={"return_": ["output"]})
    if isinstance(request, AttributionRequest):
        method = request.methods[0]
        _check_palette(options, signed=request.compare is not None or method in SIGNED_METHODS)
        update: dict[str, Any] = {"methods": [method]}
    elif isinstance(request, WeightsRequest):
        _check_palette(options, signed=request.compare is not None)
        if options.view == "statistics":
            return request.model_copy(update={"return_weights": False, "top_k": 0})
        pool = _pool(request, past)
        update = {"return_weights": pool is None, "pool": pool, "top_k": 0, "statistics": []}
    elif isinstance(request, ModelWeightsRequest):
        _check_palette(options, signed=request.compare is not None)
        narrows = "select" if request.select is not None else "average_heads" if request.average_heads else None
        if options.view == "statistics" and narrows is not None:
            raise InvalidRequest.at(narrows, "the view statistics covers every head; leave it out, or take view heads")
        alone = request.layers != "all" and len(request.layers) == 1
        whole = options.view != "statistics" and (alone or options.view is not None or narrows is not None)
        return request.model_copy(update={"return_weights": whole and request.pool is None, "top_k": 0})
    else:
        return request
    if options.view in {"head", "lines"} and not getattr(request, "average_heads", False):
        one, count = _one_head(request, options.head, heads)
        if count * math.prod(token_counts(request, past)) > _SHARED_RANGE:
            update["select"] = one
    return request.model_copy(update=update)


def _pool(request: WeightsRequest, past: int) -> int | None:
    """The tokens of a square by which long weights are pooled where they are computed; None for short ones."""
    longest = max(token_counts(request, past))
    return longest // _CELLS if longest >= 2 * _CELLS and not request.average_heads else None


def _check_palette(options: PictureOptions, *, signed: bool) -> None:
    """Raise InvalidRequest for a palette that does not suit numbers with or without a sign."""
    if options.palette in (SEQUENTIAL if signed else DIVERGING):
        needed, known = ("numbers with a sign", DIVERGING) if signed else ("numbers without a sign", SEQUENTIAL)
        raise InvalidRequest.at(
            "palette", f"{options.palette} does not suit {needed}; expected one of {', '.join(known)}"
        )


def _one_head(request: WeightsRequest | AttributionRequest, head: int | None, heads: int | None) -> tuple[Select, int]:
    """The selection with the one head to draw, and the number of those selected."""
    if heads is None:
        shape = np.shape(request.query)
        heads = getattr(request, "num_heads", None) or (shape[-3] if len(shape) > 2 else 1)
    selected = request.select.heads if request.select is not None else None
    shown = head if head is not None else selected[0] if selected else 0
    if head is not None and (head >= heads or (selected and head not in selected)):
        expected = f"one of select.heads, {selected[:16]}" if selected else f"a head below {heads}"
        raise InvalidRequest.at("head", f"expected {expected}, got {head}")
    one = Select(heads=[shown], queries=None if request.select is None else request.select.queries)
    return one, len(selected) if selected else heads


def _with_sweep(request: ComplexityRequest) -> ComplexityRequest:
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


async def draw(
    reply: Any, request: WireModel, options: PictureOptions, media_type: str, facts: Mapping[str, Any], budget: Budget
) -> Picture:
    """Draw a reply in another thread, with the memory of its pixels from the budget. ``facts`` become metadata.

    Raises InvalidRequest for a head that is not there or too many pixels, and what ``Budget.acquire`` raises.
    """
    from attention_pictures import figures as drawing  # noqa: PLC0415 - where the extra is installed

    try:
        limiter = _one_at_a_time.get()
    except LookupError:
        limiter = CapacityLimiter(1)
        _one_at_a_time.set(limiter)
    title = (
        facts.get("module")
        or facts.get("model")
        or (f"recording {facts['recording'][:8]}" if "recording" in facts else "")
    )
    stated = drawing.facts_of(reply, options) | dict(facts) | {"software": f"attention-service {__version__}"}
    names = drawing.names_of(request, title, facts.get("past", 0))
    async with limiter:
        decoded = drawing.making_bytes(names) if options.view == "image" else 0
        budget.check(decoded, "decoding the image takes {need} bytes", "Send a smaller one")
        async with budget.holding(decoded):
            figure = await _in_thread(partial(drawing.make_figure, reply, options, names))
        need = drawing.saving_bytes(figure, media_type)
        budget.check(need, "drawing the picture takes {need} bytes", "Lower its width or dpi, or ask for SVG")
        async with budget.holding(need):
            return await _in_thread(partial(drawing.save, figure, options, media_type, stated))


async def _in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run a part of a drawing to its end, also for a caller who has left: it holds its memory until then."""
    drawing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(drawing)
    except asyncio.CancelledError:
        await asyncio.wait([drawing])
        raise
