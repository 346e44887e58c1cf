"""Binding of retrieval requests: sizes and checked shapes, without allocation."""

from dataclasses import dataclass

import numpy as np

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.analyses.hopfield import DEFAULT_MAX_STEPS, HopfieldRequest, Projections
from attention_contract.tensors import Array
from attention_service.core import hopfield
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.cost import RetrievalSizes
from attention_service.runtime.binding.bound_request import QueryLayout, check_empty, common_dtype, wrong_shape
from attention_service.runtime.device.torch_device import Device


@dataclass(frozen=True)
class BoundRetrieval:
    """One retrieval with its sizes and its layout."""

    request: HopfieldRequest
    layout: QueryLayout
    size: RetrievalSizes
    beta: tuple[float, ...]
    """One for each head."""
    dtype: str
    """Dtype of the computation: float32 or float64, since a state that is rounded at each step does not converge."""
    reply_dtype: str
    """Dtype of the states and the association in the reply: the request's."""


def bind(request: HopfieldRequest, device: Device) -> BoundRetrieval:
    """Find the sizes of a request. Raises InvalidRequest, ShapeMismatch or InvalidTensor, which name the field."""
    projections = request.projections or Projections()
    layout, heads = _layout(request, projections)
    given = {f"projections.{name}": array for name, array in projections if array is not None}
    reply_dtype = common_dtype({"stored": request.stored, "states": request.states, **given})
    dtype = "float64" if reply_dtype == "float64" else "float32"
    split = {
        "states": _split_shape("states", request.states, projections.state, "projections.state", heads, layout),
        "stored": _split_shape("stored", request.stored, projections.stored, "projections.stored", heads, layout),
    }
    batch, heads, states, width = split["states"]
    if split["stored"][:2] != (batch, heads):
        raise wrong_shape("stored", f"the batch of {batch} and the {heads} heads of states", request.stored)
    if split["stored"][3] != width:
        projected = "" if projections.stored is None else " after its projection"
        raise ShapeMismatch(
            f"stored: expected patterns of the states' width {width}{projected}, got {split['stored'][3]}",
            param="stored" if projections.stored is None else "projections.stored",
            expected=width,
            actual=split["stored"][3],
        )
    patterns = split["stored"][2]
    if not patterns:
        raise wrong_shape("stored", "at least one stored pattern", request.stored)
    check_empty({"states": request.states, "stored": request.stored})
    _check_mask(request, layout, batch, patterns)
    size = RetrievalSizes(
        batch=batch,
        heads=heads,
        states=states,
        patterns=patterns,
        width=width,
        steps=_limit(request),
        itemsize=TORCH_DTYPES[dtype].itemsize,
        spec=hopfield.DOT_PRODUCTS,
        masked=request.stored_mask is not None,
        association=request.return_association,
        merged=layout.merged,
        state_width=None if projections.state is None else projections.state.shape[1],
        stored_width=None if projections.stored is None else projections.stored.shape[1],
        output_width=_output_width(projections.output, heads, width),
        threads=device.threads,
        reply=reply_dtype,
    )
    return BoundRetrieval(request, layout, size, _beta(request.beta, heads, width, dtype), dtype, reply_dtype)


def _limit(request: HopfieldRequest) -> int:
    """Return the maximum number of updates."""
    if request.eps is None:
        return request.steps or 1
    return request.max_steps or DEFAULT_MAX_STEPS


def _layout(request: HopfieldRequest, projections: Projections) -> tuple[QueryLayout, int]:
    """Return the layout of the states and, if they have no head dimension, the number of heads (else 0)."""
    states, rank = request.states, request.states.ndim
    projected = projections.state is not None or projections.stored is not None
    merged = request.num_heads is not None or projected
    if merged and rank not in {2, 3}:
        why = "num_heads is given" if request.num_heads is not None else "they are to be projected"
        raise wrong_shape("states", f"[B, S, width] or [S, width], since {why}", states)
    if not merged and rank not in {2, 3, 4}:
        raise wrong_shape("states", "[B, H, S, D], [H, S, D] or [S, D]; for [B, S, H·D] give num_heads", states)
    if request.stored.ndim != rank:
        raise wrong_shape("stored", f"as many dimensions as states, {rank}", request.stored)
    if merged:
        return QueryLayout(batched=rank == 3, merged=True), request.num_heads or 1
    return QueryLayout(batched=rank == 4, headed=rank != 2), 0


def _split_shape(
    name: str, array: Array, projection: Array | None, called: str, heads: int, layout: QueryLayout
) -> tuple[int, int, int, int]:
    """Return the shape ``[B, H, L, D]`` of the states or the stored patterns after projection and split."""
    width = array.shape[-1]
    if projection is not None:
        if projection.ndim != 2 or projection.shape[1] != width or not projection.shape[0]:
            raise wrong_shape(called, f"[H·D, {width}], which takes {name} of width {width}", projection)
        width = projection.shape[0]
    batch = array.shape[0] if layout.batched else 1
    if layout.merged:
        if width % heads or not width:
            at_fault = (name, array) if projection is None else (called, projection)
            raise wrong_shape(at_fault[0], f"a width that is a multiple of the {heads} heads", at_fault[1])
        return batch, heads, array.shape[-2], width // heads
    heads = array.shape[-3] if layout.headed else 1
    if not heads or not width:
        raise wrong_shape(name, "at least one head, of a width of at least 1", array)
    return batch, heads, array.shape[-2], width


def _check_mask(request: HopfieldRequest, layout: QueryLayout, batch: int, patterns: int) -> None:
    mask = request.stored_mask
    if mask is None:
        return
    expected = (batch, patterns) if layout.batched else (patterns,)
    if mask.shape != expected:
        raise wrong_shape("stored_mask", f"{list(expected)}", mask)
    empty = ~mask.any(-1)
    if empty.any():
        where = f" of sequence {int(empty.argmax())}" if layout.batched else ""
        raise InvalidRequest.at("stored_mask", f"no stored pattern{where} is real; at least one must be true")


def _output_width(projection: Array | None, heads: int, width: int) -> int | None:
    if projection is None:
        return None
    if projection.ndim != 2 or projection.shape[1] != width or not projection.shape[0] or projection.shape[0] % heads:
        raise wrong_shape("projections.output", f"[H·V, {width}] for {heads} heads of width {width}", projection)
    return int(projection.shape[0] // heads)


def _beta(beta: Array | None, heads: int, width: int, dtype: str) -> tuple[float, ...]:
    if beta is None:
        return (width**-0.5,) * heads
    if beta.shape not in {(), (heads,)}:
        raise wrong_shape("beta", f"one number, or [{heads}]: one for each head", beta)
    values = np.broadcast_to(beta.astype(np.float64), (heads,)).tolist()
    least, most = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    for index, value in enumerate(values):
        if not least <= value <= most:  # false for NaN
            param = "beta" if beta.ndim == 0 else f"beta.{index}"
            raise InvalidRequest.at(
                param, f"expected a number above 0 that {dtype}, in which this is computed, can hold; got {value:g}"
            )
    return tuple(values)
