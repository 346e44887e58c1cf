"""Blank requests: bound requests whose tensors have shapes and no numbers.

What a request costs is found by running its operation on a blank one on PyTorch's meta device: the sizes are those
asked, or the end of a bucket.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec, Exact, Linformer, Mask
from attention_contract.tensors import DTYPES, Array
from attention_service.core.masks.global_projections import has_separate
from attention_service.core.masks.global_tokens import with_global_tokens
from attention_service.core.methods import approximation_of
from attention_service.core.multihead import Sizes, laid_side_by_side, learned_of, parameter_shapes
from attention_service.core.problem import Widths, added_keys
from attention_service.core.tensors import TORCH_DTYPES
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import BoundRequest, QueryLayout
from attention_service.runtime.planning.request_sizes import COARSE, RequestSizes, bucket_upper

ModelT = TypeVar("ModelT", bound=WireModel)
META = torch.device("meta")
_ROLES = ("query", "key", "value")
_MAX_ELEMENTS = 2**62
"""Elements of the largest tensor whose bytes are counted in 64 bits."""


def new_request(
    spec: AttentionSpec,
    widths: Widths,
    dtype: str,
    tokens: RequestSizes,
    *,
    sizes: Sizes | None = None,
    inputs: Collection[str] = ("query", "key", "value"),
    sent: Collection[str] = (),
    threads: int = 0,
) -> BoundRequest:
    """A blank request that nobody sent.

    sizes: those of its module, for which it need not bring all three ``inputs``; None for raw attention. ``sent``:
    names of a running state, beside the gates that raw attention by the spec's method always brings.
    """
    method = approximation_of(spec)
    carried = None if method is None else method.carried(module=sizes is not None)
    sent = {*sent} | (carried or frozenset[str]()) & {"gate", "beta"}
    made = BoundRequest(
        module=None if sizes is None else blank_module(sizes, dtype),
        spec=spec,
        layout=QueryLayout(),
        batch=tokens.batch,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        queries=tokens.queries,
        keys=tokens.past + tokens.new_keys + added_keys(spec),
        past=tokens.past,
        head_dim=widths.head_dim,
        value_dim=widths.value_dim,
        dtype=dtype,
        reply_dtype=dtype,
        arrays={},
        value_is="value",
        own_key_dim=widths.own_key_dim,
        state_wanted="return_state" in sent,
        threads=threads,
    )
    if sizes is None:
        made.learned = {name: _blank(tensor.shape, dtype) for name, tensor in learned_of(spec, widths).items()}
    past = ("past_key", "past_value") if tokens.past else ()
    made.arrays = {name: _blank((1,), dtype) for name in (*sorted(inputs), *past, *sorted(sent - {"return_state"}))}
    return at_sizes(made, tokens)


def raw_request(
    spec: AttentionSpec,
    widths: Widths,
    dtype: str,
    sizes: RequestSizes,
    *,
    mask_dtype: type | None = None,
    batched: bool = True,
) -> BoundRequest:
    """Return the blank request of raw attention, which is made once for each spec, widths and sizes.

    ``mask_dtype``: that of a mask of the shape in ``sizes``, if there is one.
    """
    return _raw_request(_SameSpec(spec), widths, dtype, sizes, mask_dtype, batched)


class _SameSpec:
    """A spec as a part of the key of a memo, equal to itself alone: its lists have no hash."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameSpec) and self.spec is other.spec


@lru_cache(maxsize=4096)
def _raw_request(
    key: _SameSpec, widths: Widths, dtype: str, sizes: RequestSizes, mask_dtype: type | None, batched: bool
) -> BoundRequest:
    made = new_request(key.spec, widths, dtype, sizes)
    if mask_dtype is not None:
        made.arrays["mask"] = np.broadcast_to(np.zeros((), mask_dtype), sizes.mask)
    return made if batched else made.replaced(layout=QueryLayout(batched=False))


