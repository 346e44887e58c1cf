"""Terms that every attention has: projections, positions, norms, the past, masks and taps."""

from collections.abc import Iterator
from dataclasses import replace

from attention_contract.positions import NoPosition
from attention_service.core.masks.operation_count import leaves, relative_cost
from attention_service.core.multihead import learned_of
from attention_service.core.positions.embeddings import TABLE
from attention_service.cost.pairs import score_cost
from attention_service.cost.position_cost import tabled_places, token_traffic
from attention_service.cost.tensor_bytes import (
    input_bytes,
    kv_cache_bytes_per_token,
    parameter_count,
    projections,
    tap_elements,
)
from attention_service.cost.terms.base import Term, backward, elements, moved, product, start
from attention_service.cost.workload import Workload


def around(work: Workload) -> Iterator[Term]:
    """Yield the terms from the inputs to q, k and v, and from the context to the output."""
    kv = work.batch * work.keys * kv_cache_bytes_per_token(work)
    q, context = (
        work.batch * work.heads * work.queries * width * work.itemsize for width in (work.head_dim, work.value_dim)
    )
    if work.sizes is not None:
        yield start("module")
        yield from _projected(work)
        roles = (q + kv) * (2 if work.apart else 1)
        tokens = input_bytes(work) + roles + 2 * context + tap_elements(work, "output") * work.itemsize
        yield moved("tokens of a module", tokens, work)
        yield moved("parameters", (parameter_count(work) - _unread(work)) * work.itemsize, work)
    else:
        yield moved("tokens", input_bytes(work) - _unread(work) * work.itemsize + context, work)
    if work.past:
        yield start("past")
        yield moved("past", kv, work)
    if work.padded:
        yield start("padding")
        yield moved("padding", kv, work)
    yield from _encoded(work)


def around_backward(work: Workload) -> Iterator[Term]:
    """Yield the terms of the backward pass to inputs, and to the parameters that have gradients."""
    yield from backward(term for term in around(work) if term.name != "bytes parameters")
    if work.sizes is None or "parameters" not in work.wrt:
        return
    yield start("gradients of parameters")
    for term in _projected(work):
        yield replace(term, name=f"{term.name}, weights")
    yield moved("gradients of parameters", parameter_count(work) * work.itemsize, work)


def _projected(work: Workload) -> Iterator[Term]:
    """Yield the projections of a module."""
    if work.sizes is None:
        return
    into, out = projections(work)
    rows = work.batch * work.queries
    yield product("projections", into, work.sizes.d_model, work, rows=rows)
    yield product("output projection", out, work.sizes.d_model, work, rows=rows)


def _unread(work: Workload) -> int:
    """Elements of a learned table at unused places."""
    table = learned_of(work.spec, work.widths).get(TABLE)
    if table is None:
        return 0
    places, width = table.shape
    return max(0, places - tabled_places(work)) * width


def _encoded(work: Workload) -> Iterator[Term]:
    spec = work.spec
    if not isinstance(spec.position, NoPosition):
        yield start(spec.position.name)
        alone = replace(work, spec=spec.model_copy(update={"qk_norm": None}))
        yield moved(spec.position.name, token_traffic(alone), work)
    if spec.qk_norm is not None:
        yield start("norm")
        alone = replace(work, spec=spec.model_copy(update={"position": NoPosition()}))
        yield moved("norm", token_traffic(alone), work)


def masks(work: Workload) -> Iterator[Term]:
    """Yield the terms of positional and request masks, for all pairs of one head."""
    made = work.queries * work.keys * (work.batch if work.batched_offsets else 1)
    for mask in leaves(work.spec.masks):
        yield start(mask.name, relative_cost(mask))
        yield elements(mask.name, made)
    if work.request_mask_elements:
        kind = "boolean mask" if work.bool_mask else "added mask"
        yield start(kind)
        yield elements(kind, work.request_mask_elements)


def masks_of_tiles(work: Workload, tiles: float) -> Iterator[Term]:
    """Yield the terms of classifying this many tiles by positional masks, one term per name."""
    efforts: dict[str, float] = {}
    for mask in leaves(work.spec.masks):
        efforts[mask.name] = efforts.get(mask.name, 0.0) + relative_cost(mask)
    for name, each in sorted(efforts.items()):
        yield start(f"{name} of a tile", tiles * each)


def taps(work: Workload) -> Iterator[Term]:
    """Yield the terms of the returned taps."""
    for tap in sorted(work.taps - {"output"}):
        yield start("tap")
        yield moved("tap", tap_elements(work, tap) * work.itemsize, work)


def factors(work: Workload, repeated: float = 1.0) -> Iterator[Term]:
    """Yield the terms of a score's work on queries and keys, ``repeated`` times; a plain product has none."""
    score, name = score_cost(work), work.spec.score.name
    if name in {"dot", "scaled_dot"}:
        return
    yield start(name, repeated)
    queries, keys = work.batch * work.heads * work.queries, work.batch * work.kv_heads * work.keys
    yield moved(name, repeated * (queries + keys) * work.head_dim * max(work.itemsize, 4), work)
    products = queries * score.query_products + keys * score.key_products
    yield product(name, repeated * products, work.head_dim, work, work.batch * work.heads)
    if score.layer:
        pairs = work.pairs * work.heads
        yield elements(f"layer of {name}", pairs * score.layer, marks=(f"{8 * work.itemsize} bits",))
