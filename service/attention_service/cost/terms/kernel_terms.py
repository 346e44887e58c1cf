"""Terms of each kernel of exact attention."""

from collections.abc import Iterator
from dataclasses import replace

from attention_service.core.kernels.blocked import CUT
from attention_service.core.kernels.fused.call_memory import FUSED_KEYS, FusedCall
from attention_service.core.kernels.fused.cpu_blocks import CUT as FUSED_CUT
from attention_service.core.kernels.fused.cpu_blocks import takes_sizes
from attention_service.core.kernels.query_blocks import sequences_at_once
from attention_service.core.positions import POSITIONS
from attention_service.cost.kernels import kernel_of
from attention_service.cost.pairs import (
    PAIR_TAPS,
    fused_masks,
    masks_of,
    score_cost,
    score_itemsize,
    softmax_itemsize,
)
from attention_service.cost.terms.base import Term, elements, lg, moved, over_pairs, product, start
from attention_service.cost.terms.common_terms import factors, masks, masks_of_tiles
from attention_service.cost.time import executed_share
from attention_service.cost.traffic import traffic
from attention_service.cost.workload import Workload

_TASKS = 4
"""Logarithm to base 2: with more tasks than this, threads share them evenly, whatever their number."""

_NOT_BY_LIBRARY = 16**3
"""Largest number of multiplications of a product of half types that PyTorch computes itself: oneDNN, which is slow to
start, computes larger ones (``mkldnn_bf16_gemm``)."""


def of_kernel(work: Workload, kernel: str, *, gradient: bool = False) -> Iterator[Term]:
    """Yield the terms from q, k and v to the context, or those of the backward pass."""
    match kernel_of(work, kernel).timed_as:
        case "stages":
            return stages(work)
        case "fused":
            return fused(work, share=executed_share(work, kernel), packs=FusedCall.of(work).packed and not gradient)
        case "tiles":
            return fused_blocks(work, kernel, gradient=gradient) if takes_sizes(work) else blocked(work, kernel)
        case None:
            return of_other(work, kernel)


def of_other(work: Workload, kernel: str) -> Iterator[Term]:
    """Yield the terms of a kernel with rates of its own: its FLOPs and its traffic."""
    share, heads = executed_share(work, kernel), work.batch * work.heads
    flops = (score_cost(work).pair_products + 2 * work.value_dim) * work.pairs * work.heads * share
    yield start(kernel)
    yield product(kernel, flops, work.head_dim, work, heads, work.queries, wide=True)
    yield moved(kernel, traffic(replace(work, taps=frozenset({"output"})), kernel).moved, work)


def stages(work: Workload, *, weighed: bool = True) -> Iterator[Term]:
    """Yield the stages over all pairs in order; ``weighed``: up to the values, otherwise up to the scores."""
    heads = work.batch * work.heads
    pairs = work.pairs * work.heads
    c, n = score_itemsize(work), softmax_itemsize(work)
    yield start("stages")
    yield from factors(work)
    yield product("scores", score_cost(work).pair_products * pairs, work.head_dim, work, heads, work.queries, wide=True)
    tokens = work.batch * (work.heads * work.queries + work.kv_heads * work.keys)
    yield moved("queries and keys", tokens * work.head_dim * c, work)
    if work.spec.softcap is not None:
        yield start("softcap")
        yield over_pairs("softcap", pairs * c, work)
    told = masks_of(work)
    if told.any:
        yield from masks(work)
        yield start("hiding")
        yield over_pairs("hiding", pairs * c, work)
        yield elements("masks together", told.together)
    if POSITIONS.of(work.spec.position).biased:
        yield over_pairs(work.spec.position.name, pairs * c, work)
    if not weighed:
        return
    name = work.spec.normalizer.name
    yield start(name)
    yield over_pairs(name, pairs * n, work)
    if work.spec.normalizer.temperature != 1:
        yield over_pairs("temperature", pairs * n, work)
    if n != work.itemsize:
        yield over_pairs("narrowing", pairs * n, work)
    if work.dropped:
        yield start("dropout")
        yield over_pairs("dropout", pairs * 4, work)
    yield product("values", 2 * pairs * work.value_dim, work.value_dim, work, heads, work.queries)


def again(work: Workload, keeps: frozenset[str] = frozenset()) -> Iterator[Term]:
    """Yield the terms of taps that a kernel does not keep: computed again for the selected heads and queries."""
    wanted = work.taps & PAIR_TAPS - keeps
    if not wanted:
        return
    heads = work.heads if work.selected_heads is None else work.selected_heads
    kv_heads = min(work.kv_heads, heads)
    queries = work.queries if work.selected_queries is None else work.selected_queries
    part = replace(work, heads=heads, kv_heads=kv_heads, queries=queries)
    yield start("again")
    yield from stages(part, weighed=bool(wanted & {"weights", "lse"}))


def fused(work: Workload, *, share: float, packs: bool) -> Iterator[Term]:
    """Yield the terms of PyTorch's kernel: products and exponentials tile by tile, and its mask."""
    told = fused_masks(work)
    how = "causal" if work.plainly_causal else "masked" if told.any else "dense"
    yield from _attended(work, how, share, packs=packs)
    yield from factors(work)
    if told.any:
        yield from masks(work)
        yield start("mask of the fused kernel")
        yield moved("mask of the fused kernel", told.combined * work.itemsize, work)
    if work.head_dim != work.value_dim:
        width = max(work.head_dim, work.value_dim)
        yield start("one width")
        tokens = work.batch * (work.heads * work.queries + 2 * work.kv_heads * work.keys)
        yield moved("one width", tokens * width * work.itemsize, work)


