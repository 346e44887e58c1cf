"""What Nyström attention costs."""

from attention_contract import spec
from attention_service.core.methods.base import Extent, MethodCost, PassCost


def nystrom_cost(x: Extent, options: spec.Nystrom) -> MethodCost:
    """Means, three products with landmarks, four m × m products an iteration, and two with the values.

    Elementwise: scale 1 for each of the queries; softmax 5 (backward 4) for each of the three matrices' entries; 7 an
    iteration and entry (three identities scaled and subtracted from, and a quarter).
    """
    m, a = min(options.landmarks, x.queries, x.keys), x.accumulated
    heads, kv = x.batch * x.heads, x.batch * x.kv_heads
    q, k, v = heads * x.queries * x.head_dim, kv * x.keys * x.head_dim, kv * x.keys * x.value_dim
    context = heads * x.queries * x.value_dim
    widened = (k + v) * a if a != x.itemsize else 0
    padding = (k + v) * x.itemsize if x.padded else 0
    if not x.padded and m == x.queries == x.keys:
        pairs = heads * m * m
        held = widened + q * a + 2 * pairs * a + context * a
        forward = PassCost(2 * pairs * x.head_dim, 2 * pairs * x.value_dim, q + 5 * pairs)
        backward = PassCost(4 * pairs * x.head_dim, 4 * pairs * x.value_dim, q + 4 * pairs)
        kept = held + (pairs + q) * a + max(pairs * a, (q + k + v) * x.itemsize)
        return MethodCost(forward, backward, held, kept, 6 * pairs * a)
    left, right, middle = heads * x.queries * m, heads * m * x.keys, heads * m * m
    means = 2 * x.batch * m * (x.queries * x.heads * x.head_dim + x.keys * x.kv_heads * x.head_dim)
    scores = 2 * (left + middle + right) * x.head_dim + (8 * options.iterations * middle + 2 * left) * m
    values = 2 * (left + right) * x.value_dim
    entries = left + middle + right
    elementwise = q + 5 * entries + (7 * options.iterations + 2) * middle
    # Of the means' factors, only the tokens have a gradient.
    backward = PassCost(means + 2 * scores, 2 * values, q + 4 * entries + 2 * (7 * options.iterations + 2) * middle)
    averages = (x.batch if x.padded else 1) * m * (x.queries + x.keys)
    landmarks = 2 * heads * m * x.head_dim
    base = padding + widened + q * a + averages * a + landmarks * a
    narrowed = context * x.itemsize if widened else 0
    mixed = (2 * left + right + 4 * middle + context + heads * m * x.value_dim) * a + narrowed
    held = base + max(mixed, (left + 2 * right + middle) * a, (left + 2 * middle) * a + left * a, (q + k) * a)
    # Of each iteration, z, its quarter, xz and the three differences.
    kept = base + (2 * left + right + (6 * options.iterations + 4) * middle + heads * m * x.value_dim + context) * a
    ending = base + (right + 3 * k + v) * a + q * x.itemsize
    held_backward = max(kept + (2 * left + right + 4 * middle) * a, ending)
    return MethodCost(
        PassCost(means + scores, values, elementwise),
        backward,
        held,
        max(held, held_backward),
        8 * entries * a,
        steps=options.iterations,
        inner=8 * options.iterations * middle * m,
    )
