"""Cost of Nyström attention."""

from attention_contract import spec
from attention_service.core.kernels.extent import Extent
from attention_service.core.methods.base import MethodCost, PassCost


def nystrom_cost(x: Extent, options: spec.Nystrom) -> MethodCost:
    """Count means, three products with landmarks, four m × m products an iteration, and two with the values.

    Elementwise: scale 1 for each of the queries; softmax 5 (backward 4) for each of the three matrices' entries; 7 an
    iteration and entry (three identities scaled and subtracted from, and a quarter).
    """
    m, heads = min(options.landmarks, x.queries, x.keys), x.batch * x.heads
    q = heads * x.queries * x.head_dim
    if not x.padded and m == x.queries == x.keys:
        pairs = heads * m * m
        forward = PassCost(2 * pairs * x.head_dim, 2 * pairs * x.value_dim, q + 5 * pairs)
        backward = PassCost(4 * pairs * x.head_dim, 4 * pairs * x.value_dim, q + 4 * pairs)
        return MethodCost(forward, backward)
    left, right, middle = heads * x.queries * m, heads * m * x.keys, heads * m * m
    means = 2 * x.batch * m * (x.queries * x.heads * x.head_dim + x.keys * x.kv_heads * x.head_dim)
    scores = 2 * (left + middle + right) * x.head_dim + (8 * options.iterations * middle + 2 * left) * m
    values = 2 * (left + right) * x.value_dim
    entries = left + middle + right
    elementwise = q + 5 * entries + (7 * options.iterations + 2) * middle
    # Of the means' factors, only the tokens have a gradient.
    backward = PassCost(means + 2 * scores, 2 * values, q + 4 * entries + 2 * (7 * options.iterations + 2) * middle)
    return MethodCost(
        PassCost(means + scores, values, elementwise),
        backward,
        steps=options.iterations,
        inner=8 * options.iterations * middle * m,
    )
