"""PyTorch's fused kernel on sketches: one operation, and what its arguments take."""

from attention_service.core import steps
from attention_service.core.kernels.reach import plainly_causal, reach_of
from attention_service.core.scores import SCORES, Product
from attention_service.core.tape import BOOL, SPLIT, Number, Sketch, Tape
from attention_service.cost.sketched import Sketched, without_padding
from attention_service.cost.sketched_masks import visible
from attention_service.cost.sketched_stages import with_size


def fused(tape: Tape, given: Sketched) -> Sketch:
    """The context by one operation, and what its arguments take."""
    work = given.work
    clean = without_padding(tape, given)
    score = SCORES.of(work.spec.score)
    if not isinstance(score, Product):
        raise ValueError("the fused kernel computes a plain softmax over dot products")
    q, k, factor = score.sketched_factors(tape, clean.q, clean.k, clean.learned)
    v = clean.v
    if factor <= 0:
        q = steps.scale(tape, q)
    mask, blind = _fused_mask(tape, given)
    on_gpu = not work.threads
    if on_gpu and work.heads != work.kv_heads:
        k, v = (steps.for_each_head(tape, x, work.heads) for x in (k, v))
    if not on_gpu:
        width = max(q.dims[3], v.dims[3])
        q, k, v = (as_wide(tape, x, width) for x in (q, k, v))
    context = _attended(tape, given, (q, k, v), mask)
    if work.value_dim != context.dims[3]:
        context = steps.part(tape, context, with_size(context, 3, work.value_dim))
    return context if blind is None else steps.hide(tape, context, blind)


def _fused_mask(tape: Tape, given: Sketched) -> tuple[Sketch | None, Sketch | None]:
    """The mask that is passed, and the queries that look nowhere."""
    work = given.work
    if plainly_causal(work):
        return None, None
    reach = reach_of(work)
    seen = visible(tape, work, positional=reach is None or reach < work.told_keys - 1)
    if seen.bias is None:
        if seen.allowed is None:
            return None, None
        blind = _blind(tape, seen.allowed)
        open_ = steps.plain(tape, seen.allowed, blind)
        tape.does(0, 2 * work.itemsize, 0, 2)  # 0 and −∞ for it, which the kernel adds
        return steps.plain(tape, open_, Sketch((2,), work.itemsize), itemsize=work.itemsize, dims=open_.dims), blind
    bias = seen.bias
    if seen.allowed is not None:
        bias = steps.plain(tape, bias, steps.plain(tape, seen.allowed))
    nowhere = steps.plain(tape, bias, itemsize=BOOL)
    blind = steps.reduced(tape, nowhere, (*nowhere.dims[:3], 1))
    wide = max(work.itemsize, 4)
    if work.spec.normalizer.temperature != 1:
        bias = steps.plain(tape, steps.cast(tape, bias, max(bias.itemsize, 4)))
    bias = steps.plain(tape, bias, blind)
    forbidden, cut = steps.plain(tape, bias, itemsize=BOOL), steps.plain(tape, bias)
    bias = steps.plain(tape, forbidden, bias, cut, itemsize=bias.itemsize)
    return steps.cast(tape, bias, wide if work.threads else work.itemsize), blind


def _blind(tape: Tape, allowed: Sketch) -> Sketch:
    return steps.plain(tape, steps.reduced(tape, allowed, (*allowed.dims[:3], 1)))


def as_wide(tape: Tape, x: Sketch, width: Number) -> Sketch:
    """Zeros beside the narrower ones."""
    if x.dims[3] == width:
        return x
    y = Sketch(with_size(x, 3, width), x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(y.returned, x.bytes)
        tape.give(x, x.size, y.gradient_lies)

    return tape.later(y, step) if y.tracked else y


def _attended(tape: Tape, given: Sketched, three: tuple[Sketch, Sketch, Sketch], mask: Sketch | None) -> Sketch:
    """Queries, keys, values and mask read once, the context and a number for each query written."""
    q, k, v = three
    work = given.work
    pairs = fused_pairs(given)
    context = Sketch((*q.dims[:3], v.dims[3]), work.itemsize, q.lies, tracked=q.tracked or k.tracked or v.tracked)
    lse = steps.size_of(q.dims[:3]) * max(work.itemsize, 4)
    masked = 0 if mask is None else mask.bytes
    tape.does(q.bytes + k.bytes + v.bytes + masked, context.bytes + lse, pairs)

    def step() -> None:
        taken = q.bytes + k.bytes + v.bytes
        tape.does(context.returned + taken + context.bytes + lse + masked, taken, pairs)
        for x in (v, k, q):
            tape.give(x, x.size, SPLIT)

    return tape.later(context, step) if context.tracked else context


def fused_pairs(given: Sketched) -> int:
    """Pairs for which the fused kernel takes an exponential: those up to the diagonal where it is plainly causal."""
    work = given.work
    if not plainly_causal(work):
        return work.pairs * work.heads
    square = min(work.queries, work.keys)
    one = square * (square + 1) // 2 + (work.queries - square) * work.keys
    return work.batch * work.heads * one
