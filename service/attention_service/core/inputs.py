"""Preparation of an attention from its inputs: position encoding, projection, norm, rotation and the past."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec
from attention_service.core.multihead import with_added_keys
from attention_service.core.positions import POSITIONS, Position
from attention_service.core.positions.token_positions import TokenPositions, places_of
from attention_service.core.problem import Problem
from attention_service.core.scores.qk_norm import normed

Tensors = Mapping[str, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def make_problem(
    spec: AttentionSpec,
    tensors: Tensors,
    learned: Tensors,
    by_head: Callable[[Tensor, Tensor, Tensor], Three],
    *,
    projected: bool,
    apart: Callable[[Tensor, Tensor, Tensor], Three] | None = None,
    finite: bool = False,
) -> Problem:
    """The problem that a request is about.

    tensors: ``query`` and, by the names of their fields, whatever else came; a missing key is the query, a missing
    value the key. ``by_head`` makes queries ``[B, H, Q, D]``, keys and values ``[B, Hkv, new, ...]`` of the three.
    ``projected``: it does so by the projections of a module, to whose inputs ``[B, L, ...]`` an encoding is added; to
    raw queries and keys it is added in each head. Past keys are normed and turned already. ``apart`` is like
    ``by_head``, for the queries that a module projects apart; it takes no past. ``finite``: all keys and values
    are known to be finite.
    """
    query = tensors["query"]
    key = tensors.get("key", query)
    value = tensors.get("value", key)
    past = tensors["past_key"].shape[2] if "past_key" in tensors else 0
    position = POSITIONS.of(spec.position)
    q, k, v = (query, key, value) if projected else by_head(query, key, value)
    places = _places(tensors, q.shape[-2], k.shape[-2], past, q.device) if position.reads else None
    if places is not None:
        q, k, v = _added(position, (q, k, v), places, learned, to_value=projected)
    far = None if apart is None else _turned(spec, apart(q, k, v), places, learned)
    if projected:
        q, k, v = by_head(q, k, v)
    if spec.qk_norm is not None or places is not None:
        q, k, v = _turned(spec, (q, k, v), places, learned)
    if "past_key" in tensors:
        k = torch.cat([tensors["past_key"], k], dim=2)  # [B, Hkv, P + new, D]
        v = torch.cat([tensors["past_value"], v], dim=2)
    given = Problem(
        q, k, v, spec,
        mask=tensors.get("mask"),
        key_mask=tensors.get("key_mask"),
        key_lengths=tensors.get("key_lengths"),
        past=past,
        offsets=tensors.get("offsets"),
        positions=tensors.get("positions"),
        learned=learned,
        global_qkv=far,
        finite=finite,
        given=tensors.get("weights"),
    )  # fmt: skip
    return with_added_keys(given) if spec.add_bias_kv or spec.add_zero_attn else given


def _turned(spec: AttentionSpec, three: Three, places: TokenPositions | None, learned: Tensors) -> Three:
    """Norm and rotate queries and keys."""
    q, k, v = three
    del three  # what is normed is not held any longer
    if spec.qk_norm is not None:
        q = normed(q, learned["q_norm.weight"], spec.qk_norm)
        k = normed(k, learned["k_norm.weight"], spec.qk_norm)
    if places is not None:
        q, k = POSITIONS.of(spec.position).rotated(q, k, places)
    return q, k, v


def _places(tensors: Tensors, queries: int, new_keys: int, past: int, device: torch.device) -> TokenPositions:
    return places_of(queries, new_keys, past, tensors.get("offsets"), tensors.get("positions"), device)


def _added(position: Position, three: Three, places: TokenPositions, learned: Tensors, *, to_value: bool) -> Three:
    """The encoding added; what is one tensor in several roles stays one where it stands at the same places."""
    query, key, value = three
    encoded = position.added(query, places.queries, learned)
    together = key is query and places.new_keys is places.queries
    of_key = encoded if together else position.added(key, places.new_keys, learned)
    if not to_value:
        return encoded, of_key, value
    return encoded, of_key, of_key if value is key else position.added(value, places.new_keys, learned)
