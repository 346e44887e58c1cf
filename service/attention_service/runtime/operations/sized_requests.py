"""Requests of given sizes, run by the operations of the server; by default on the meta device, without memory."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention_contract.base import WireModel
from attention_contract.schemas.attention import Dropout as DropoutOption
from attention_contract.schemas.attention import Edit, ForwardRequest
from attention_contract.schemas.attribution import AttributionRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.hopfield import HopfieldRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.tensors import Array
from attention_service.core.attention import taps_of
from attention_service.core.kernels import Kernel
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Dropout
from attention_service.core.tensors import TORCH_DTYPES, to_numpy, torch_dtype_name
from attention_service.cost.passes import rehearse_with
from attention_service.cost.retrieval import Retrieval as RetrievalSizes
from attention_service.cost.stand_ins import dtype_of, inputs_of, parameters_of, selection_of
from attention_service.cost.workload import Workload
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, Layout
from attention_service.runtime.binding.hopfield_binding import BoundRetrieval
from attention_service.runtime.operations import compute
from attention_service.runtime.operations.attribution import READOUT, Attributing
from attention_service.runtime.operations.differentiation import GIVEN, INPUTS, TAPS, UPSTREAM, Targets, tap_of
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.operations.gradients import Gradients, subject_shape
from attention_service.runtime.operations.hopfield import Retrieval
from attention_service.runtime.operations.weights import Inspection
from attention_service.runtime.scheduling.operation import Results, Uploaded

ModelT = TypeVar("ModelT", bound=WireModel)
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
        return self._filled(parameters_of(work))

    def forward(self, work: Workload, kernel: Kernel | str, parameters: Mapping[str, Tensor]) -> Results:
        """Run one forward pass."""
        request = _unchecked(
            ForwardRequest,
            return_=[tap for tap in ("output", *taps_of(work.spec)) if tap in work.taps],
            average_heads=work.averaged,
            report_error=work.reported,
            compare="unedited" if work.compared else None,
            edits=[self._edit(tap, does, work) for tap, does in work.edits],
        )
        bound = self._bound(work, parameters)
        return Forward(bound, request, selection_of(work), kernel).launch(self._uploaded(work, bound, request.edits))

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
        given = tuple(name.removeprefix(GIVEN) for name in names if name.startswith(GIVEN))
        names = tuple(name for name in names if not name.startswith(GIVEN))
        upstreams = tuple(name for name in names if name == UPSTREAM or tap_of(name) is not None)
        others = (*INPUTS, *TAPS, *upstreams)
        targets = Targets(
            tuple(name for name in names if name in bound.arrays),  # a past without tokens is left out
            tuple(name for name in names if name in TAPS),
            tuple(name for name in names if name not in others),
            upstreams,
        )
        sent = {name: self._empty(subject_shape(name, bound), dtype_of(work)) for name in (*upstreams, *given)}
        request = _unchecked(
            GradientsRequest,
            return_=[tap for tap in taps_of(work.spec) if tap in work.taps],
            directions=dict.fromkeys((*targets.inputs, *targets.parameters, *upstreams)) if twice else None,
            tap_upstream=dict.fromkeys(tap for name in sent if (tap := tap_of(name)) is not None) or None,
            check=checked,
            edits=[self._edit(tap, does, work) for tap, does in work.edits],
            dropout=DropoutOption(p=0.1) if work.dropped else None,
            **{name: bound.arrays[name] for name in targets.inputs},
        )
        uploaded = self._uploaded(work, bound, request.edits)
        uploaded.tensors |= sent
        sent.clear()
        for name in request.directions or {}:
            of = uploaded.tensors[name] if name in uploaded.tensors else uploaded.parameters[name]
            uploaded.tensors[f"directions.{name}"] = torch.empty_like(of)
            del of  # the launch frees what it has read
        return Gradients(bound, request, selection_of(work), targets, kernel, checked_elements=1).launch(uploaded)

    def inspection(self, work: Workload, parameters: Mapping[str, Tensor], top_k: int) -> Results:
        """Compute statistics of the weights, the most attended keys and the weights themselves."""
        request = _unchecked(
            WeightsRequest,
            top_k=top_k,
            return_weights="weights" in work.taps,
            average_heads=work.averaged,
            edits=[self._edit(tap, does, work) for tap, does in work.edits],
        )
        bound = self._bound(work, parameters)
        uploaded = self._uploaded(work, bound, request.edits)
        return Inspection(bound, request, selection_of(work)).launch(uploaded)

    def attribution(
        self, work: Workload, parameters: Mapping[str, Tensor], methods: tuple[str, ...], *,
        compared: bool, points: int, classes: int,
    ) -> Results:  # fmt: skip
        """Attribute to weights and heads, with an upstream or a readout."""
        bound = self._bound(work, parameters)
        request = _unchecked(
            AttributionRequest,
            methods=list(methods),
            compare="unedited" if compared else None,
            steps=points,
            readout=True if classes else None,
            edits=[self._edit(tap, does, work) for tap, does in work.edits],
        )
        uploaded, dtype = self._uploaded(work, bound, request.edits), dtype_of(work)
        if classes:
            width = bound.output_shape[-1] * (bound.heads if bound.module is None else 1)
            targets = torch.zeros(bound.batch, bound.queries, dtype=torch.int64, device=self._device)
            sent = {"weight": self._empty((classes, width), dtype), "bias": self._empty((classes,), dtype)}
            uploaded.tensors |= {READOUT + name: x for name, x in sent.items()} | {f"{READOUT}targets": targets}
            del sent, targets
        else:
            uploaded.tensors[UPSTREAM] = self._empty(bound.output_shape, dtype)
        return Attributing(bound, request, selection_of(work)).launch(uploaded)

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
        request = _unchecked(HopfieldRequest, eps=0.0 if sizes.settles else None, return_association=sizes.association)
        layout = Layout(merged=sizes.merged)
        bound = BoundRetrieval(request, layout, sizes, (), torch_dtype_name(dtype), sizes.reply)
        return Retrieval(bound).launch(Uploaded(tensors))

    def _bound(self, work: Workload, parameters: Mapping[str, Tensor]) -> BoundRequest:
        """A request of these sizes, whose arrays repeat one number."""
        dtype, module, learned = torch_dtype_name(dtype_of(work)), None, {}
        if work.sizes is not None:
            module = Module(
                "", _unchecked(ModuleConfig, dtype=dtype), work.sizes, MappingProxyType(dict(parameters)), ""
            )
        else:
            shapes = {name: x.shape for name, x in learned_of(work.spec, work.widths).items()}
            learned = {name: _repeated(shape, dtype_of(work)) for name, shape in shapes.items()}
        return BoundRequest(
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

    def _uploaded(self, work: Workload, bound: BoundRequest, edits: Sequence[Edit] = ()) -> Uploaded:
        """The request on the device."""
        dtype = TORCH_DTYPES[bound.dtype]
        bound_edits = compute.bind_edits(edits, self._device, dtype)
        parameters = self._filled(parameters_of(work)) if bound.module is None else bound.module.parameters
        return Uploaded(self._inputs(work), parameters, bound_edits)

    def _inputs(self, work: Workload) -> dict[str, Tensor]:
        """The tensors of the request by field; offsets, which are read, have numbers anyway."""
        made = self._filled(inputs_of(work))
        if work.sizes is not None and "key" not in made and work.queries < work.new_keys:
            # A few of the queries of self-attention.
            made |= {"key": made["query"], "query": made["query"][:, : work.queries]}
        return made

    def _filled(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors on the device of the operations."""
        if self._device.type == "meta":
            return dict(tensors)
        return {name: self._empty(x.shape, x.dtype) if x.is_meta else x for name, x in tensors.items()}

    def _edit(self, tap: str, does: str, work: Workload) -> Edit:
        """An edit of a whole tap."""
        how: dict[str, dict[str, Any]] = {
            "set": {"set": 0.0},
            "scale": {"scale": 2.0},
            "renormalize": {"set": 0.0, "renormalize": True},
            "value": {"value": _repeated((), dtype_of(work))},
        }
        return _unchecked(Edit, tap=tap, **how[does])

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device=self._device)
        self._fill(made)
        return made


def _unchecked(model: type[ModelT], **fields: Any) -> ModelT:
    """A request that nobody sent, of which only what the operations read is set."""
    made: ModelT = model.model_construct(**fields)  # type: ignore[assignment]  # the plugin forgets the type
    return made


def _repeated(shape: Sequence[int], dtype: torch.dtype) -> Array:
    """An array of zeros that takes the memory of one number."""
    return np.broadcast_to(_ZEROS[dtype], tuple(shape))


rehearse_with(SizedOperations())
