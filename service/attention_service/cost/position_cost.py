"""Cost of position encodings and of the norm of queries and keys: work per token, and the bias of each pair."""

from dataclasses import dataclass

from attention_service.core.positions import POSITIONS, PositionCost
from attention_service.cost.attention import SizedAttention


@dataclass(frozen=True)
class Role:
    """A tensor to which an encoding is added."""

    tokens: int
    vectors: int
    """Number of vectors: one for each token of the batch, or one for each head of each token."""
    width: int


def position_cost(x: SizedAttention, width: int = 0) -> PositionCost:
    """Return the cost that the spec's encoding states; ``width`` is that of the tensor to which it is added."""
    return POSITIONS.of(x.spec.position).cost(x.head_dim, width)


def roles(x: SizedAttention) -> list[Role]:
    """Return the tensors to which an encoding is added; one tensor in several roles at the same places counts once."""
    apart = not same_places(x)
    keys = "key" in x.inputs or apart
    if x.sizes is None:
        both = [Role(x.queries, x.batch * x.heads * x.queries, x.head_dim)]
        return both + [Role(x.new_keys, x.batch * x.kv_heads * x.new_keys, x.head_dim)] * keys
    query, key, value = x.sizes.inputs
    tensor_roles = [Role(x.queries, x.batch * x.queries, query)]
    tensor_roles += [Role(x.new_keys, x.batch * x.new_keys, key)] * keys
    return tensor_roles + [Role(x.new_keys, x.batch * x.new_keys, value)] * ("value" in x.inputs)


def same_places(x: SizedAttention) -> bool:
    """True if queries and new keys are known to have the same places."""
    return x.queries == x.new_keys and not x.batched_offsets


def tabled_places(x: SizedAttention) -> int:
    """Number of rotated places: those of the queries, and of the new keys if they differ."""
    rows = x.batch if x.batched_places else 1
    return rows * (x.queries + (0 if same_places(x) else x.new_keys))


def token_flops(x: SizedAttention) -> tuple[int, int]:
    """FLOPs for all tokens, forward and backward: addition, norm and rotation.

    The norm takes 4 for each number (square, sum, scale, weigh) and 3 for each mean; backward, 8 for each number:
    its gradient by way of the scale 6, that of the weight 2.
    """
    added = 0
    rows = x.batch if x.batched_places else 1
    for role in roles(x):
        cost = position_cost(x, role.width)
        added += role.vectors * cost.added + (rows * role.tokens * cost.place if cost.added else 0)
    cost = position_cost(x)
    vectors = x.batch * (x.heads * x.queries + x.kv_heads * x.new_keys)
    rotated = vectors * cost.rotated
    table = tabled_places(x) * cost.place if cost.rotated else 0
    normed = normed_back = 0
    if x.spec.qk_norm is not None:
        means = vectors if x.spec.qk_norm.over == "head" else x.batch * (x.queries + x.new_keys)
        normed, normed_back = 4 * vectors * x.head_dim + 3 * means, 8 * vectors * x.head_dim
    return added + normed + table + rotated, normed_back + rotated