def blanked(bound: BoundRequest, threads: int) -> BoundRequest:
    """The same request without its numbers and parameters.

    Sequences with global tokens of their own get as many as any sequence has, spread over the keys: which tokens they
    are bears little on the cost, so requests that differ in them alone share a plan.
    """
    spec, own = bound.spec, bound.sequence_masks
    if own is not None:
        masks: list[Mask] = with_global_tokens(spec.masks, global_positions(bound))
        own = (masks,) * len(own) if bound.masks_differ else None
        spec = spec if bound.masks_differ else spec.model_copy(update={"masks": masks})
    module = None if bound.module is None else blank_module(bound.module.sizes, bound.dtype)
    learned = {name: _like(array, array.shape) for name, array in bound.learned.items()}
    made = bound.replaced(spec=spec, sequence_masks=own, module=module, learned=learned, cached=None, threads=threads)
    return at_sizes(made, sizes_of(bound))


def blank_module(sizes: Sizes, dtype: str) -> Module:
    """A module of these sizes without numbers."""
    shapes = parameter_shapes(sizes)
    parameters = {name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=META) for name, shape in shapes.items()}
    laid = MappingProxyType(laid_side_by_side(parameters, sizes))
    return Module("", unsent(ModuleConfig, dtype=dtype, spec=sizes.spec), sizes, laid, "")


def unsent(model: type[ModelT], **fields: Any) -> ModelT:
    """A request or config that nobody sent, of which only what operations read is set."""
    made: ModelT = model.model_construct(**fields)  # type: ignore[assignment]  # the plugin forgets the type
    return made


def sizes_of(bound: BoundRequest) -> RequestSizes:
    """The sizes that a bucket rounds."""
    if bound.arrays.keys() <= _PLAIN_TENSORS and bound.sequence_masks is None:
        return RequestSizes(bound.batch, bound.queries, bound.new_keys, bound.past)
    return RequestSizes(
        bound.batch, bound.queries, bound.new_keys, bound.past, bound.mask_shape, bound.real_keys, bound.offsets
    )


_PLAIN_TENSORS = frozenset({"query", "key", "value", "past_key", "past_value"})


def at_sizes(bound: BoundRequest, sizes: RequestSizes) -> BoundRequest:
    """A blank request of other sizes."""
    keys = sizes.past + sizes.new_keys + added_keys(bound.spec)
    own = bound.sequence_masks
    if own is not None and bound.masks_differ:
        own = tuple(own[row % len(own)] for row in range(sizes.batch))
    made = bound.replaced(
        batch=sizes.batch, queries=sizes.queries, keys=keys, past=sizes.past, sequence_masks=own, arrays={}
    )
    names = dict.fromkeys(bound.arrays)
    if sizes.queries != sizes.new_keys and "key" not in names:  # keys can no longer be the queries
        names["key"] = None
    made.arrays = {name: _array(name, made, bound.arrays, sizes) for name in names}
    return made


def _array(name: str, bound: BoundRequest, arrays: Mapping[str, Array], sizes: RequestSizes) -> Array:
    like = arrays.get(name, arrays["query"] if "query" in arrays else _blank((), bound.dtype))
    match name:
        case "offsets":  # which are read
            return np.array(sizes.offsets or (sizes.past,) * sizes.batch, np.int64)
        case "key_lengths":
            return np.full(sizes.batch, min(sizes.real_keys, bound.sequence_keys), np.int64)
        case "key_mask":
            real = np.arange(bound.sequence_keys) < sizes.real_keys
            return np.broadcast_to(real, (sizes.batch, bound.sequence_keys))
    return _like(like, _shape(name, bound, like, sizes))


def _shape(name: str, bound: BoundRequest, like: Array, sizes: RequestSizes) -> tuple[int, ...]:
    batch, new_keys, lead = sizes.batch, sizes.new_keys, (sizes.batch, bound.kv_heads)
    if name in _ROLES:
        return _token_shape(name, bound)
    shapes: dict[str, tuple[int, ...]] = {
        "past_key": (*lead, bound.past, bound.key_dim),
        "past_value": (*lead, bound.past, bound.value_dim),
        "mask": sizes.mask,
        "positions": (batch, bound.queries),
        "gate": (*lead, new_keys, *(bound.head_dim,) * (like.ndim == 4)),
        "beta": (*lead, new_keys),
        "initial_state": (*lead, bound.head_dim, bound.value_dim),
        "initial_normalizer": (*lead, bound.head_dim),
        "global_mask": (batch, bound.sequence_keys),
    }
    return shapes[name]


