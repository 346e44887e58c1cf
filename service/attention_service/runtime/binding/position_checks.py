"""Checks of a request's places against its position encoding, before anything is allocated."""

from collections.abc import Mapping

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.costs.complexity import Shape
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import Array
from attention_service.core.positions import POSITIONS


def check_reads_positions(spec: AttentionSpec, positions: Array | None) -> None:
    """Raise InvalidRequest for positions that no encoding reads."""
    if positions is not None and not POSITIONS.of(spec.position).reads:
        raise InvalidRequest.at(
            "positions",
            f"the spec's position encoding is {spec.position.name!r}, which uses no positions; leave them out",
        )


def check_as_many(positions: Array | None, queries: int, new_keys: int) -> None:
    """Raise InvalidRequest for positions if there are not as many new keys as queries."""
    if positions is not None and queries != new_keys:
        raise InvalidRequest.at(
            "positions",
            "they are the positions of the new tokens, as queries and as keys, but there are "
            f"{_plural(queries, 'query', 'queries')} and {_plural(new_keys, 'new key', 'new keys')}; send as many of "
            "both, or offsets instead",
        )


def check_within(
    spec: AttentionSpec, arrays: Mapping[str, Array], queries: int, new_keys: int, past: int, key_is: str
) -> None:
    """Raise InvalidRequest for a token at a place that the spec's encoding does not have.

    arrays: positions and offsets of the request; key_is: the field of the keys.
    """
    length = POSITIONS.of(spec.position).length
    if length is None or not queries + new_keys:
        return
    positions, offsets = arrays.get("positions"), arrays.get("offsets")
    if positions is not None:
        ends = [("positions", int(positions.min()), int(positions.max()))] if positions.size else []
    else:
        first = (past, past) if offsets is None or not offsets.size else (int(offsets.min()), int(offsets.max()))
        ends = [("query" if offsets is None else "offsets", first[0], first[1] + queries - 1)] if queries else []
        ends += [(key_is, past, past + new_keys - 1)] if new_keys else []
    for name, lowest, highest in ends:
        if lowest < 0 or highest >= length:
            raise InvalidRequest.at(
                name,
                f"tokens have positions {lowest} to {highest}, but the spec's position encoding has only 0 to "
                f"{length - 1}; use positions in this range",
                limit=length,
            )


def check_shape(spec: AttentionSpec, shape: Shape) -> None:
    """Raise InvalidRequest for a shape with more tokens than the spec's encoding has places."""
    length = POSITIONS.of(spec.position).length
    tokens = shape.past + max(shape.queries, shape.keys or 0)
    if length is not None and tokens > length:
        param = "shape.keys" if shape.queries < (shape.keys or 0) else "shape.queries"
        raise InvalidRequest.at(
            param,
            f"there are {tokens} tokens, the past included, but the spec's position encoding has {length} positions; "
            "ask for fewer",
            limit=length,
        )


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
