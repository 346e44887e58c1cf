"""Sizes that a report varies, and those that a valid request to the same module, or with the same spec, may have."""

from dataclasses import replace

from attention_contract.schemas.costs.complexity import Shape
from attention_service.core.methods import check_spec
from attention_service.core.positions import check_position
from attention_service.core.problem import Widths
from attention_service.modules.parameter_input import check_widths
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.position_checks import check_shape
from attention_service.runtime.binding.raw_binding import check_raw_spec
from attention_service.runtime.binding.recurrence_binding import check_keys, check_past
from attention_service.runtime.planning.blank_requests import at_sizes, new_request, sizes_of


def value_of(bound: BoundRequest, dimension: str) -> int:
    """Return the size that ``at`` changes."""
    tokens = {"length": bound.queries, "batch": bound.batch, "queries": bound.queries, "keys": bound.new_keys}
    widths = {"num_heads": bound.heads, "num_kv_heads": bound.kv_heads, "head_dim": bound.head_dim}
    model = {"value_dim": bound.value_dim, "d_model": bound.d_model or 0, "past": bound.past}
    return (tokens | widths | model)[dimension]


def at(bound: BoundRequest, dimension: str, value: int) -> BoundRequest:
    """Return a blank request with one size of a sweep changed.

    ``keys`` are the new ones, ``length`` is queries and new keys together; a width changes others, as in ``resized``.
    Keys get a tensor of their own unless there are as many as queries. Raises ValueError for an impossible size.
    """
    sizes = sizes_of(bound)
    match dimension:
        case "length":
            return at_sizes(bound, sizes.with_tokens(queries=value, new_keys=value))
        case "keys":
            return _inputs_apart(at_sizes(bound, sizes.with_tokens(new_keys=value)))
        case "queries":
            return _inputs_apart(at_sizes(bound, sizes.with_tokens(queries=value)))
        case "batch" | "past":
            return _with_past(at_sizes(bound, sizes.with_tokens(**{dimension: value})))
    return resized(bound, **{dimension: value})


def _inputs_apart(bound: BoundRequest) -> BoundRequest:
    if bound.queries == bound.new_keys:
        return bound
    arrays = bound.arrays | {name: bound.arrays["query"] for name in ("key", "value") if name not in bound.arrays}
    return at_sizes(bound.replaced(arrays=arrays), sizes_of(bound))


def _with_past(bound: BoundRequest) -> BoundRequest:
    """With past keys and values if there is a past, and without them if there is none."""
    arrays = {name: array for name, array in bound.arrays.items() if not name.startswith("past_")}
    if bound.past:
        arrays |= dict.fromkeys(("past_key", "past_value"), bound.arrays["query"])
    return at_sizes(bound.replaced(arrays=arrays), sizes_of(bound))


def resized(bound: BoundRequest, **changes: int) -> BoundRequest:
    """Return a blank request with other widths, all at once, by the names of a config.

    Other widths follow: ``num_kv_heads`` ``num_heads`` and ``value_dim`` ``head_dim`` where they are equal,
    the widths of keys and values ``d_model`` where they equal it, and ``head_dim`` is d_model / num_heads where the
    heads make up the width of the model. Raises ValueError for impossible widths.
    """
    sizes = bound.sizes
    if sizes is None and "d_model" in changes:
        raise ValueError("raw attention has no d_model; vary head_dim or num_heads")
    heads = changes.get("num_heads", bound.heads)
    kv_heads = changes.get("num_kv_heads", heads if bound.kv_heads == bound.heads else bound.kv_heads)
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads {kv_heads} does not divide num_heads {heads}")
    head_dim = changes.get("head_dim", bound.head_dim)
    d_model = None if sizes is None else changes.get("d_model", sizes.d_model)
    follows = sizes is not None and bound.heads * bound.head_dim == sizes.d_model and "head_dim" not in changes
    if d_model is not None and follows:
        if d_model % heads:
            raise ValueError(f"d_model {d_model} is not a multiple of num_heads {heads}; give head_dim too")
        head_dim = d_model // heads
    if sizes is not None and sizes.latent is not None and sizes.latent.shared >= head_dim:
        raise ValueError(f"head_dim {head_dim} is not more than the latent's shared part, {sizes.latent.shared}")
    value_dim = changes.get("value_dim", head_dim if bound.value_dim == bound.head_dim else bound.value_dim)
    if sizes is not None and d_model is not None:
        key_width, value_width = (
            d_model if width == sizes.d_model else width for width in (sizes.key_width, sizes.value_width)
        )
        sizes = replace(
            sizes, d_model=d_model, key_width=key_width, value_width=value_width,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        )  # fmt: skip
    return new_request(
        bound.spec,
        Widths(heads, kv_heads, head_dim, value_dim, d_model, bound.own_key_dim),
        bound.dtype,
        sizes_of(bound),
        sizes=sizes,
        inputs=bound.inputs,
        sent=bound.sent,
        threads=bound.threads,
    )


def check(bound: BoundRequest) -> None:
    """Raise InvalidRequest, naming the field, for sizes that a request would be refused for."""
    spec, sizes = bound.spec, bound.sizes
    check_spec(spec)
    check_position(spec, bound.widths, () if sizes is None else sizes.inputs)
    if sizes is None:
        check_raw_spec(spec)
    else:
        check_widths(spec, sizes.d_model, sizes.key_width)
    check_shape(spec, shape_at(bound))
    check_keys(spec, bound.sequence_keys, "shape.queries" if bound.queries == bound.new_keys else "shape.keys")
    if bound.past:
        check_past(spec, "shape.past")


def shape_at(bound: BoundRequest) -> Shape:
    """Return the shape of a request, with every default filled in."""
    return Shape.model_construct(batch=bound.batch, queries=bound.queries, keys=bound.new_keys, past=bound.past)