def _token_shape(name: str, bound: BoundRequest) -> tuple[int, ...]:
    role, tokens = _ROLES.index(name), bound.queries if name == "query" else bound.new_keys
    if bound.sizes is not None:
        return bound.batch, tokens, bound.sizes.inputs[role]
    heads = bound.heads if name == "query" else bound.kv_heads
    width = (bound.head_dim, bound.key_dim, bound.value_dim)[role]
    return (bound.batch, tokens, heads * width) if bound.layout.merged else (bound.batch, heads, tokens, width)


def global_positions(bound: BoundRequest) -> list[int]:
    """Positions below the largest power of two within the keys, about as many as a sequence has global tokens."""
    count = int(bound.arrays["global_mask"].sum(1).max(initial=0))
    keys = 1 << (max(bound.sequence_keys, 1).bit_length() - 1)
    count = min(bucket_upper(count, COARSE), keys) if count else 0
    return [index * keys // count for index in range(count)]


def with_spec(bound: BoundRequest, spec: AttentionSpec) -> BoundRequest:
    """The same blank request with another spec; what the spec learns follows."""
    module, learned = bound.module, bound.learned
    if module is not None:
        module = blank_module(replace(module.sizes, spec=spec), bound.dtype)
    else:
        learned = {name: _blank(tensor.shape, bound.dtype) for name, tensor in learned_of(spec, bound.widths).items()}
    made = bound.replaced(spec=spec, module=module, learned=learned, sequence_masks=None)
    return at_sizes(made, sizes_of(bound))


def exactly(bound: BoundRequest) -> BoundRequest:
    """The same attention by the exact method, without gates, states or learned mixing."""
    arrays = {name: array for name, array in bound.arrays.items() if name not in bound.sent}
    exact = bound.spec.model_copy(update={"method": Exact()})
    return with_spec(bound.replaced(arrays=arrays, state_wanted=False), exact)


def long_enough(bound: BoundRequest) -> BoundRequest:
    """With a method that takes as many keys: what more of them would cost may be asked, though they are refused."""
    method = bound.spec.method
    if not isinstance(method, Linformer) or bound.keys <= method.length:
        return bound
    longer = method.model_copy(update={"length": bound.keys})
    return with_spec(bound, bound.spec.model_copy(update={"method": longer}))


def decode_step(bound: BoundRequest) -> BoundRequest | None:
    """A step of one query and one new key per sequence that ends with the same keys; None if there is none.

    The step takes past keys and values, or the state that replaces them.
    """
    method = approximation_of(bound.spec)
    carried = frozenset[str]() if method is None else method.carried(module=bound.module is not None)
    if carried is None or has_separate(bound.spec.masks):  # a past holds one projection only
        return None
    past = 0 if carried else bound.sequence_keys - 1
    kept = {name for name in bound.arrays if name in {"query", "key", "value"}}
    names = kept | ({*carried} - {"return_state"} if carried else {"past_key", "past_value"} if past else set())
    arrays = {name: bound.arrays.get(name, _blank((1,), bound.dtype)) for name in sorted(names)}
    step = bound.replaced(arrays=arrays, state_wanted="return_state" in carried)
    return at_sizes(step, RequestSizes(bound.batch, 1, 1, past))


def _blank(shape: Collection[int], dtype: str) -> Array:
    """An array of zeros that takes the memory of one number."""
    return np.broadcast_to(np.zeros((), DTYPES[dtype]), tuple(shape))


def _like(array: Array, shape: Sequence[int]) -> Array:
    if prod(shape) > _MAX_ELEMENTS:
        description = f"a tensor of shape {list(shape)}"
        raise InvalidRequest.at("shape", f"{description}: the counts do not fit 64 bits; ask for smaller sizes")
    return np.broadcast_to(np.zeros((), array.dtype), tuple(shape))
