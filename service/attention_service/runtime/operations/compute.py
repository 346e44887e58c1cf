"""The steps around one attention: upload tensors, project, prepare, project out. All are differentiable."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attention_contract.errors import InvalidTensor
from attention_contract.schemas.attention import Edit
from attention_contract.spec import Linear
from attention_contract.tensors import Array
from attention_service.core import multihead
from attention_service.core.edits import BoundEdit, apply
from attention_service.core.inputs import make_problem
from attention_service.core.kv_cache.past import gathered
from attention_service.core.masks.global_projections import separate_positions
from attention_service.core.methods.linear import running
from attention_service.core.multihead import Parameters
from attention_service.core.problem import Problem
from attention_service.core.slices import on_gpu
from attention_service.core.tensors import TORCH_DTYPES, are_finite, to_device, to_torch, torch_dtype_name
from attention_service.runtime.binding.bound_request import BoundRequest, strip
from attention_service.runtime.binding.selection import as_tuple
from attention_service.runtime.scheduling.operation import Results, Uploaded

Three = tuple[Tensor, Tensor, Tensor]
_COMPUTED = ("query", "key", "value", "past_key", "past_value", "gate", "beta")
_ACCUMULATED = ("initial_state", "initial_normalizer")
_ALIGNMENT = 16
"""Bytes. Products round their last bit by where their inputs lie on some processors, and where a tensor lies in a body
hangs on the format: aligned, a request has the same numbers in every format."""
_MOST_ALIGNED = 2**20
"""Bytes of the largest tensor that is moved for that, since no plan counts the copy."""


def load(bound: BoundRequest, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The request's tensors on the device: the floating-point ones in the dtype that is computed in.

    Raises InvalidTensor where a finite number would become infinite in that dtype.
    """
    dtype = dtype or TORCH_DTYPES[bound.dtype]
    loaded: dict[str, Tensor] = {}
    if bound.cached is not None:
        loaded |= gathered(
            bound.cached, bound.arrays["past_key"].shape, bound.arrays["past_value"].shape, device, dtype
        )
    for name, array in bound.arrays.items():
        if name in loaded:
            continue
        if name in _COMPUTED:
            loaded[name] = converted(array, name, device, dtype)
            continue
        if name in _ACCUMULATED:
            loaded[name] = converted(array, name, device, torch.promote_types(dtype, torch.float32))
            continue
        tensor = to_torch(array)
        if name == "mask" and tensor.dtype != torch.bool:
            loaded[name] = converted(array, name, device, dtype)
        elif name == "offsets" and device.type == "meta":
            loaded[name] = tensor  # a rehearsal has no numbers, and offsets are read
        else:
            loaded[name] = to_device(tensor, device)
    return loaded


