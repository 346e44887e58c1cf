"""The sketch of a problem: what came in, and what ``core.preparing`` makes of it, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attention_service.core import qk_norm, steps
from attention_service.core.learned import learned_of
from attention_service.core.masks import pattern_of
from attention_service.core.multihead import parameter_shapes
from attention_service.core.patterns import Pattern
from attention_service.core.positions import POSITIONS
from attention_service.core.tape import BOOL, INTEGER, Number, Sketch, Tape
from attention_service.cost.pairs import request_mask, softmax_itemsize
from attention_service.cost.workload import Workload

_ADDED = ("bias_k", "bias_v")
Three = tuple[Sketch, Sketch, Sketch]


@dataclass(frozen=True)
class Sketched:
    """A problem (``core.types.Problem``) of sketches, beside the workload that it is of."""

    work: Workload
    q: Sketch
    k: Sketch
    v: Sketch
    learned: Mapping[str, Sketch]
    tokens: Sketch
    """Of the keys, as they came."""
    apart: Three | None = None

    @property
    def scored_in(self) -> int:
        """Bytes of a score."""
        return max(self.work.itemsize, softmax_itemsize(self.work))

    def pattern(self) -> Pattern:
        """What the spec's masks allow."""
        work = self.work
        return pattern_of(work.spec.masks, work.queries, work.told_keys, work.past)


@dataclass(frozen=True)
class Parameters:
    """Every learned tensor."""

    projections: Mapping[str, Sketch]
    learned: Mapping[str, Sketch]


def parameters_of(tape: Tape, work: Workload) -> Parameters:
    """The module's parameters, or the learned tensors of raw attention."""
    learned = learned_of(work.spec, work.widths)
    known = {name: tape.leaf(each.shape, work.itemsize) for name, each in learned.items()}
    if work.sizes is None:
        return Parameters({}, known)
    shapes = parameter_shapes(work.sizes)
    projections = {name: tape.leaf(shape, work.itemsize) for name, shape in shapes.items() if name not in known}
    return Parameters(projections, known)


def prepared(tape: Tape, work: Workload, parameters: Parameters) -> Sketched:
    """Encoded, projected, normed, turned, put after the past, and with the keys that the spec adds."""
    spec, e = work.spec, work.itemsize
    position = POSITIONS.of(spec.position)
    places = placed(tape, work) if position.reads else None
    query, key, value = _inputs(tape, work)
    tokens = key
    if places is not None:
        learned = parameters.learned
        encoded = position.sketched_sum(tape, query, places[0], learned)
        together = key is query and places[1] is places[0]
        of_key = encoded if together else position.sketched_sum(tape, key, places[1], learned)
        if work.sizes is not None:
            value = of_key if value is key else position.sketched_sum(tape, value, places[1], learned)
        query, key = encoded, of_key
    far = None
    if work.apart:
        far = _turned(tape, work, _projected(tape, work, (query, key, value), parameters, "global"), places, parameters)
    q, k, v = _turned(tape, work, _projected(tape, work, (query, key, value), parameters, "proj"), places, parameters)
    if work.past:
        before = [tape.leaf((work.batch, work.kv_heads, work.past, x.dims[3]), e) for x in (k, v)]
        k, v = steps.cat(tape, [before[0], k], 2), steps.cat(tape, [before[1], v], 2)
    k, v = (_extended(tape, work, x, name, parameters) for x, name in zip((k, v), _ADDED, strict=True))
    if far is not None:
        far_k, far_v = (_extended(tape, work, x, name, parameters) for x, name in zip(far[1:], _ADDED, strict=True))
        far = far[0], far_k, far_v
    return Sketched(work, q, k, v, parameters.learned, tokens, far)


def merged(tape: Tape, work: Workload, context: Sketch, parameters: Parameters) -> Sketch:
    """The output of a module; raw attention's is its context."""
    if work.sizes is None:
        return context
    known = parameters.projections
    return steps.linear(tape, steps.merge_heads(tape, context), known["o_proj.weight"], known.get("o_proj.bias"))


def placed(tape: Tape, work: Workload) -> tuple[Sketch, Sketch]:
    """``places_of``: of the queries and of the new keys, one sketch where they are known to be the same."""
    if work.batched_places and not work.batched_offsets:  # positions were given
        given = steps.plain(tape, Sketch((work.batch, work.queries), INTEGER))
        return given, given
    keys = _row(steps.filled(tape, (work.new_keys,), INTEGER))
    if not work.batched_offsets and work.queries == work.new_keys:
        return keys, keys
    return _row(shifted(tape, work, steps.filled(tape, (work.queries,), INTEGER))), keys


def shifted(tape: Tape, work: Workload, index: Sketch) -> Sketch:
    """Indices of queries ``[Q]`` and the offset: ``[1 or B, Q]``."""
    rows = work.batch if work.batched_offsets else 1
    if work.batched_offsets:
        shift = steps.plain(tape, Sketch((rows, 1), INTEGER))
    else:
        shift = steps.filled(tape, (1, 1), INTEGER)
    return steps.plain(tape, index, shift, dims=(rows, index.dims[0]))


