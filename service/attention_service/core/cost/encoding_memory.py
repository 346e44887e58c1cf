"""Peak memory while q, k and v are made of what came in, and of the bias of a position encoding."""

from dataclasses import dataclass

from attention_contract.positions import Rope
from attention_service.core.cost.encoding import position_cost, roles, tabled_places
from attention_service.core.cost.tensors import kv_cache_bytes_per_token
from attention_service.core.cost.workload import Workload
from attention_service.core.positions import POSITIONS


@dataclass(frozen=True)
class Making:
    """Bytes beyond what came in."""

    peak: int
    """The most that are held at a time."""
    anew: int
    """Of queries and new keys that are tensors of their own because of an encoding or a norm; of raw ones alone."""
    graph: int
    """What autograd keeps of it for the backward pass."""
    backward: int
    """What its own backward pass takes, the graph included."""


def making(work: Workload) -> Making:
    """Encoded, projected, normed and turned, one after the other; joining the past is not in it."""
    e, wide = work.itemsize, max(work.itemsize, 4)
    queries = work.batch * work.heads * work.queries * work.head_dim
    keys = work.batch * work.kv_heads * work.new_keys * work.head_dim
    projected = work.sizes is not None
    made = queries * e + work.batch * work.new_keys * kv_cache_bytes_per_token(work) if projected else 0
    added, peak = _added(work)
    peak = max(peak, added + made)
    graph = added if projected else 0
    held = made if projected else added
    anew = added
    if work.spec.qk_norm is not None:
        peak = max(peak, held + _normed(max(queries, keys), e) + (0 if projected or added else queries * e))
        graph += (queries + keys) * (wide + (e if projected and e == wide else wide if e < wide else 0))
        anew = (queries + keys) * e
        held = held if projected or added else anew
    if (cost := position_cost(work)).turned:
        table = tabled_places(work) * cost.table * wide // 8
        after = held + table + queries * e
        partial = isinstance(work.spec.position, Rope) and work.spec.position.dim not in {None, work.head_dim}
        peak = max(peak, held + tabled_places(work) * cost.making, held + table + _turned(queries, e, partial=partial))
        peak = max(peak, after + _turned(keys, e, partial=partial))
        graph += table
        anew = (queries + keys) * e
    back = 4 * wide * max(queries, keys) if work.spec.qk_norm is not None else 0
    return Making(peak, 0 if projected else anew, graph, graph + back)


def _added(work: Workload) -> tuple[int, int]:
    """What an encoding is added to, and the most that is held while it is."""
    e, wide = work.itemsize, max(work.itemsize, 4)
    rows = work.batch if work.batched_places else 1
    done = peak = 0
    for role in roles(work):
        cost = position_cost(work, role.width)
        if not cost.added:
            return 0, 0
        places, numbers = rows * role.tokens, role.vectors * role.width
        summing = places * (cost.table + role.width * wide) + numbers * (wide + (wide + e if e < wide else 0))
        peak = max(peak, done + max(places * cost.making, summing))
        done += numbers * e
    return done, peak


def _normed(numbers: int, e: int) -> int:
    """The tensor scaled and weighed; of a half type, as it is in float32 and the result as well."""
    return numbers * (2 * e if e >= 4 else 12 + e)


def _turned(numbers: int, e: int, *, partial: bool) -> int:
    """Both halves and the two put together; of a half type, as it is in float32 and the result as well.

    ``partial``: and what does not turn put beside.
    """
    return numbers * ((2 * e if e >= 4 else 12 + e) + partial * e)


def bias_elements(work: Workload, rows: int | None = None) -> int:
    """Elements of a position's bias for so many queries times heads of each sequence; 0 where there is none."""
    if not POSITIONS.of(work.spec.position).biased:
        return 0
    rows = work.heads * work.queries if rows is None else rows
    return (work.batch if work.batched_places else 1) * rows * work.keys


def bias_making(work: Workload, rows: int, itemsize: int) -> int:
    """The most that is held while a bias is made, itself included."""
    elements = bias_elements(work, rows)
    return elements * itemsize + -(-elements // work.heads) * position_cost(work).pair_making
