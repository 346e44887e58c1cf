"""A workload's tensors on PyTorch's meta device."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_contract.spec import Linformer
from attention_service.core.multihead import learned_of, parameter_shapes
from attention_service.core.problem import Selection
from attention_service.cost.approximate import approximated
from attention_service.cost.pairs import request_mask
from attention_service.cost.tensor_bytes import carried_shapes, token_shapes
from attention_service.cost.workload import Workload

_DTYPES = {4: torch.float32, 8: torch.float64}


def inputs_of(work: Workload) -> dict[str, Tensor]:
    """The tensors of a request, once they are on the device."""
    dtype = dtype_of(work)
    wide = torch.promote_types(dtype, torch.float32)
    made = {
        name: _unreal(shape, wide if name.startswith("initial") else dtype)
        for name, shape in (token_shapes(work) | carried_shapes(work)).items()
    }
    if work.request_mask_elements:
        rows = request_mask(work)
        columns = work.request_mask_elements // max(rows[0] * rows[1] * rows[2], 1)
        made["mask"] = _unreal((*rows, columns), torch.bool if work.bool_mask else dtype)
    if work.padded:
        made["key_mask"] = _unreal((work.batch, work.sequence_keys), torch.bool)
    # A method that approximates takes the same offset for all sequences, and reads it.
    if work.batched_offsets and approximated(work) is None:
        made["offsets"] = torch.tensor(work.offsets or range(work.past, work.past + work.batch))  # which are read
    elif work.batched_places and work.queries == work.new_keys:
        made["positions"] = _unreal((work.batch, work.queries), torch.int64)
    return made


def parameters_of(work: Workload) -> dict[str, Tensor]:
    """Return the parameters of a module, or the learned tensors of raw attention."""
    learned = learned_of(work.spec, work.widths)
    shapes = {name: x.shape for name, x in learned.items()} if work.sizes is None else parameter_shapes(work.sizes)
    return {name: _unreal(shape, dtype_of(work)) for name, shape in shapes.items()}


def long_enough(work: Workload) -> Workload:
    """With a method that takes as many keys: what more of them would cost may be asked, though they are refused."""
    method = work.spec.method
    if not isinstance(method, Linformer) or work.keys <= method.length:
        return work
    spec = work.spec.model_copy(update={"method": method.model_copy(update={"length": work.keys})})
    return replace(work, spec=spec, sizes=None if work.sizes is None else replace(work.sizes, spec=spec))


def selection_of(work: Workload) -> Selection:
    """Return a selection of this many heads and queries, which repeats them if there are not as many."""
    heads, queries = (
        None if count is None else tuple(index % size for index in range(count))
        for count, size in ((work.selected_heads, work.heads), (work.selected_queries, work.queries))
    )
    return Selection(heads, queries)


def dtype_of(work: Workload) -> torch.dtype:
    """Return the computing dtype."""
    return _DTYPES.get(work.itemsize, torch.float16 if work.half else torch.bfloat16)


def _unreal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