def key_places(tape: Tape, work: Workload, new: Sketch) -> Sketch:
    """``[1 or B, K]``: of all keys, the past and what the spec adds included."""
    if work.past:
        steps.filled(tape, (work.past,), INTEGER)
        rows = new.dims[0]
        tape.does((work.past + new.size) * INTEGER, rows * work.told_keys * INTEGER)
        new = Sketch((rows, work.told_keys), INTEGER)
    return padded(tape, new, work.extra)


def padded(tape: Tape, x: Sketch, more: Number) -> Sketch:
    """So many more at the end of the last dimension: a copy."""
    y = Sketch((*x.dims[:-1], x.dims[-1] + more), x.itemsize, tracked=x.tracked)
    tape.does(x.bytes, y.bytes)

    def step() -> None:
        tape.does(y.returned if not more else x.bytes, x.bytes)
        tape.give(x, x.size)

    return tape.later(y, step) if y.tracked else y


def real_keys(tape: Tape, work: Workload) -> Sketch | None:
    """Bool ``[B, K]``, which are no padding; None where all are real."""
    if not work.padded:
        return None
    real = Sketch((work.batch, work.told_keys), BOOL)
    return padded(tape, real, work.extra) if work.extra else real


def own_mask(work: Workload) -> Sketch | None:
    """The request's mask, at rank 4."""
    if not work.request_mask_elements:
        return None
    batch, heads, queries = request_mask(work)
    return Sketch((batch, heads, queries, work.told_keys), BOOL if work.bool_mask else work.itemsize)


def without_padding(tape: Tape, given: Sketched) -> Sketched:
    """Zeros for padded keys and values."""
    real = real_keys(tape, given.work)
    if real is None:
        return given
    hidden = steps.plain(tape, real)
    where = Sketch((hidden.dims[0], 1, hidden.dims[1], 1), BOOL)
    return replace(given, k=steps.hide(tape, given.k, where), v=steps.hide(tape, given.v, where))


def looked_through(tape: Tape, work: Workload, k: Sketch, v: Sketch) -> None:
    """Whether keys and values are finite: what they add up to; of float16 row by row, and these in float32."""
    whole, size = k.bytes + v.bytes, max(k.itemsize, 4) if work.half else k.itemsize
    if work.half and work.threads:
        rows = sum(x.bytes // max(x.dims[-1], 1) for x in (k, v))
        tape.does(whole, rows, 0, 2)
        whole = rows
    tape.does(whole, 2 * size, 0, 2)
    tape.does(2 * size, size)


def _inputs(tape: Tape, work: Workload) -> tuple[Sketch, Sketch, Sketch]:
    e, s = work.itemsize, work.sizes
    if s is None:
        q = tape.leaf((work.batch, work.heads, work.queries, work.head_dim), e)
        k = tape.leaf((work.batch, work.kv_heads, work.new_keys, work.head_dim), e)
        return q, k, tape.leaf((work.batch, work.kv_heads, work.new_keys, work.value_dim), e)
    query = tape.leaf((work.batch, work.queries, s.d_model), e)
    key = tape.leaf((work.batch, work.new_keys, s.key_width), e) if "key" in work.inputs else query
    value = tape.leaf((work.batch, work.new_keys, s.value_width), e) if "value" in work.inputs else key
    return query, key, value


def _projected(tape: Tape, work: Workload, three: Three, parameters: Parameters, by: str) -> Three:
    if work.sizes is None:
        return three
    known = parameters.projections
    q, k, v = (
        steps.linear(tape, x, known[f"{role}_{by}.weight"], known.get(f"{role}_{by}.bias"))
        for role, x in zip("qkv", three, strict=True)
    )
    split = steps.split_heads
    return split(tape, q, work.heads), split(tape, k, work.kv_heads), split(tape, v, work.kv_heads)


def _turned(
    tape: Tape, work: Workload, three: Three, places: tuple[Sketch, Sketch] | None, parameters: Parameters
) -> Three:
    q, k, v = three
    norm = work.spec.qk_norm
    if norm is not None:
        q = qk_norm.sketched(tape, q, parameters.learned["q_norm.weight"], norm)
        k = qk_norm.sketched(tape, k, parameters.learned["k_norm.weight"], norm)
    if places is not None:
        q, k = POSITIONS.of(work.spec.position).sketched_turn(tape, q, k, places)
    return q, k, v


def _extended(tape: Tape, work: Workload, x: Sketch, bias: str, parameters: Parameters) -> Sketch:
    if not work.extra:
        return x
    batch, heads, _, width = x.dims
    parts, reads = [x], x.bytes
    if work.spec.add_bias_kv:
        learned = steps.view(tape, parameters.learned[bias], (1, heads, 1, width))
        parts.append(steps.expanded(tape, learned, (batch, heads, 1, width)))
        reads += learned.bytes
    if work.spec.add_zero_attn:
        parts.append(steps.filled(tape, (batch, heads, 1, width), x.itemsize))
        reads += parts[-1].bytes
    return steps.cat(tape, parts, 2, reads=reads)


def _row(x: Sketch) -> Sketch:
    return x if len(x.dims) == 2 else Sketch((1, *x.dims), x.itemsize)
