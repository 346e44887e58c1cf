"""Requests of given sizes, run by the operations of the server; by default on the meta device, without memory."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_contract.schemas.attention import Dropout as DropoutOption
from attention_contract.schemas.attention import Edit, ForwardRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.hopfield import HopfieldRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.tensors import Array
from attention_service.core.arrays import TORCH_DTYPES, to_numpy, torch_dtype_name
from attention_service.core.attention import taps_of
from attention_service.core.kernels import Kernel
from attention_service.core.learned import learned_of
from attention_service.core.multihead import parameter_shapes
from attention_service.core.types import Dropout, Selection
from attention_service.cost.approximate import approximated
from attention_service.cost.pairs import request_mask
from attention_service.cost.passes import rehearse_with
from attention_service.cost.retrieval import Retrieval as RetrievalSizes
from attention_service.cost.workload import Workload
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound import Bound, Layout
from attention_service.runtime.binding.hopfield_binding import Bound as BoundRetrieval
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.differentiation import INPUTS, TAPS, Targets
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.operations.gradients import Gradients
from attention_service.runtime.operations.hopfield import Retrieval
from attention_service.runtime.operations.operation import Results, Uploaded
from attention_service.runtime.operations.weights import Inspection

_DTYPES = {4: torch.float32, 8: torch.float64}
_ZEROS = {dtype: to_numpy(torch.zeros((), dtype=dtype)) for dtype in TORCH_DTYPES.values()}


class SizedOperations:
    """The operations, by the sizes of their requests. Each returns its results, held until a reply is made."""

    def __init__(self, device: str = "meta", fill: Callable[[Tensor], object] = lambda _: None) -> None:
        """Create the operations on a device. ``fill``: writes the numbers of a tensor."""
        self._device, self._fill = torch.device(device), fill

    def parameters(self, work: Workload) -> Mapping[str, Tensor]:
        """The parameters of a resident module; none for raw attention."""
        if work.sizes is None:
            return {}
        return {name: self._empty(shape, _dtype(work)) for name, shape in parameter_shapes(work.sizes).items()}

    def forward(self, work: Workload, kernel: Kernel | str, parameters: Mapping[str, Tensor]) -> Results:
        """Run one forward pass."""
        request = ForwardRequest.model_construct(
            return_=[tap for tap in ("output", *taps_of(work.spec)) if tap in work.taps],
            average_heads=work.averaged,
            report_error=work.reported,
            edits=[self._edit(tap, does, work) for tap, does in work.edits],
        )
        bound = self._bound(work, parameters)
        return Forward(bound, request, _selection(work), kernel).launch(self._uploaded(work, bound, request.edits))

    def gradients(
        self,
        work: Workload,
        kernel: Kernel | str,
        parameters: Mapping[str, Tensor],
        names: tuple[str, ...],
        *,
        twice: bool,
        checked: bool,
    ) -> Results:
        """Run a forward and a backward pass, and as asked: a second one along a direction of each name, a check."""
        bound = self._bound(work, parameters)
        targets = Targets(
            tuple(name for name in names if name in INPUTS),
            tuple(name for name in names if name in TAPS),
            tuple(name for name in names if name not in INPUTS and name not in TAPS),
        )
        request = GradientsRequest.model_construct(
            return_=[tap for tap in taps_of(work.spec) if tap in work.taps],
            directions=dict.fromkeys((*targets.inputs, *targets.parameters)) if twice else None,
            check=checked,
            edits=[self._edit(tap, does, work) for tap, does in work.edits],
            dropout=DropoutOption(p=0.1) if work.dropped else None,
            **{name: bound.arrays[name] for name in targets.inputs},
        )
        uploaded = self._uploaded(work, bound, request.edits)
        for name in request.directions or {}:
            of = uploaded.tensors[name] if name in uploaded.tensors else uploaded.parameters[name]
            uploaded.tensors[f"directions.{name}"] = torch.empty_like(of)
            del of  # the launch frees what it has read
        return Gradients(bound, request, _selection(work), targets, kernel, checked_elements=1).launch(uploaded)

    def inspection(self, work: Workload, parameters: Mapping[str, Tensor], top_k: int) -> Results:
        """Compute statistics of the weights, the most attended keys and the weights themselves."""
        request = WeightsRequest.model_construct(
            top_k=top_k, return_weights="weights" in work.taps, average_heads=work.averaged
        )
        bound = self._bound(work, parameters)
        return Inspection(bound, request, _selection(work)).launch(self._uploaded(work, bound))

    def retrieval(self, sizes: RetrievalSizes) -> Results:
        """Run one Hopfield retrieval."""
        dtype, inner = _DTYPES[sizes.itemsize], sizes.heads * sizes.width
        tensors = {}
        roles = ("state", sizes.states, sizes.state_width), ("stored", sizes.patterns, sizes.stored_width)
        for role, count, width in roles:
            by_head = sizes.batch, sizes.heads, count, sizes.width
            merged = sizes.batch, count, width or inner
            tensors["states" if role == "state" else role] = self._empty(merged if sizes.merged else by_head, dtype)
            if width is not None:
                tensors[f"projections.{role}"] = self._empty((inner, width), dtype)
        tensors["beta"] = self._empty((sizes.heads,), dtype)
        if sizes.masked:
            tensors["stored_mask"] = self._empty((sizes.batch, sizes.patterns), torch.bool)
        if sizes.output_width is not None:
            tensors["projections.output"] = self._empty((sizes.heads * sizes.output_width, sizes.width), dtype)
        request = HopfieldRequest.model_construct(
            eps=0.0 if sizes.settles else None, return_association=sizes.association
        )
        layout = Layout(merged=sizes.merged)
        bound = BoundRetrieval(request, layout, sizes, (), torch_dtype_name(dtype), sizes.reply)
        return Retrieval(bound).launch(Uploaded(tensors))

    def _bound(self, work: Workload, parameters: Mapping[str, Tensor]) -> Bound:
        """A request of these sizes, whose arrays repeat one number."""
        dtype, module, learned = torch_dtype_name(_dtype(work)), None, {}
        if work.sizes is not None:
            module = Module("", work.sizes.config(dtype), work.sizes, MappingProxyType(dict(parameters)), "")
        else:
            shapes = {name: x.shape for name, x in learned_of(work.spec, work.widths).items()}
            learned = {name: _repeated(shape, _dtype(work)) for name, shape in shapes.items()}
        return Bound(
            module=module,
            spec=work.spec,
            layout=Layout(),
            batch=work.batch,
            heads=work.heads,
            kv_heads=work.kv_heads,
            queries=work.queries,
            keys=work.keys,
            past=work.past,
            head_dim=work.head_dim,
            value_dim=work.value_dim,
            dtype=dtype,
            reply_dtype=work.reply or dtype,
            arrays={name: _repeated(x.shape, x.dtype) for name, x in self._inputs(work).items()},
            value_is="value",
            dropout=Dropout(0.1, 0) if work.dropped else None,
            learned=learned,
            state_wanted="return_state" in work.sent,
        )

    def _uploaded(self, work: Workload, bound: Bound, edits: Sequence[Edit] = ()) -> Uploaded:
        """The request on the device."""
        dtype = TORCH_DTYPES[bound.dtype]
        bound_edits = compute.bind_edits(edits, self._device, dtype)
        return Uploaded(self._inputs(work), compute.load_parameters(bound, self._device), bound_edits)

    def _inputs(self, work: Workload) -> dict[str, Tensor]:
        """The tensors of the request by field."""
        dtype = _dtype(work)
        wide = torch.promote_types(dtype, torch.float32)
        shapes = _tokens(work) | _carried(work)
        made = {
            name: self._empty(shape, wide if name.startswith("initial") else dtype) for name, shape in shapes.items()
        }
        if work.sizes is not None and "key" not in made and work.queries < work.new_keys:
            # A few of the queries of self-attention.
            made |= {"key": made["query"], "query": made["query"][:, : work.queries]}
        if work.request_mask_elements:
            rows = request_mask(work)
            columns = work.request_mask_elements // max(rows[0] * rows[1] * rows[2], 1)
            made["mask"] = self._empty((*rows, columns), torch.bool if work.bool_mask else dtype)
        if work.padded:
            made["key_lengths"] = self._empty((work.batch,), torch.int64)
        # A method that approximates takes the same offset for all sequences, and reads it.
        if work.batched_offsets and approximated(work) is None:
            made["offsets"] = torch.tensor(work.offsets or range(work.past, work.past + work.batch))  # which are read
        elif work.batched_places and work.queries == work.new_keys:
            made["positions"] = self._empty((work.batch, work.queries), torch.int64)
        return made

    def _edit(self, tap: str, does: str, work: Workload) -> Edit:
        """An edit of a whole tap."""
        how: dict[str, dict[str, Any]] = {
            "set": {"set": 0.0},
            "scale": {"scale": 2.0},
            "renormalize": {"set": 0.0, "renormalize": True},
            "value": {"value": _repeated((), _dtype(work))},
        }
        return Edit.model_construct(tap=tap, **how[does])

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self._device)
        self._fill(made)
        return made


def _repeated(shape: Sequence[int], dtype: torch.dtype) -> Array:
    """An array of zeros that takes the memory of one number."""
    return np.broadcast_to(_ZEROS[dtype], tuple(shape))


def _tokens(work: Workload) -> dict[str, tuple[int, ...]]:
    """Shapes of queries, keys and values, and of the past."""
    sizes, lead = work.sizes, (work.batch, work.kv_heads)
    widths = (work.head_dim, work.head_dim, work.value_dim) if sizes is None else sizes.inputs
    heads = (work.heads, work.kv_heads, work.kv_heads)
    tokens = (work.queries if "key" in work.inputs else work.new_keys, work.new_keys, work.new_keys)
    shapes: dict[str, tuple[int, ...]] = {
        name: (work.batch, length, width) if sizes is not None else (work.batch, each, length, width)
        for name, each, length, width in zip(("query", "key", "value"), heads, tokens, widths, strict=True)
        if name in work.inputs
    }
    past = {"past_key": (*lead, work.past, work.head_dim), "past_value": (*lead, work.past, work.value_dim)}
    return shapes | past if work.past else shapes


def _carried(work: Workload) -> dict[str, tuple[int, ...]]:
    """Shapes of what a running state is sent."""
    lead = work.batch, work.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (*lead, work.new_keys, work.head_dim if work.fine_gate else 1),
        "beta": (*lead, work.new_keys, 1),
        "initial_state": (*lead, work.head_dim, work.value_dim),
        "initial_normalizer": (*lead, work.head_dim),
    }
    return {name: shape for name, shape in shapes.items() if name in work.sent}


def _selection(work: Workload) -> Selection:
    """As many heads and queries as are selected."""
    heads, queries = (
        None if count is None else tuple(range(count)) for count in (work.selected_heads, work.selected_queries)
    )
    return Selection(heads, queries)


def _dtype(work: Workload) -> torch.dtype:
    """The dtype that is computed in."""
    return _DTYPES.get(work.itemsize, torch.float16 if work.half else torch.bfloat16)


rehearse_with(SizedOperations())