def _attended(work: Workload, how: str, share: float, calls: float = 1, *, packs: bool) -> Iterator[Term]:
    """Yield ``calls`` calls of PyTorch's kernel, each with these queries and this share of the keys."""
    width = max(work.head_dim, work.value_dim)
    pairs = work.pairs * work.heads * share
    rows = max(1, FusedCall.of(work).tile_rows)
    tasks = work.batch * work.heads * -(-work.queries // rows)
    tiles = tasks * max(1.0, work.keys * share / FUSED_KEYS)
    name = f"fused, {8 * work.itemsize} bits"  # a path of its own for each type
    if packs:
        name += " packed"
        yield moved("packing", 2 * work.batch * work.heads * work.keys * width * work.itemsize * calls, work)
    elif work.itemsize == 2 and rows * min(work.keys, FUSED_KEYS) * width <= _NOT_BY_LIBRARY:
        name += " small"
    slopes = (("tasks", min(lg(tasks), _TASKS) - _TASKS), ("rows", lg(rows) - 6))
    of_task = 4 * rows * work.keys * width * share
    yield Term(f"product {name}", "flop", 4 * pairs * width * calls, lg(of_task), marks=(how,), slopes=slopes)
    yield Term(f"elements {name}", "element", pairs * calls, row=lg(work.keys), marks=(how,), slopes=slopes)
    yield Term(f"start task of {name}", "start", tasks * calls)
    yield Term(f"start tile of {name}", "start", tiles * calls)


def fused_blocks(work: Workload, kernel: str, *, gradient: bool) -> Iterator[Term]:
    """Yield a call of PyTorch's kernel for each block of queries, over the keys that the masks leave."""
    counted, together = kernel_of(work, kernel).executed(work), sequences_at_once(work, FUSED_CUT)
    rows = min(FUSED_CUT.rows, max(work.queries, 1))
    keys = max(1, round(counted.pairs / max(work.batch * work.queries, 1)))
    block = replace(work, batch=together, queries=rows, keys=keys)
    yield start("tiles")
    yield start("block of the fused kernel", counted.blocks)
    calls = counted.pairs / max(block.pairs, 1)
    yield from _attended(block, "masked", 1.0, calls, packs=FusedCall.of(block).packed and not gradient)
    yield from factors(work)
    yield from masks_of_tiles(work, counted.blocks)
    hidden = counted.pairs / together  # one mask for all heads and sequences
    yield elements("hiding in blocks", hidden, at_once=hidden / max(counted.blocks, 1))
    keys_of_blocks = counted.pairs / rows * work.kv_heads
    moving = work.batch * work.heads * work.queries * (work.head_dim + work.value_dim)
    yield moved("rows of blocks", (moving + keys_of_blocks * (work.head_dim + work.value_dim)) * work.itemsize, work)


def blocked(work: Workload, kernel: str) -> Iterator[Term]:
    """Yield the terms tile by tile: a start for each operation on each part of a block, and its work."""
    counted = kernel_of(work, kernel).executed(work)
    spec, tiles = work.spec, counted.blocks
    pairs, c = counted.pairs * work.heads, score_itemsize(work)
    each = pairs / max(tiles, 1)
    products = score_cost(work).pair_products + 2 * work.value_dim
    yield start("tiles")
    yield start("block of queries", tiles)
    yield start("tile", tiles)
    yield replace(
        product("tiles", products * pairs, work.head_dim, work, max(tiles, 1), wide=True),
        slopes=(("depth", lg(work.head_dim) - 6),),
    )
    yield from factors(work)
    normalizer = spec.normalizer.name
    yield start(f"{normalizer} of a tile", tiles)
    yield _in_tiles(work, normalizer, pairs * softmax_itemsize(work), each)
    yield from masks_of_tiles(work, tiles)
    if spec.masks:
        yield elements("hiding in tiles", pairs, at_once=each)
    if spec.softcap is not None:
        yield start("softcap of a tile", tiles)
        yield _in_tiles(work, "softcap", pairs * c, each)
    for there, name in (
        (work.request_mask_elements > 0, "mask"),
        (work.padded, "padding"),
        (work.dropped, "dropout"),
    ):
        if there:
            yield start(f"{name} of a tile", tiles)
            yield elements(f"{name} in tiles", pairs, at_once=each)
    if work.added_keys:
        yield start("added keys of a tile", tiles)
    if work.heads != work.kv_heads:
        yield start("groups of a tile", tiles)
    if POSITIONS.of(spec.position).biased:
        yield start(f"{spec.position.name} of a tile", tiles)
        yield _in_tiles(work, spec.position.name, pairs * c, each)
    queries = work.batch * work.heads * work.queries
    yield moved("rows of tiles", queries * (work.head_dim + work.value_dim) * c, work)
    keys = counted.pairs / max(1, min(CUT.rows, work.queries)) * work.kv_heads
    yield moved("keys of tiles", keys * (work.head_dim + work.value_dim) * c, work)


def _in_tiles(work: Workload, name: str, of_bytes: float, pairs: float) -> Term:
    """Return the traffic of pairs in one step, tile by tile."""
    masked = "masked" if work.spec.masks else "dense"
    marks = (f"{8 * work.itemsize} bits", masked)
    return Term(f"pairs {name} in tiles", "byte", of_bytes, lg(pairs * score_itemsize(work)), marks=marks)