def converted(array: Array, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of the request on the device and in this dtype.

    Raises InvalidTensor, which calls it ``name``, where a finite number would become infinite; in a mask only +∞, since
    the lowest numbers hide their keys as −∞ does.
    """
    host = to_torch(array)
    result = to_device(host, device, dtype)
    if result is host and host.data_ptr() % _ALIGNMENT and host.nbytes <= _MOST_ALIGNED:
        result = host.clone()
    if host.dtype == dtype or result.is_meta:
        return result
    narrowed = torch.finfo(dtype).max < _largest(host.dtype)
    # A sum is finite only where all is, and much cheaper than the closer look.
    suspect = narrowed and not are_finite(result.sum())
    infinite = (result == torch.inf if name == "mask" else result.isinf()) if suspect else None
    if infinite is not None and bool((infinite.cpu() & ~host.isinf()).any()):
        raise InvalidTensor.at(name, f"a number is too large for {torch_dtype_name(dtype)}")
    return result


def placed(array: Array, name: str, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The same in this shape, which a blank request has whatever was sent."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return converted(array, name, device, dtype).reshape(tuple(shape))


def _largest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).max) if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def load_parameters(bound: BoundRequest, device: torch.device, dtype: torch.dtype | None = None) -> Parameters:
    """The module's parameters with the request's in their places, or the learned tensors of a raw request.

    All are in the dtype that is computed in.

    Raises InvalidTensor as ``load`` does.
    """
    dtype = dtype or TORCH_DTYPES[bound.dtype]
    if not bound.learned and bound.module is not None and bound.module.config.dtype == torch_dtype_name(dtype):
        return bound.module.parameters  # the very mapping: what belongs to the module alone may be used with it
    sent = {name: converted(array, f"parameters.{name}", device, dtype) for name, array in bound.learned.items()}
    if bound.module is None:
        return sent
    held = bound.module.parameters
    return {name: sent[name] if name in sent else value.to(dtype) for name, value in held.items()}


def problem(
    bound: BoundRequest,
    tensors: dict[str, Tensor],
    parameters: Parameters,
    *,
    views: bool = False,
    three: Three | None = None,
) -> Problem:
    """The attention inside the request. ``parameters`` holds the spec's learned tensors too.

    views: q, k and v may be views of one tensor, which is faster; use it if none of them outlives the others.
    three: q, k and v by head, if they are projected already.
    """
    learned = {name: parameters[name] for name in names} if (names := learned_names(bound)) else {}
    simple = (views or three is not None) and _is_simple(bound, parameters)
    joint = _joint(bound, parameters) if simple or (views and _on_gpu(bound)) else None

    def by_head(query: Tensor, key: Tensor, value: Tensor) -> Three:
        if three is not None:
            return three
        if bound.module is not None:
            if joint is not None and key is query and value is query:
                return multihead.project_jointly(joint, bound.module.sizes, query)
            return multihead.project(parameters, bound.module.sizes, query, key, value)
        if not bound.layout.merged:
            return query, key, value
        q = multihead.split_heads(query, bound.heads)
        return q, multihead.split_heads(key, bound.kv_heads), multihead.split_heads(value, bound.kv_heads)

    spec, own, apart = bound.spec, bound.sequence_masks, None
    if own is not None and len(own) == 1:
        spec, own = spec.model_copy(update={"masks": [*own[0]]}), None
    if bound.module is not None and spec.masks and any(separate_positions(masks) for masks in own or (spec.masks,)):
        apart = partial(multihead.project, parameters, bound.module.sizes, by="global")
    finite = simple and _surely_finite(bound, tensors)
    prepared = make_problem(
        spec, tensors, learned, by_head, projected=bound.module is not None, apart=apart, finite=finite
    )
    if own is not None:
        prepared = replace(prepared, sequence_masks=own)
    if bound.dropout is None and not isinstance(spec.method, Linear):
        return prepared
    tokens = tensors.get("key", tensors["query"])
    given = running(bound.spec, tensors, parameters, tokens, wanted=bound.state_wanted)
    return replace(prepared, dropout=bound.dropout, recurrent=given)


def projected(bound: BoundRequest, tokens: Tensor, parameters: Parameters) -> Three:
    """Queries, keys and values by head of tokens ``[B, L, d_model]`` that have all three roles."""
    if bound.module is None:
        raise TypeError("raw attention has no projections")
    joint = _joint(bound, parameters) if _is_simple(bound, parameters) or _on_gpu(bound) else None
    if joint is not None:
        return multihead.project_jointly(joint, bound.module.sizes, tokens)
    return multihead.project(parameters, bound.module.sizes, tokens, tokens, tokens)


def _joint(bound: BoundRequest, parameters: Parameters) -> multihead.Joint | None:
    """The module's projections as one, for heads of one width."""
    module = bound.module
    if module is None or parameters is not module.parameters or bound.head_dim != bound.value_dim:
        return None
    return module.joint


def _on_gpu(bound: BoundRequest) -> bool:
    return bound.module is not None and on_gpu(bound.module.parameters["q_proj.weight"])


def _is_simple(bound: BoundRequest, parameters: Parameters) -> bool:
    """True for a module on the CPU if nothing replaces q, k or v after its own projections."""
    module, spec = bound.module, bound.spec
    replaced = bound.past or spec.qk_norm is not None or spec.position.name != "none"
    replaced = replaced or spec.add_bias_kv or spec.add_zero_attn
    if module is None or parameters is not module.parameters or replaced or bound.head_dim != bound.value_dim:
        return False
    return module.device.type == "cpu"


def _surely_finite(bound: BoundRequest, tensors: dict[str, Tensor]) -> bool:
    """True if the query alone came and its norm bounds all keys and values; one short product tells."""
    if bound.module is None or len(tensors) > 1:
        return False
    numbers = tensors["query"].reshape(-1)
    return float(numbers.dot(numbers)) <= bound.module.largest_finite


def learned_names(bound: BoundRequest) -> Iterable[str]:
    """The names of the spec's learned tensors."""
    return bound.learned if bound.module is None else bound.module.sizes.learned


def output(bound: BoundRequest, parameters: Parameters, context: Tensor, edits: Sequence[BoundEdit] = ()) -> Tensor:
    """The output from context ``[B, H, Q, V]``, in the query's (batched) layout, edited where the request says so."""
    if bound.module is None and not bound.layout.merged:  # the output is the context
        return apply([replace(edit, tap="context") for edit in edits if edit.tap == "output"], "context", context)
    merged = multihead.merge_heads(context)
    whole = merged if bound.module is None else multihead.project_merged(parameters, merged)
    return apply(edits, "output", whole) if edits else whole


def bind_edits(
    edits: Sequence[Edit], device: torch.device, dtype: torch.dtype, *, real_keys: bool = False
) -> list[BoundEdit]:
    """The edits with their tensors on the device. Raises InvalidTensor as ``converted`` does."""
    return [
        BoundEdit(
            edit.tap,
            as_tuple(edit.heads),
            as_tuple(edit.queries),
            as_tuple(edit.keys),
            edit.set,
            None if edit.value is None else converted(edit.value, f"edits.{index}.value", device, dtype),
            edit.scale,
            None if edit.added is None else converted(edit.added, f"edits.{index}.add", device, dtype),
            edit.renormalize,
            as_tuple(edit.experts),
            real_keys,
        )
        for index, edit in enumerate(edits)
    ]


def upload(bound: BoundRequest, device: torch.device, edits: Sequence[Edit] = ()) -> Uploaded:
    """Copy a request's tensors and its edits to the device. Raises InvalidTensor as ``load`` does."""
    bound_edits = bind_edits(edits, device, TORCH_DTYPES[bound.dtype]) if edits else ()
    return Uploaded(load(bound, device), load_parameters(bound, device), bound_edits)


def in_reply(tensor: Tensor, bound: BoundRequest, tap: str | None = None, dtype: str | None = None) -> Tensor:
    """A batched result in the reply's dtype (or in ``dtype``) and in the query's layout.

    tap: the name of the tap, which tells if heads are its second dimension; None has none.
    """
    value = tensor.detach() if tensor.requires_grad else tensor
    if not (bound.layout.batched and bound.layout.headed):
        value = strip(value, bound.layout, heads_axis=tap is not None and has_heads(tap, bound))
    into = TORCH_DTYPES[dtype or bound.reply_dtype]
    return value.to(into) if value.dtype != into and value.is_floating_point() else value


def has_heads(tap: str, bound: BoundRequest) -> bool:
    """True if the second dimension of a tap is its heads."""
    return tap != "output" or (bound.module is None and not bound.layout.merged)


def tap_results(bound: BoundRequest, taps: dict[str, Tensor], *, average_heads: bool) -> Results:
    """Taps, without the output, as the reply has them."""
    results: Results = {}
    for tap, value in taps.items():
        if tap == "weights" and average_heads:
            results[tap] = in_reply(value.mean(dim=1), bound)
        else:
            results[tap] = in_reply(value, bound, tap)
    return results
