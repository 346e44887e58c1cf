"""Facts of raw attention from its tensors: head layout, dtype, and the spec's learned tensors."""

from collections.abc import Mapping

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import AttentionInputs
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import Array
from attention_service.core.masks.global_projections import has_separate
from attention_service.core.multihead import learned_of
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Widths
from attention_service.core.scores import SCORES
from attention_service.runtime.binding.bound_request import QueryLayout, wrong_shape

Split = tuple[int, int, int, int]
"""Batch, heads, length and width."""


def check_raw_spec(spec: AttentionSpec) -> None:
    """Raise InvalidRequest for a spec that only a module can have."""
    if has_separate(spec.masks):
        raise InvalidRequest.at(
            "spec.masks",
            "separate projections of global tokens need a module, and raw attention has none; send "
            '"projections": "shared", or create a module',
        )


def layout_of(
    request: AttentionInputs, num_heads: int | None, num_kv_heads: int | None
) -> tuple[QueryLayout, int, int]:
    """Return the query's layout and, if ``num_heads`` states it, the numbers of heads and key/value heads (else 0)."""
    query = request.query
    if num_heads is not None:
        if query.ndim not in {2, 3}:
            raise wrong_shape("query", "[B, L, H·D] or [L, H·D], since num_heads is given", query)
        kv_heads = num_kv_heads or num_heads
        if num_heads % kv_heads or (request.key is None and kv_heads != num_heads):
            raise InvalidRequest.at(
                "num_kv_heads", f"{kv_heads} must divide num_heads {num_heads}; without key, equal it"
            )
        return QueryLayout(batched=query.ndim == 3, merged=True), num_heads, kv_heads
    if query.ndim not in {2, 3, 4}:
        raise wrong_shape("query", "[B, H, Q, D], [H, Q, D] or [Q, D]; for [B, L, H·D] give num_heads", query)
    return QueryLayout(batched=query.ndim == 4, headed=query.ndim != 2), 0, 0


def split_shape(name: str, array: Array, heads: int, layout: QueryLayout) -> Split:
    """Return the shape ``[B, heads, L, W]`` of a tensor after its heads are split."""
    if not layout.merged:
        b, h, length, width = array.shape
        return b, h, length, width
    if array.shape[-1] % heads:
        raise wrong_shape(name, f"a last dimension that is a multiple of its {heads} heads", array)
    return array.shape[0], heads, array.shape[1], array.shape[2] // heads


def check_agreement(
    request: AttentionInputs, spec: AttentionSpec, query: Split, key: Split, value: Split, value_is: str
) -> None:
    """Raise ShapeMismatch unless the three can attend to one another; each is ``[B, heads, L, W]``."""
    key_is = "query" if request.key is None else "key"
    conditions = (
        ("query", query[1] > 0 and query[3] > 0, "at least one head, of a width of at least 1"),
        (key_is, key[0] == query[0], f"the query's batch of {query[0]}"),
        (value_is, value[0] == query[0], f"the query's batch of {query[0]}"),
        (
            key_is,
            key[3] == query[3] or two_widths(spec),
            f"the query's head width, {query[3]}, unless the score is additive or bilinear, the method exact, and no "
            "position is encoded in queries and keys",
        ),
        (key_is, key[3] > 0, "a width of at least 1"),
        (key_is, key[1] > 0 and query[1] % max(key[1], 1) == 0, f"heads that divide the query's {query[1]}"),
        (value_is, value[1] == key[1], f"as many heads as key, {key[1]}"),
        (value_is, value[2] == key[2], f"as many tokens as key, {key[2]}"),
        (value_is, value[3] > 0, "a width of at least 1"),
    )
    for name, holds, expected in conditions:
        if not holds:
            raise wrong_shape(name, expected, getattr(request, name))


def two_widths(spec: AttentionSpec) -> bool:
    """True if the keys of raw attention may have another width than the queries."""
    position = POSITIONS.of(spec.position)
    encoded = position.reads and not position.biased
    return SCORES.of(spec.score).two_widths and not encoded and spec.method.name == "exact"


def check_learned(spec: AttentionSpec, given: Mapping[str, Array], widths: Widths) -> dict[str, Array]:
    """Return the learned tensors. Raises InvalidRequest unless they are the spec's, ShapeMismatch for a shape."""
    expected = learned_of(spec, widths)
    if unknown := [name for name in given if name not in expected]:
        named = unknown[0][:80]
        raise InvalidRequest.at(
            f"parameters.{named}", f"this spec has {', '.join(expected) or 'no learned tensors'}; leave it out"
        )
    for name, learned in expected.items():
        if name not in given:
            raise InvalidRequest.at(
                f"parameters.{name}",
                f"the spec needs it, of shape {list(learned.shape)}; send it",
                expected=list(learned.shape),
            )
        if given[name].shape != learned.shape:
            raise wrong_shape(f"parameters.{name}", f"{list(learned.shape)}", given[name])
    return {name: given[name] for name in expected}
