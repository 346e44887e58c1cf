"""Cost of position encodings and of the norm of queries and keys: work per token, and the bias of each pair."""

from dataclasses import dataclass
from functools import lru_cache

from attention_service.core.positions import POSITIONS, PositionCost
from attention_service.cost.workload import Workload


@dataclass(frozen=True)
class Role:
    """A tensor to which an encoding is added."""

    tokens: int
    vectors: int
    """Number of vectors: one for each token of the batch, or one for each head of each token."""
    width: int


@lru_cache(maxsize=1024)
def position_cost(work: Workload, width: int = 0) -> PositionCost:
    """Return the cost that the spec's encoding states; ``width`` is that of the tensor to which it is added."""
    return POSITIONS.of(work.spec.position).cost(work.head_dim, width)


def roles(work: Workload) -> list[Role]:
    """Return the tensors to which an encoding is added; one tensor in several roles at the same places counts once."""
    apart = not same_places(work)
    keys = "key" in work.inputs or apart
    if work.sizes is None:
        both = [Role(work.queries, work.batch * work.heads * work.queries, work.head_dim)]
        return both + [Role(work.new_keys, work.batch * work.kv_heads * work.new_keys, work.head_dim)] * keys
    query, key, value = work.sizes.inputs
    told = [Role(work.queries, work.batch * work.queries, query)]
    told += [Role(work.new_keys, work.batch * work.new_keys, key)] * keys
    return told + [Role(work.new_keys, work.batch * work.new_keys, value)] * ("value" in work.inputs)


def same_places(work: Workload) -> bool:
    """True if queries and new keys are known to have the same places."""
    return work.queries == work.new_keys and not work.batched_offsets


def tabled_places(work: Workload) -> int:
    """Number of rotated places: those of the queries, and of the new keys if they differ."""
    rows = work.batch if work.batched_places else 1
    return rows * (work.queries + (0 if same_places(work) else work.new_keys))


def token_traffic(work: Workload) -> int:
    """Bytes read and written for all tokens: a sum moves three tensors, a norm and a rotation take four steps each."""
    wide = max(work.itemsize, 4)
    numbers = sum(role.vectors * role.width for role in roles(work) if position_cost(work, role.width).added)
    made = work.batch * (work.heads * work.queries + work.kv_heads * work.new_keys) * work.head_dim
    steps = 4 * (work.spec.qk_norm is not None) + 4 * (position_cost(work).rotated > 0)
    return 3 * numbers * work.itemsize + 2 * steps * made * wide


def token_flops(work: Workload) -> tuple[int, int]:
    """FLOPs for all tokens, forward and backward: addition, norm and rotation.

    The norm takes 4 for each number (square, sum, scale, weigh) and 3 for each mean; backward, 8 for each number:
    its gradient by way of the scale 6, that of the weight 2.
    """
    added = 0
    rows = work.batch if work.batched_places else 1
    for role in roles(work):
        cost = position_cost(work, role.width)
        added += role.vectors * cost.added + (rows * role.tokens * cost.place if cost.added else 0)
    cost = position_cost(work)
    vectors = work.batch * (work.heads * work.queries + work.kv_heads * work.new_keys)
    rotated = vectors * cost.rotated
    table = tabled_places(work) * cost.place if cost.rotated else 0
    normed = normed_back = 0
    if work.spec.qk_norm is not None:
        means = vectors if work.spec.qk_norm.over == "head" else work.batch * (work.queries + work.new_keys)
        normed, normed_back = 4 * vectors * work.head_dim + 3 * means, 8 * vectors * work.head_dim
    return added + normed + table + rotated, normed_back + rotated
