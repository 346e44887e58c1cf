"""Memory while q, k and v are made of what came in: encoded, projected, normed, turned, the past before them."""

from dataclasses import dataclass

from attention_contract.positions import Rope
from attention_service.core.cost.encoding import position_cost, roles, same_places
from attention_service.core.cost.phases import Ledger
from attention_service.core.cost.tensors import input_bytes, input_tensors
from attention_service.core.cost.workload import Workload


@dataclass(frozen=True)
class Apart:
    """Of q, k and v those whose heads do not lie one after the other, so that a matrix product copies them."""

    q: bool
    k: bool
    v: bool

    @classmethod
    def of(cls, work: Workload) -> "Apart":
        """A projection's heads lie side by side in each token; turning, joining or adding keys lays them out."""
        projected, turned = work.sizes is not None, position_cost(work).turned > 0
        queries = projected and not turned and work.queries > 1 and work.heads > 1
        values = projected and not joined(work) and work.keys > 1 and work.kv_heads > 1
        return cls(queries, values and not turned, values)


def joined(work: Workload) -> bool:
    """Whether keys and values are put together of several parts."""
    return work.past > 0 or work.extra > 0


def prepare(ledger: Ledger, work: Workload) -> None:
    """From the inputs to q, k and v by head, which stay."""
    projected = work.sizes is not None
    came = input_tensors(work)
    ledger.hold(inputs=input_bytes(work))
    ledger.phase("inputs")
    added = _encode(ledger, work)
    turned = work.spec.qk_norm is not None or position_cost(work).turned > 0
    if work.apart:
        _make(ledger, work)
        ledger.hold(apart=sum(ledger.held.pop(name, 0) for name in ("q", "k", "v")))
    _make(ledger, work)
    if added and not projected and not turned:
        ledger.rename("encoded", "q and k")
    else:
        ledger.drop("encoded")
    _join(ledger, work)
    query = came["query"]
    own = added or turned
    if projected:
        gone = sum(came.values()) - came["rest"]
    else:
        value = not joined(work)
        key = not (own or joined(work)) or ("value" not in work.inputs and value)
        query_stays = not own or ("key" not in work.inputs and key)
        gone = (0 if query_stays else query) + (0 if key else came["key"]) + (0 if value else came["value"])
        gone += came["past"]
    ledger.drop("inputs")
    ledger.hold(inputs=input_bytes(work) - gone)


def _encode(ledger: Ledger, work: Workload) -> bool:
    """The encoding added to each tensor that it is added to; whether there is one."""
    e, wide = work.itemsize, max(work.itemsize, 4)
    rows = work.batch if work.batched_places else 1
    for role in roles(work):
        cost = position_cost(work, role.width)
        if not cost.added:
            return False
        places, numbers = rows * role.tokens, role.vectors * role.width
        ledger.phase("encode", encoding=places * cost.making)
        table = places * (cost.table + cost.table_elements * e)
        widened = places * role.width * wide if cost.table or e < wide else 0
        if cost.table and wide == 8:
            widened = 0  # it is made in float64
        sums = numbers * (wide + (wide if e < wide else 0))
        ledger.phase("encode", encoding=table + widened, encoded=sums)
        ledger.hold(encoded=numbers * e)
    return True


def _make(ledger: Ledger, work: Workload) -> None:
    """Projected, normed and turned."""
    e, wide = work.itemsize, max(work.itemsize, 4)
    queries = work.batch * work.heads * work.queries * work.head_dim
    keys = work.batch * work.kv_heads * work.new_keys * work.head_dim
    values = work.batch * work.kv_heads * work.new_keys * work.value_dim
    projected = work.sizes is not None
    if projected:
        ledger.hold(q=queries * e, k=keys * e, v=values * e)
        ledger.phase("project")
    if work.spec.qk_norm is not None:
        for name, numbers in (("q", queries), ("k", keys)):
            ledger.phase("norm", normed=numbers * (2 * e if e >= 4 else 12) + numbers // max(work.head_dim, 1) * wide)
            if not projected:
                ledger.hold(**{name: numbers * e})
    cost = position_cost(work)
    if not cost.turned:
        return
    rows = work.batch if work.batched_places else 1
    ledger.phase("turn", angles=rows * work.queries * cost.making)
    ledger.hold(angles=rows * work.queries * cost.table * wide // 8)
    if not same_places(work):
        ledger.phase("turn", angles=rows * work.new_keys * cost.making)
        ledger.hold(angles=rows * work.new_keys * cost.table * wide // 8)
    dim = work.spec.position.dim if isinstance(work.spec.position, Rope) else None
    ledger.phase("turn", turned=_turned(queries, e, work.head_dim, dim))
    ledger.phase("turn", turned=queries * e + _turned(keys, e, work.head_dim, dim))
    if not projected and "q" not in ledger.held:
        ledger.hold(q=queries * e, k=keys * e)
    ledger.drop("angles")


def _turned(numbers: int, e: int, width: int, dim: int | None) -> int:
    """Both halves and the two put together; of a half type, as it is in float32 and the result as well.

    Where not all dimensions turn, at last what does not beside what does.
    """
    turning = numbers * (dim or width) // width
    halves = turning * (2 * e if e >= 4 else 12 + e)
    beside = turning * (2 * e if e >= 4 else 8 + e) + numbers * e
    return halves if dim in {None, width} else max(halves, beside)


def _join(ledger: Ledger, work: Workload) -> None:
    """The past before the new keys, and those that the spec adds after them."""
    each = work.batch * work.kv_heads * work.itemsize
    told = {"k": each * work.told_keys * work.head_dim, "v": each * work.told_keys * work.value_dim}
    if work.past:
        for name, size in told.items():
            ledger.phase("join past", **{f"{name} with past": size})
            ledger.drop(name)
            ledger.hold(**{name: size})
    if work.extra:
        whole = {"k": each * work.keys * work.head_dim, "v": each * work.keys * work.value_dim}
        ledger.phase("add keys", added=sum(whole.values()) * (2 if work.apart else 1))
        ledger.drop("k", "v")
        ledger.hold(**whole)
