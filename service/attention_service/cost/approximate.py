"""Cost of an approximation: its own arithmetic, within the work that every attention has."""

from attention_contract.schemas.costs.complexity import StageFlops
from attention_service.core.methods import Approximation, MethodCost, approximation_of
from attention_service.cost.attention import SizedAttention
from attention_service.cost.pairs import score_cost
from attention_service.cost.position_cost import token_flops
from attention_service.cost.tensor_bytes import projections


def approximated(x: SizedAttention) -> Approximation | None:
    """Return the approximation of a workload; None if its method is exact."""
    return approximation_of(x.spec)


def method_cost(x: SizedAttention) -> MethodCost:
    """Return the cost that the method states."""
    method = approximated(x)
    if method is None:
        raise ValueError("exact attention is counted by its kernels")
    return method.cost(x)


def method_flops(x: SizedAttention, *, backward: bool) -> StageFlops:
    """FLOPs of one pass; ``scores`` are the products with queries and keys, ``normalizer`` the elementwise x."""
    counted = method_cost(x)
    one = counted.backward if backward else counted.forward
    times = 2 if backward else 1
    products, others = _of_score(x)
    into, out = projections(x)
    position = token_flops(x)[backward]
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


def method_order(x: SizedAttention, dimension: str, *, memory: bool) -> str:
    """Return the method's own order in the tokens, and the projections'."""
    method = approximated(x)
    if method is None:
        raise ValueError("exact attention has an order of its kernels")
    tokens = "b·n" if dimension == "batch" else "n"
    time, held = method.orders()
    if memory:
        return f"O({held.replace('n', tokens)} + {tokens}·d)"
    projecting = f" + {tokens}·d²" if x.sizes is not None and dimension != "past" else ""
    return f"O({time.replace('n', tokens)}{projecting})"


def _of_score(x: SizedAttention) -> tuple[int, int]:
    """FLOPs of the score on queries and keys: matrix products, and the rest. A linear method has none of its own."""
    if x.spec.method.name == "linear":
        return 0, 0
    score = score_cost(x)
    queries, keys = x.batch * x.heads * x.queries, x.batch * x.kv_heads * x.keys
    return (
        queries * score.query_products + keys * score.key_products,
        queries * score.query_flops + keys * score.key_flops,
    )
