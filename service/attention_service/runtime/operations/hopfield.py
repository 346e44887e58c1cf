"""Hopfield retrieval: one request planned with every step that it may take, and run."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_service import cost
from attention_service.core import hopfield, multihead
from attention_service.core.hopfield import PatternMemory, Retrieved
from attention_service.core.kernels import MATERIALIZED
from attention_service.core.tensors import TORCH_DTYPES, constant, is_finite, to_torch
from attention_service.cost import kind_of
from attention_service.cost.rehearsal import Seen, rehearse
from attention_service.runtime.binding.bound_request import QueryLayout, strip, widened
from attention_service.runtime.binding.hopfield_binding import BoundRetrieval, bind
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.compute import converted
from attention_service.runtime.planning.blank_requests import META
from attention_service.runtime.planning.plan import Plan
from attention_service.runtime.scheduling.jobs import Job, Prepared
from attention_service.runtime.scheduling.operation import DeviceOperation, Results, Uploaded

_FEW_BLOCKS, _FEW_STEPS = 3, 3
"""Blocks of states and updates of a retrieval that are rehearsed; each of the others adds what the last one did."""


def _planned(bound: BoundRetrieval, device: Device) -> Plan:
    """The plan of a blank retrieval, with every step.

    No rehearsal knows which states settle: it takes for granted that all that fall are picked out each time.
    """
    size = bound.size
    all_blocks = max(1, -(-size.states // max(size.rows, 1)))
    blocks, steps = min(all_blocks, _FEW_BLOCKS), min(size.steps, _FEW_STEPS)

    def seen(blocks: int, steps: int) -> Seen:
        few = replace(size, states=size.states - (all_blocks - blocks) * size.rows, steps=steps)
        operation = HopfieldRetrieval(blank(bound, few))
        return rehearse(lambda: _drop(operation.launch(operation.upload(META))), threads=size.threads)

    rehearsal = seen(blocks, steps)
    held, counts = rehearsal.peak_bytes, rehearsal.total()
    if more := all_blocks - blocks:
        fewer = seen(blocks - 1, steps)
        held += more * (held - fewer.peak_bytes)
        counts += (counts - fewer.total()).times(more)
    if size.steps > steps:
        counts = counts.times((size.steps + 1) / (steps + 1))
    # Each update leaves an energy for every state.
    held += (size.steps - steps) * size.batch * size.heads * size.states * size.itemsize
    predicted = device.clock.predict(counts, size.itemsize, kind_of("hopfield", MATERIALIZED, bound.dtype))
    return Plan(MATERIALIZED, cost.retrieval_flops(size), held, predicted)


def _drop(results: object) -> None:
    """Take the results of a pass, and free them."""


def blank(bound: BoundRetrieval, size: cost.RetrievalSizes) -> BoundRetrieval:
    """A retrieval of these sizes whose tensors have shapes and no numbers."""
    inner, given, sent = size.heads * size.width, bound.request, {}
    for name, count, width in (
        ("states", size.states, size.state_width),
        ("stored", size.patterns, size.stored_width),
    ):
        shape = (size.batch, count, width or inner) if size.merged else (size.batch, size.heads, count, size.width)
        sent[name] = np.broadcast_to(np.zeros((), getattr(given, name).dtype), shape)
    if size.masked:
        sent["stored_mask"] = np.broadcast_to(np.ones((), bool), (size.batch, size.patterns))
    projections = given.projections
    if projections is not None:
        blanks = {
            name: None if array is None else np.broadcast_to(np.zeros((), array.dtype), array.shape)
            for name, array in projections
        }
        projections = projections.model_copy(update=blanks)
    request = given.model_copy(update=sent | {"projections": projections})
    return replace(bound, request=request, layout=QueryLayout(merged=size.merged), size=size)


def prepare(request: HopfieldRequest, device: Device) -> Job:
    """Bind and plan one retrieval. Raises an InvalidRequest that names the field at fault."""
    bound = bind(request, device)
    key = "hopfield", *(value for name, value in vars(bound.size).items() if name != "spec")  # which is always the same
    plan = device.plans.get(device.clock, key, lambda: _planned(blank(bound, bound.size), device))
    watched = request.eps is None  # otherwise it may end after any step
    return Job(Prepared("hopfield", plan, bound.dtype, device.torch, HopfieldRetrieval, watched), bound)


@dataclass(eq=False, slots=True)
class HopfieldRetrieval(DeviceOperation):
    """Modern Hopfield retrieval of one request."""

    bound: BoundRetrieval

    def upload(self, device: torch.device) -> Uploaded:
        """Copy states, patterns, their mask, β and the projections to the device, in the computing dtype."""
        bound, request, dtype = self.bound, self.bound.request, TORCH_DTYPES[self.bound.dtype]
        tensors = {
            name: converted(widened(array, bound.layout), name, device, dtype)
            for name, array in (("states", request.states), ("stored", request.stored))
        }
        tensors["beta"] = constant(bound.beta, device, dtype)
        if request.stored_mask is not None:
            mask = to_torch(request.stored_mask).to(device)
            tensors["stored_mask"] = mask.reshape(bound.size.batch, bound.size.patterns)
        for role in ("state", "stored", "output"):
            if (array := getattr(request.projections, role, None)) is not None:
                tensors[f"projections.{role}"] = converted(array, f"projections.{role}", device, dtype)
        return Uploaded(tensors)

    def launch(self, uploaded: Uploaded) -> Results:
        """Check that the inputs are finite, and let the states fall to the patterns."""
        bound, request, tensors = self.bound, self.bound.request, uploaded.tensors
        beta, mask, output = (tensors.pop(name, None) for name in ("beta", "stored_mask", "projections.output"))
        states, patterns = _inputs(bound, tensors, mask)
        tensors.clear()
        if beta is None:
            raise TypeError("beta is always uploaded")
        retrieved = hopfield.retrieve(
            PatternMemory(patterns, beta, mask),
            states,
            bound.size.steps,
            request.eps,
            association=request.return_association,
        )
        del states, patterns
        if not is_finite(retrieved.energy) or not is_finite(retrieved.states):
            raise InvalidRequest(
                f"states: scores or energies overflow {bound.dtype}, in which this is computed; scale patterns, states "
                "or beta down" + (", or send float64" if bound.dtype == "float32" else ""),
                param="states",
            )
        return _results(bound, retrieved, output)


def _inputs(bound: BoundRetrieval, tensors: dict[str, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """States and patterns ``[B, H, L, D]``, projected. Raises InvalidTensor if a number is not finite."""
    states, patterns = tensors["states"], tensors["stored"]
    if mask is not None:
        real = mask[:, :, None] if bound.layout.merged else mask[:, None, :, None]
        patterns = patterns.masked_fill(~real, 0)  # padding may hold anything
    real_ones = "" if mask is None else " where stored_mask is true"
    _check_finite(states, "states")
    _check_finite(patterns, "stored", real_ones)
    if not bound.layout.merged:
        return states, patterns
    for role in ("state", "stored", "output"):
        if (weight := tensors.get(f"projections.{role}")) is not None:
            _check_finite(weight, f"projections.{role}")
    heads = bound.size.heads
    states, patterns = (
        multihead.split_heads(x if (weight := tensors.get(f"projections.{role}")) is None else linear(x, weight), heads)
        for x, role in ((states, "state"), (patterns, "stored"))
    )
    return states, patterns


def _check_finite(tensor: Tensor, param: str, where: str = "") -> None:
    if not is_finite(tensor):
        raise InvalidTensor.at(param, f"expected finite numbers{where}; got NaN or infinity")


def _results(bound: BoundRetrieval, retrieved: Retrieved, projection: Tensor | None) -> Results:
    """The reply's fields on the device; ``projection``: the weight of the output projection."""
    layout, dtype = bound.layout, TORCH_DTYPES[bound.reply_dtype]

    def by_head(tensor: Tensor) -> Tensor:
        return strip(tensor, layout, heads_axis=True)

    states = retrieved.states
    if projection is not None:
        by_heads = projection.view(bound.size.heads, -1, bound.size.width)  # [H, V, D]
        states = torch.einsum("bhsd,hvd->bhsv", states, by_heads).to(dtype)
        if not is_finite(states):
            raise InvalidRequest.at(
                "projections.output", f"its product with the states overflows {bound.reply_dtype}; scale it down"
            )
    states = multihead.merge_heads(states) if layout.merged else states
    return {
        "states": strip(states, layout, heads_axis=not layout.merged).to(dtype),
        "energy": by_head(retrieved.energy),
        "steps": by_head(retrieved.steps),
        "change": by_head(retrieved.change),
        "converged": None if bound.request.eps is None else by_head(retrieved.change < bound.request.eps),
        "reached": {
            **{
                name: by_head(getattr(retrieved, name))
                for name in ("pattern", "weight", "similarity", "distance", "mixed")
            },
            "single": by_head(retrieved.weight >= hopfield.SINGLE),
        },
        "association": None if retrieved.association is None else by_head(retrieved.association.to(dtype)),
    }
