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
    plainly = frozenset() if widened or padding else frozenset({"k", "v"})  # as it came, or laid out for a product
    if not x.padded and m == x.queries == x.keys:
        pairs = heads * m * m
        held = widened + padding + (q + 2 * pairs) * a + context * (a if a == x.itemsize else a + x.itemsize)
        forward = PassCost(2 * pairs * x.head_dim, 2 * pairs * x.value_dim, q + 5 * pairs)
        backward = PassCost(4 * pairs * x.head_dim, 4 * pairs * x.value_dim, q + 4 * pairs)
        kept = widened + padding + (q + pairs) * a
        held_backward = kept + max(2 * pairs + v, pairs + 2 * q + v) * a
        return MethodCost(forward, backward, held, held_backward, kept, keeps=plainly)
    left, right, middle = heads * x.queries * m, heads * m * x.keys, heads * m * m
    means = 2 * x.batch * m * (x.queries * x.heads * x.head_dim + x.keys * x.kv_heads * x.head_dim)
    scores = 2 * (left + middle + right) * x.head_dim + (8 * options.iterations * middle + 2 * left) * m
    values = 2 * (left + right) * x.value_dim
    entries = left + middle + right
    elementwise = q + 5 * entries + (7 * options.iterations + 2) * middle
    # Of the means' factors, only the tokens have a gradient.
    backward = PassCost(means + 2 * scores, 2 * values, q + 4 * entries + 2 * (7 * options.iterations + 2) * middle)
    averages = (x.batch if x.padded else 1) * m * (x.queries + x.keys)
    means_of = 2 * heads * m * x.head_dim
    base = padding + widened + (q + averages + means_of) * a
    told = x.padded  # where, and what is hidden there, is written beside what it is made of
    narrowed = context * x.itemsize if widened else 0
    held = base + max(
        (2 * left + right + middle + context) * a + max(narrowed, heads * m * x.value_dim * a),
        (left + (2 + told) * right + middle) * a,
        (left + right + 8 * middle + told * 2 * left) * a,
        (2 + told) * left * a,
        (q + k) * a - means_of * a,
    )
    # Of each iteration, z, its quarter, xz and the three differences. Means are laid out for products.
    inverse = (6 * options.iterations + 2 + told) * middle
    of_v = v * a if widened or padding else 0
    kept = (
        (0 if plainly else k * a)
        + of_v
        + (q + averages + 2 * means_of + 2 * left + right + inverse + heads * m * x.value_dim) * a
    )
    # Back through the mixing of values, the inverse, and both means.
    first = kept + max(context * a if widened else 0, x.flowing) + (left + heads * m * x.value_dim) * a
    mixing = kept - of_v + (left + right + v + 2 * middle) * a
    ending = averages * a // 2 + max(q + v + 3 * k, 3 * q + v + k) * a
    held_backward = max(first, mixing, ending)
    return MethodCost(
        PassCost(means + scores, values, elementwise),
        backward,
        held,
        held_backward,
        kept,
        plainly,
        steps=options.iterations,
        inner=8 * options.iterations * middle * m,
    )
