"""Hopfield retrieval: one request planned with every step that it may take, and run."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.schemas.hopfield import HopfieldRequest
from attention_contract.tensors import Array
from attention_service import cost
from attention_service.core import hopfield, multihead
from attention_service.core.arrays import TORCH_DTYPES, to_numpy, to_torch
from attention_service.core.hopfield import Memory, Retrieved
from attention_service.core.kernels import MATERIALIZED
from attention_service.runtime.binding.bound import Layout, strip
from attention_service.runtime.binding.hopfield_binding import Bound, bind
from attention_service.runtime.device import Device
from attention_service.runtime.operations.compute import converted
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.scheduling.jobs import Fields, Job


def prepare(request: HopfieldRequest, device: Device) -> Job:
    """Bind and plan one retrieval. Raises an InvalidRequest that names the field at fault."""
    bound = bind(request, device)
    plan = Plan(
        kernel=MATERIALIZED,
        flops=cost.retrieval_flops(bound.size),
        peak_bytes=cost.retrieval_peak_bytes(bound.size),
        predicted=device.clock.retrieval(bound.size),
    )
    watched = request.eps is None  # otherwise it may end after any step
    return Job("hopfield", plan, bound.dtype, None, lambda: _run(bound, device.torch), watched=watched)


@torch.inference_mode()
def _run(bound: Bound, device: torch.device) -> Fields:
    """The reply's fields."""
    request = bound.request
    beta = torch.tensor(bound.beta, dtype=TORCH_DTYPES[bound.dtype], device=device)
    states, patterns, mask = _load(bound, device)
    found = hopfield.retrieve(
        Memory(patterns, beta, mask), states, bound.size.steps, request.eps, association=request.return_association
    )
    del states, patterns
    if not _finite(found.energy) or not _finite(found.states):
        raise InvalidRequest(
            f"states: scores or energies overflow {bound.dtype}, in which this is computed; scale patterns, states or "
            "beta down" + (", or send float64" if bound.dtype == "float32" else ""),
            param="states",
        )
    return _fields(bound, found, device)


def _load(bound: Bound, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """States and patterns ``[B, H, L, D]``, and the mask ``[B, N]``. Raises InvalidTensor where one is not finite."""
    request, dtype = bound.request, TORCH_DTYPES[bound.dtype]
    states, patterns = (
        converted(_batched(array, bound.layout), name, device, dtype)
        for name, array in (("states", request.states), ("stored", request.stored))
    )
    mask = None
    if request.stored_mask is not None:
        mask = to_torch(request.stored_mask).to(device).reshape(bound.size.batch, bound.size.patterns)
        real = mask[:, :, None] if bound.layout.merged else mask[:, None, :, None]
        patterns = patterns.masked_fill(~real, 0)  # what is padding may hold anything
    for name, tensor in (("states", states), ("stored", patterns)):
        if not _finite(tensor):
            real_ones = " where stored_mask is true" if name == "stored" and mask is not None else ""
            raise InvalidTensor(f"{name}: expected finite numbers{real_ones}; got NaN or infinity", param=name)
    if bound.layout.merged:
        states = multihead.split_heads(_projected(bound, "state", states, device), bound.size.heads)
        patterns = multihead.split_heads(_projected(bound, "stored", patterns, device), bound.size.heads)
    return states, patterns, mask


def _projected(bound: Bound, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    weight = _matrix(bound, name, device)
    return tensor if weight is None else linear(tensor, weight)


def _matrix(bound: Bound, name: str, device: torch.device) -> Tensor | None:
    array: Array | None = getattr(bound.request.projections, name, None)
    if array is None:
        return None
    param = f"projections.{name}"
    weight = converted(array, param, device, TORCH_DTYPES[bound.dtype])
    if not _finite(weight):
        raise InvalidTensor(f"{param}: expected finite numbers; got NaN or infinity", param=param)
    return weight


def _batched(array: Array, layout: Layout) -> Array:
    """The array with the dimensions that its layout leaves out."""
    if not layout.batched:
        array = array[None]
    return array if layout.headed else array[:, None]


def _finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite; found without a copy of the tensor."""
    if not tensor.numel():
        return True
    least, most = torch.aminmax(tensor)
    return bool(least.isfinite() & most.isfinite())


def _fields(bound: Bound, found: Retrieved, device: torch.device) -> Fields:
    layout, dtype = bound.layout, TORCH_DTYPES[bound.reply_dtype]

    def by_head(tensor: Tensor) -> Array:
        return to_numpy(strip(tensor, layout, heads_axis=True))

    states = found.states
    weight = _matrix(bound, "output", device)
    if weight is not None:
        by_heads = weight.view(bound.size.heads, -1, bound.size.width)  # [H, V, D]
        states = torch.einsum("bhsd,hvd->bhsv", states, by_heads).to(dtype)
        if not _finite(states):
            raise InvalidRequest(
                f"projections.output: what it gives overflows {bound.reply_dtype}; scale it down",
                param="projections.output",
            )
    states = multihead.merge_heads(states) if layout.merged else states
    return {
        "states": to_numpy(strip(states, layout, heads_axis=not layout.merged).to(dtype)),
        "energy": by_head(found.energy),
        "steps": by_head(found.steps),
        "change": by_head(found.change),
        "converged": None if bound.request.eps is None else by_head(found.change < bound.request.eps),
        "reached": {
            **{
                name: by_head(getattr(found, name)) for name in ("pattern", "weight", "similarity", "distance", "mixed")
            },
            "single": by_head(found.weight >= hopfield.SINGLE),
        },
        "association": None if found.association is None else by_head(found.association.to(dtype)),
    }
