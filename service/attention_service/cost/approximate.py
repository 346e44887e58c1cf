"""Cost of an approximation: its own arithmetic, within the work that every attention has."""

from dataclasses import replace

from attention_contract.schemas.complexity import StageFlops
from attention_contract.spec import Exact
from attention_service.core.masks.global_projections import has_separate
from attention_service.core.methods import Approximation, MethodCost, approximation_of
from attention_service.cost.pairs import score_cost
from attention_service.cost.position_cost import token_flops
from attention_service.cost.tensor_bytes import projections
from attention_service.cost.workload import Workload


def approximated(work: Workload) -> Approximation | None:
    """Return the approximation of a workload; None if its method is exact."""
    return approximation_of(work.spec)


def exactly(work: Workload) -> Workload:
    """Return the same attention by the exact method, without gates, states or learned mixing."""
    spec = work.spec.model_copy(update={"method": Exact()})
    sizes = None if work.sizes is None else replace(work.sizes, spec=spec)
    return replace(work, spec=spec, sizes=sizes, sent=frozenset(), fine_gate=False, reported=False)


def plainly(work: Workload) -> Workload:
    """Return the same workload with the output alone returned."""
    if work.taps == {"output"} and work.selected_heads is None and work.selected_queries is None:
        return work
    return replace(work, taps=frozenset({"output"}), selected_heads=None, selected_queries=None)


def decode_step(work: Workload) -> Workload | None:
    """Return a step of one query and one new key per sequence that ends with the same keys; None if there is none.

    The step takes past keys and values, or the state that replaces them.
    """
    method = approximated(work)
    carried = frozenset() if method is None else method.carried(module=work.sizes is not None)
    if carried is None or has_separate(work.spec.masks):  # a past holds one projection only
        return None
    return replace(work, queries=1, keys=1, past=0, sent=carried) if carried else work.decode


def sent_always(work: Workload) -> frozenset[str]:
    """Return the tensors that every request to a method needs beside its tokens: gate and β of raw attention."""
    method = approximated(work)
    carried = None if method is None else method.carried(module=work.sizes is not None)
    return (carried or frozenset()) & {"gate", "beta"}


def method_cost(work: Workload) -> MethodCost:
    """Return the cost that the method states."""
    method = approximated(work)
    if method is None:
        raise ValueError("exact attention is counted by its kernels")
    return method.cost(work)


def method_flops(work: Workload, *, backward: bool) -> StageFlops:
    """FLOPs of one pass; ``scores`` are the products with queries and keys, ``normalizer`` the elementwise work."""
    counted = method_cost(work)
    one = counted.backward if backward else counted.forward
    times = 2 if backward else 1
    products, others = _of_score(work)
    into, out = projections(work)
    position = token_flops(work)[backward]
    return StageFlops(
        projections=times * (into + counted.projections),
        position=position,
        scores=one.scores + times * products,
        normalizer=one.elementwise + times * others,
        values=one.values,
        output_projection=times * out,
        matmul=times * (into + out + products + counted.projections) + one.scores + one.values,
        total=times * (into + out + products + others + counted.projections)
        + position + one.scores + one.values + one.elementwise,
    )  # fmt: skip


def method_order(work: Workload, dimension: str, *, memory: bool) -> str:
    """Return the method's own order in the tokens, and the projections'."""
    method = approximated(work)
    if method is None:
        raise ValueError("exact attention has an order of its kernels")
    tokens = "b·n" if dimension == "batch" else "n"
    time, held = method.orders()
    if memory:
        return f"O({held.replace('n', tokens)} + {tokens}·d)"
    projecting = f" + {tokens}·d²" if work.sizes is not None and dimension != "past" else ""
    return f"O({time.replace('n', tokens)}{projecting})"


def _of_score(work: Workload) -> tuple[int, int]:
    """FLOPs of the score on queries and keys: matrix products, and the rest. A linear method has none of its own."""
    if work.spec.method.name == "linear":
        return 0, 0
    score = score_cost(work)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    return (
        queries * score.query_products + keys * score.key_products,
        queries * score.query_flops + keys * score.key_flops,
    )
