"""Binding of attention requests: sizes, checked shapes and indices, without allocation.

The arrays stay views into the body; missing batch and head dimensions are added as views.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from attention_contract.errors import InvalidRequest, ShapeMismatch
from attention_contract.schemas.attention import AttentionInputs, ForwardRequest, RawInputs
from attention_contract.spec import MAX_POSITIONS, AttentionSpec, Mask
from attention_contract.tensors import Array, Untyped, dtype_name
from attention_service.core.masks.global_tokens import with_global_tokens
from attention_service.core.methods import check_spec
from attention_service.core.positions import check_position
from attention_service.core.problem import WeightDropout, Widths, added_keys
from attention_service.modules.resident import Module
from attention_service.runtime.binding.bound_request import (
    BoundRequest,
    QueryLayout,
    check_empty,
    common_dtype,
    widened,
    wrong_shape,
)
from attention_service.runtime.binding.position_checks import check_as_many, check_reads_positions, check_within
from attention_service.runtime.binding.raw_binding import (
    check_agreement,
    check_learned,
    check_raw_spec,
    layout_of,
    split_shape,
)
from attention_service.runtime.binding.recurrence_binding import bind_tensors, check_request

_CHECKED = frozenset({
    "past_key", "past_value", "mask", "key_mask", "key_lengths", "offsets", "positions", "global_mask", "gate", "beta",
    "initial_state", "initial_normalizer", "dropout",
})  # fmt: skip
"""The fields that are checked beside the tokens."""
_OF_ONE_DTYPE = ("query", "key", "value", "past_key", "past_value")
"""The tensors of raw attention that must agree in dtype."""


def bind(module: Module | None, request: AttentionInputs) -> BoundRequest:
    """Check a request against its module, or a raw one against itself, and find its sizes.

    Raises InvalidRequest, ShapeMismatch or InvalidTensor, which name the field.
    """
    if module is not None:
        return _Binder(module, module.config.spec, request).module()
    if not isinstance(request, RawInputs):
        raise TypeError("a request without a module needs a spec")
    check_spec(request.spec)
    return _Binder(None, request.spec, request).raw(request)


class _Binder:
    """The checks of one request, in reading order."""

    def __init__(self, module: Module | None, spec: AttentionSpec, request: AttentionInputs) -> None:
        self.target = module
        self.spec = spec
        self.request = request
        self.arrays: dict[str, Array] = {}
        self.value_is = "value" if request.value is not None else "key" if request.key is not None else "query"
        asks = getattr(request, "report_error", False) or getattr(request, "return_state", False)
        self.more = asks or not _CHECKED.isdisjoint(request.__pydantic_fields_set__)
        """True if the request states fields beside its tokens that have to be checked."""
        if self.more:
            check_reads_positions(spec, request.positions)

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def module(self) -> BoundRequest:
        module, request = self.target, self.request
        assert module is not None  # noqa: S101 - bind() comes here with a module only
        sizes = module.sizes
        query = request.query
        if query.ndim not in {2, 3}:
            raise wrong_shape("query", "[B, Q, d_model] or [Q, d_model]", query)
        layout = QueryLayout(batched=query.ndim == 3)
        rank = query.ndim
        self.arrays["query"] = widened(query, layout)
        batch, queries, _ = self.arrays["query"].shape
        value_is = self.value_is
        self._width("query", query, sizes.d_model, "d_model")
        for role, source, width, name in (
            ("key", "key" if request.key is not None else "query", sizes.key_width, "key_width"),
            ("value", value_is, sizes.value_width, "value_width"),
        ):
            array = getattr(request, source)
            if source == role:
                if array.ndim != rank:
                    raise wrong_shape(role, f"as many dimensions as query, {rank}", array)
                self.arrays[role] = widened(array, layout)
                if self.arrays[role].shape[0] != batch:
                    raise wrong_shape(role, f"the query's batch of {batch}", array)
                self._width(role, array, width, name)
            elif array.shape[-1] != width:
                raise ShapeMismatch.at(
                    role,
                    f"it was not sent, and {source} has width {array.shape[-1]}, but this module's {name} is "
                    f"{width}; send {role}",
                    expected=width,
                    actual=array.shape[-1],
                )
        new_keys = self.arrays["query" if request.key is None else "key"].shape[1]
        if self.arrays[value_is].shape[1] != new_keys:
            raise wrong_shape("value", f"as many tokens as the keys, {new_keys}", request.value)
        past = self._past(layout, batch, sizes.kv_heads, sizes.head_dim, sizes.value_dim)
        dtype = module.config.dtype or "float32"
        return self._finish(
            layout,
            (batch, sizes.heads, sizes.kv_heads, queries, past + new_keys, past, sizes.head_dim, sizes.value_dim),
            dtype,
            dtype if isinstance(query, Untyped) else dtype_name(query),
            value_is,
        )

    # ── raw attention ────────────────────────────────────────────────────────────────────────────────────────────────

    def raw(self, request: RawInputs) -> BoundRequest:
        check_raw_spec(self.spec)
        if self.request.version is not None:
            raise InvalidRequest.at("version", "raw attention has no module and so no version; leave it out")
        if request.num_kv_heads is not None and request.num_heads is None:
            raise InvalidRequest.at("num_kv_heads", "it says how [B, L, H·D] splits, so num_heads is needed too")
        layout, heads, kv_heads = layout_of(self.request, request.num_heads, request.num_kv_heads)
        value_is = self.value_is
        rank = self.request.query.ndim
        for name in ("query", "key", "value"):
            array = getattr(self.request, name)
            if array is None:
                continue
            if array.ndim != rank:
                raise wrong_shape(name, f"as many dimensions as query, {rank}", array)
            self.arrays[name] = widened(array, layout)
        split = {
            name: split_shape(name, array, kv_heads if name != "query" else heads, layout)
            for name, array in self.arrays.items()
        }
        query, key, value = split["query"], split.get("key", split["query"]), split[value_is]
        check_agreement(self.request, self.spec, query, key, value, value_is)
        (batch, heads, queries, head_dim), kv_heads = query, key[1]
        past = self._past(layout, batch, kv_heads, key[3], value[3])
        dtype = common_dtype({name: self.arrays[name] for name in _OF_ONE_DTYPE if name in self.arrays})
        sizes = (batch, heads, kv_heads, queries, past + key[2], past, head_dim, value[3])
        key_dim = None if key[3] == head_dim else key[3]
        return self._finish(layout, sizes, dtype, dtype, value_is, key_dim)

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _width(self, name: str, array: Array, width: int, called: str) -> None:
        if array.shape[-1] != width:
            raise ShapeMismatch.at(
                name,
                f"expected a last dimension of {called} = {width}, got shape {list(array.shape)}",
                expected=[*array.shape[:-1], width],
                actual=list(array.shape),
            )

    def _past(self, layout: QueryLayout, batch: int, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Return P, after checking past_key and past_value."""
        if not self.more:
            return 0
        request = self.request
        if (request.past_key is None) != (request.past_value is None):
            missing = "past_key" if request.past_key is None else "past_value"
            raise InvalidRequest.at(missing, "past_key and past_value come together; send both or none")
        length = 0
        for name, width in (("past_key", key_dim), ("past_value", value_dim)):
            array = getattr(request, name)
            if array is None:
                return 0
            full = array
            if not layout.headed:
                full = full[None] if full.ndim == 2 else full
            if not layout.batched:
                full = full[None] if full.ndim == 3 else full
            if full.ndim != 4 or (full.shape[0], full.shape[1], full.shape[3]) != (batch, kv_heads, width):
                raise wrong_shape(name, f"[{batch}, {kv_heads}, P, {width}] ([B, Hkv, P, width])", array)
            if name == "past_value" and full.shape[2] != length:
                raise wrong_shape(name, f"as many past tokens as past_key, {length}", array)
            length = full.shape[2]
            self.arrays[name] = full
        return length

    def _finish(
        self,
        layout: QueryLayout,
        sizes: tuple[int, int, int, int, int, int, int, int],
        dtype: str,
        reply_dtype: str,
        value_is: str,
        own_key_dim: int | None = None,
    ) -> BoundRequest:
        batch, heads, kv_heads, queries, keys, past, head_dim, value_dim = sizes
        key_is = "query" if self.request.key is None else "key"
        sequence_masks, dropout, wanted, learned = None, None, False, dict[str, Array]()
        check_empty(self.arrays)
        if self.more:
            self._mask(batch, heads, queries, keys)
            for name, shape in (("key_mask", (batch, keys)), ("key_lengths", (batch,)), ("offsets", (batch,))):
                self._per_sequence(name, shape, layout)
        if self.more or self.spec.method.name != "exact":
            self._method(layout, sizes)
        if self.more:
            self._key_lengths(keys)
            sequence_masks = self._global_tokens(layout, batch, keys)
            check_as_many(self.request.positions, queries, keys - past)
            self._per_sequence("positions", (batch, queries), layout)
            dropout, wanted = self._dropout(), self._wants_state()
        if self.target is None:
            widths = Widths(heads, kv_heads, head_dim, value_dim, own_key_dim=own_key_dim)
            check_position(self.spec, widths)
            learned = check_learned(self.spec, self.request.parameters, widths)
        elif self.request.parameters:
            learned = _check_parameters(self.request.parameters, self.target)
        if self.spec.position.name != "none":
            check_within(self.spec, self.arrays, queries, keys - past, past, key_is)
        if self.spec.add_bias_kv or self.spec.add_zero_attn:
            keys += added_keys(self.spec)
        return BoundRequest(
            module=self.target, spec=self.spec, layout=layout, batch=batch, heads=heads, kv_heads=kv_heads,
            queries=queries, keys=keys, past=past, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
            reply_dtype=reply_dtype, arrays=self.arrays, value_is=value_is, dropout=dropout, learned=learned,
            sequence_masks=sequence_masks, own_key_dim=own_key_dim, state_wanted=wanted,
        )  # fmt: skip

    def _key_lengths(self, keys: int) -> None:
        lengths = self.arrays.get("key_lengths")
        if lengths is not None and lengths.size and (lengths.min() < 0 or lengths.max() > keys):
            raise InvalidRequest.at(
                "key_lengths", f"expected numbers from 0 to the {keys} keys, got {lengths.min()} to {lengths.max()}"
            )

    def _dropout(self) -> WeightDropout | None:
        dropout = getattr(self.request, "dropout", None)  # an inspection drops nothing
        return (
            WeightDropout(dropout.p, dropout.seed)
            if dropout is not None and (dropout.p > 0 or dropout.return_mask)
            else None
        )

    def _wants_state(self) -> bool:
        request = self.request
        is_forward = isinstance(request, ForwardRequest)
        return is_forward and (request.initial_state is not None or getattr(request, "return_state", False))

    def _method(self, layout: QueryLayout, sizes: tuple[int, int, int, int, int, int, int, int]) -> None:
        """Check and bind the inputs of the spec's method beside q, k and v."""
        batch, _, kv_heads, _, keys, past, head_dim, value_dim = sizes
        check_request(self.spec, self.request, module=self.target is not None, keys=keys)
        self.arrays |= bind_tensors(
            self.request,
            batch=batch,
            kv_heads=kv_heads,
            keys=keys - past,
            head_dim=head_dim,
            value_dim=value_dim,
            lead=int(layout.batched) + int(layout.headed),
        )

    def _global_tokens(self, layout: QueryLayout, batch: int, keys: int) -> tuple[Sequence[Mask], ...] | None:
        """Return each sequence's masks with its own global tokens, once if all are the same; None if there are none."""
        if self.request.global_mask is None:
            return None
        self._per_sequence("global_mask", (batch, keys), layout)
        method, masks = self.spec.method.name, self.spec.masks
        if method != "exact":
            raise InvalidRequest.at(
                "global_mask",
                f"method {method} takes no masks of positions but causal; leave global_mask out, or take method exact",
            )
        positions = [np.flatnonzero(row).tolist() for row in self.arrays["global_mask"]]
        if (most := max(map(len, positions), default=0)) > MAX_POSITIONS:
            raise InvalidRequest.at(
                "global_mask",
                f"a sequence has {most} global tokens; expected at most {MAX_POSITIONS}",
                limit=MAX_POSITIONS,
            )
        if not masks or all(position == positions[0] for position in positions):
            return (with_global_tokens(masks, positions[0] if positions else ()),)
        return tuple(with_global_tokens(masks, position) for position in positions)

    def _mask(self, batch: int, heads: int, queries: int, keys: int) -> None:
        mask = self.request.mask
        if mask is None:
            return
        full = (batch, heads, queries, keys)
        fits = 1 <= mask.ndim <= 4 and all(
            size in {1, want} for size, want in zip(mask.shape[-2::-1], full[-2::-1], strict=False)
        )
        if not fits or mask.shape[-1] > max(keys, 1):
            raise wrong_shape(
                "mask",
                f"a shape that broadcasts to [B, H, Q, K] = {list(full)} (its last dimension may be shorter)",
                mask,
            )
        self.arrays["mask"] = mask

    def _per_sequence(self, name: str, shape: tuple[int, ...], layout: QueryLayout) -> None:
        """Check a tensor with one entry (or row) per sequence; one number is for all sequences."""
        array = getattr(self.request, name)
        if array is None:
            return
        if not layout.batched and array.ndim == len(shape) - 1:
            array = array[None]
        if name == "offsets" and array.ndim == 0:
            array = np.broadcast_to(array, shape)
        if array.shape != shape:
            wanted = list(shape if layout.batched else shape[1:])
            raise wrong_shape(name, f"{wanted}", getattr(self.request, name))
        self.arrays[name] = array


def _check_parameters(given: Mapping[str, Array], module: Module) -> dict[str, Array]:
    """Return the parameters that replace the module's own. Raises InvalidRequest or ShapeMismatch."""
    for name, value in given.items():
        param = f"parameters.{name[:80]}"
        held = module.parameters.get(name)
        if held is None:
            known = ", ".join(module.parameters)
            raise InvalidRequest.at(param, f"module {module.name!r} has no such parameter; it has {known}")
        if value.shape != held.shape:
            raise wrong_shape(param, f"the shape of the module's own, {list(held.shape)}", value)
    return dict(given)
