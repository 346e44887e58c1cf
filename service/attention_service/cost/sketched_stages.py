"""The stages on sketches: ``core.stages``, step by step."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from attention_service.core import steps
from attention_service.core.apart import separate_positions
from attention_service.core.blocks import rows_at_once
from attention_service.core.dropout import sketched_dropped, sketched_keep
from attention_service.core.learned import learned_of
from attention_service.core.normalizers import NORMALIZERS, Exponential
from attention_service.core.scores import SCORES
from attention_service.core.tape import BOOL, INTEGER, Number, Sketch, Tape
from attention_service.cost.pairs import softmax_itemsize
from attention_service.cost.sketched import Sketched, looked_through, real_keys, without_padding
from attention_service.cost.sketched_masks import ALL, Rows, bias_of, forbid, pick, visible
from attention_service.cost.workload import Workload


def stages(tape: Tape, given: Sketched, taps: Collection[str], rows: Rows = ALL) -> Sketch:
    """As far as these taps need, of which there must be some; the last of them."""
    missing = set(taps)
    for tap, x in _stages(tape, given, rows, with_lse="lse" in missing):
        missing.discard(tap)
        if not missing:
            return x
    raise ValueError(f"no stage gives {', '.join(missing)}")


def _stages(tape: Tape, given: Sketched, rows: Rows, *, with_lse: bool) -> Iterator[tuple[str, Sketch]]:
    work, spec = given.work, given.work.spec
    normalizer, n = NORMALIZERS.of(spec.normalizer), softmax_itemsize(work)
    far = given.apart if work.apart else None
    q = narrowed(tape, given.q, rows.heads, rows.queries)
    if far is not None:
        find_apart(tape, work)
        q = _put(tape, given, q, _apart_rows(tape, work, narrowed(tape, far[0], rows.heads, rows.queries)))
    yield "q", q
    k = narrowed(tape, given.k, rows.heads, None)
    yield "k", k
    v = narrowed(tape, given.v, rows.heads, None)
    yield "v", v

    seen = _clean(tape, replace(given, k=k, v=v))
    learned = narrowed_learned(tape, given, rows.heads)
    x = _scored(tape, q, seen, learned)
    seen_apart = seen
    if far is not None:
        far_k, far_v = (narrowed(tape, each, rows.heads, None) for each in far[1:])
        seen_apart = _clean(tape, replace(given, k=far_k, v=far_v))
        x = _put(tape, given, x, _scored(tape, _apart_rows(tape, work, q), seen_apart, learned))
    yield "scores", x

    if spec.softcap is not None:
        x = steps.scale(tape, steps.saved(tape, steps.scale(tape, x)))
    yield "capped_scores", x

    if (bias := bias_of(tape, given, rows)) is not None:
        x = steps.add(tape, x, bias)
    x = forbid(tape, visible(tape, work, rows), x)
    yield "masked_scores", x

    if with_lse and isinstance(normalizer, Exponential):
        yield "lse", normalizer.sketched_lse(tape, x, n, learned)

    real = real_keys(tape, work)
    if real is not None:
        tape.does(real.bytes, work.batch * INTEGER)
    x = steps.cast(tape, normalizer.sketched(tape, x, n, learned, padded=real is not None), work.itemsize)
    yield "weights", x

    if work.dropped:
        x = sketched_dropped(tape, x, _keep(tape, x))
    context = steps.product(tape, x, seen.v)
    if far is not None:
        context = _put(tape, given, context, steps.product(tape, _apart_rows(tape, work, x), seen_apart.v))
    yield "context", context


def _scored(tape: Tape, q: Sketch, seen: Sketched, learned: Mapping[str, Sketch]) -> Sketch:
    c = seen.scored_in
    score = SCORES.of(seen.work.spec.score)
    return score.sketched(tape, steps.cast(tape, q, c), steps.cast(tape, seen.k, c), learned)


def _apart_rows(tape: Tape, work: Workload, x: Sketch) -> Sketch:
    """The queries that are projected apart."""
    return pick(tape, x, with_size(x, 2, work.apart), work.apart)


def tapped(tape: Tape, given: Sketched, kernel: str) -> None:
    """The taps that are returned: computed again where the kernel did not keep them, and narrowed where it did."""
    work = given.work
    taps, rows = set(work.taps) - {"output"}, Rows(work.selected_heads, work.selected_queries)
    kept = {"materialized": taps, "blocked": {"q", "k", "v", "lse"}}.get(kernel, set()) | {"context"}
    for tap in taps & kept:
        _narrowed_tap(tape, given, tap)
    missing = taps - kept
    if "lse" in missing and not missing & _OVER_PAIRS:
        _log_sums(tape, given, rows)
        missing -= {"lse"}
    if missing:
        stages(tape, given, missing, rows)


def _log_sums(tape: Tape, given: Sketched, rows: Rows) -> None:
    """A number for each query, of as many queries at a time as there is room for."""
    work = given.work
    heads = work.heads if rows.heads is None else rows.heads
    wanted = work.queries if rows.queries is None else rows.queries
    at_once = rows_at_once(work.batch, int(heads), work.keys)
    if wanted <= at_once:
        stages(tape, given, {"lse"}, rows)
    else:
        with tape.repeated(wanted // at_once):
            stages(tape, given, {"lse"}, replace(rows, queries=at_once))
        if wanted % at_once:
            stages(tape, given, {"lse"}, replace(rows, queries=wanted % at_once))
    whole = work.batch * heads * wanted * softmax_itemsize(work)
    tape.does(whole, whole)


def _narrowed_tap(tape: Tape, given: Sketched, tap: str) -> None:
    work = given.work
    queries = None if tap in {"k", "v"} else work.selected_queries
    itemsize = softmax_itemsize(work) if tap == "lse" else given.scored_in if tap in _SCORES else work.itemsize
    last = {"q": work.head_dim, "k": work.head_dim, "v": work.value_dim, "context": work.value_dim, "lse": 1}
    length = work.keys if tap in {"k", "v"} else work.queries
    heads = work.kv_heads if tap in {"k", "v"} else work.heads
    whole = Sketch((work.batch, heads, length, last.get(tap, work.keys)), itemsize)
    narrowed(tape, whole, work.selected_heads, queries)


_OVER_PAIRS = {"scores", "capped_scores", "masked_scores", "weights"}
_SCORES = _OVER_PAIRS - {"weights"}


def with_apart(tape: Tape, given: Sketched, context: Sketch) -> Sketch:
    """The context of a kernel, with the rows of those queries that are projected apart."""
    work = given.work
    if not work.apart:
        return context
    find_apart(tape, work)
    rows = Rows(queries=min(work.apart, rows_at_once(work.batch, work.heads, work.keys)))
    with tape.repeated(work.apart / (rows.queries or 1)):
        far = stages(tape, given, {"context"}, rows)
    return put_rows(tape, context, steps.cat(tape, [far], 2))


def narrowed(tape: Tape, x: Sketch, heads: Number | None, queries: Number | None) -> Sketch:
    """The selected heads and queries, each a copy."""
    for dim, count in ((1, heads), (2, queries)):
        if count is not None:
            x = pick(tape, x, with_size(x, dim, count), count)
    return x


def narrowed_learned(tape: Tape, given: Sketched, heads: Number | None) -> dict[str, Sketch]:
    """Learned tensors of the selected heads."""
    if heads is None or not given.learned:
        return dict(given.learned)
    found = {}
    for name, learned in learned_of(given.work.spec, given.work.widths).items():
        x = given.learned[name]
        found[name] = x if learned.heads is None else pick(tape, x, with_size(x, learned.heads, heads), heads)
    return found


def with_size(x: Sketch, dim: int, count: Number) -> tuple[Number, ...]:
    """The sizes, of which one is another."""
    return (*x.dims[:dim], count, *x.dims[dim + 1 :])


def _clean(tape: Tape, given: Sketched) -> Sketched:
    clean = without_padding(tape, given)
    looked_through(tape, clean.work, clean.k, clean.v)
    return clean


def _put(tape: Tape, given: Sketched, x: Sketch, far: Sketch) -> Sketch:
    """The rows that are projected apart, in their place."""
    count = given.work.apart
    near = pick(tape, x, far.dims, count)
    mine = Sketch((1, 1, count, 1), BOOL)
    chosen = steps.choose(tape, mine, far, near)
    return put_rows(tape, x, chosen)


def find_apart(tape: Tape, work: Workload) -> None:
    """Where the queries that are projected apart stand, and in which sequences they are among the positions."""
    at = steps.plain(
        tape, Sketch((work.apart,), INTEGER), Sketch((work.batch if work.batched_offsets else 1, 1), INTEGER)
    )
    told = Sketch((len(separate_positions(work.spec.masks)),), INTEGER)
    steps.plain(tape, at, told, itemsize=BOOL, dims=at.dims)


def put_rows(tape: Tape, x: Sketch, chosen: Sketch) -> Sketch:
    """X with some rows of queries put in their place."""
    count = chosen.dims[2]
    y = Sketch(x.dims, x.itemsize, tracked=x.tracked or chosen.tracked)
    tape.does(x.bytes + chosen.bytes + count * INTEGER, y.bytes)

    def step() -> None:
        tape.does(y.returned + count * INTEGER, y.bytes)
        tape.give(x, x.size, y.gradient_lies)
        tape.does(chosen.bytes + count * INTEGER, chosen.bytes)
        tape.give(chosen, chosen.size)

    return tape.later(y, step) if y.tracked else y


def _keep(tape: Tape, x: Sketch) -> Sketch:
    """Drawn for as many queries at a time as there is room for."""
    batch, heads, queries, keys = (int(size) for size in x.dims)
    rows = rows_at_once(batch, heads, keys)
    full, rest = divmod(queries, rows)
    with tape.repeated(full):
        sketched_keep(tape, (batch, heads, rows, keys))
    if rest or not full:
        sketched_keep(tape, (batch, heads, rest, keys))
    keep = Sketch(x.dims, BOOL)
    tape.does(keep.bytes, keep.bytes)
    return keep
