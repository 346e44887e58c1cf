"""A whole request in plain float64, by the definitions of the contract: what core and the fuzz are held against.

Masks are decided pair by pair; the rest is written as tensors, so that autograd answers for gradients. It shares no
computation with the server.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_contract import positions, spec

FURTHEST = 2**61
"""Offsets and positions count as this at most, in either direction."""
AXES = {
    "q": ("heads", "queries"), "k": ("heads", "keys"), "v": ("heads", "keys"), "context": ("heads", "queries"),
    "output": ("queries",),
}  # fmt: skip
"""The dimensions of a tap that an edit lists, in order; the others are pairs."""


@dataclass
class IfRequested:
    """A request, and what its formula needs beside it."""

    body: dict[str, Any]
    spec: spec.AttentionSpec
    heads: int
    kv_heads: int
    module: bool = False
    batched: bool = True
    headed: bool = True
    merged: bool = False
    past: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Every floating-point input and parameter by name, float64, in the request's shape."""


def attend(request: IfRequested, dropped: np.ndarray | None = None) -> dict[str, Tensor]:
    """Every tap, batched and with heads. ``dropped``: the weights that dropout kept, as the server drew them."""
    body, rules = request.body, request.spec
    q, k, v = _heads(request)
    (batch, _, queries, _), keys = q.shape, k.shape[2]
    taps = {"present_key": k, "present_value": v}
    k, v = _extended(request, k, "bias_k"), _extended(request, v, "bias_v")
    q, k, v = (
        _edited(request, tap, x.clone()) for tap, x in (("q", q), ("k", k), ("v", v))
    )  # no role shares a gradient
    taps |= {"q": q, "k": k, "v": v}
    real = _real(request, batch, keys, k.shape[2])
    k, v = (torch.where(real[:, None, :, None], x, 0.0) for x in (k, v))
    group = request.heads // request.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = _visible(request, batch, queries, keys, real)
    if rules.method.name == "exact":
        scores = _edited(request, "scores", score_pairs(rules.score, q, k, request.tensors))
        capped = scores.clone() if rules.softcap is None else rules.softcap * torch.tanh(scores / rules.softcap)
        capped = _edited(request, "capped_scores", capped)
        biased = capped + _bias(request, batch, queries, keys, k.shape[2])
        masked = torch.where(
            visible, _edited(request, "masked_scores", torch.where(visible, biased, -torch.inf)), -torch.inf
        )
        weights, lse = _weights(request, masked, visible, real)
        weights = _edited(request, "weights", weights)
        taps |= {"scores": scores, "capped_scores": capped, "masked_scores": masked, "weights": weights}
        taps |= {"lse": lse} if lse is not None else {}
        rate = (body.get("dropout") or {}).get("p", 0.0)
        used = weights if dropped is None else weights * torch.from_numpy(dropped) / (1 - rate)
        context = used @ v
    else:
        context = _approximated(request, q, k, v, real)
    context = _edited(request, "context", context)
    taps["context"] = context
    output = context
    if request.module or request.merged:
        output = context.transpose(1, 2).flatten(2)
    if request.module:
        output = output @ request.tensors["o_proj.weight"].T + request.tensors.get("o_proj.bias", torch.zeros(()))
    taps["output"] = _edited(request, "output", output)
    return taps


def as_replied(request: IfRequested, tap: str, x: np.ndarray) -> np.ndarray:
    """A tap narrowed and laid out as the reply has it."""
    select = request.body.get("select") or {}
    heads, rows = select.get("heads"), select.get("queries")
    has_heads = tap != "output" or not (request.module or request.merged)
    if tap not in {"output", "present_key", "present_value"}:
        if heads is not None:
            group = request.heads // request.kv_heads
            x = x[:, [head // group for head in heads] if tap in {"k", "v"} else heads]
        if rows is not None and tap not in {"k", "v"}:
            x = x[:, :, rows]
        if tap == "weights" and request.body.get("average_heads"):
            x, has_heads = x.mean(axis=1), False
    if has_heads and not request.headed:
        x = x[:, 0]
    return x if request.batched else x[0]


# ── queries, keys and values ─────────────────────────────────────────────────────────────────────────────────────────


def _heads(request: IfRequested) -> tuple[Tensor, Tensor, Tensor]:
    tensors, rules = request.tensors, request.spec
    key = "key" if "key" in request.body else "query"
    value = "value" if "value" in request.body else key
    counts = {"q": request.heads, "k": request.kv_heads, "v": request.kv_heads}
    came = {role: tensors[name] for role, name in (("q", "query"), ("k", key), ("v", value))}
    if not request.batched:
        came = {role: x[None] for role, x in came.items()}
    if not request.headed:
        came = {role: x[:, None] for role, x in came.items()}
    if request.merged:
        came = {role: _split(x, counts[role]) for role, x in came.items()}
    batch, queries, new = came["q"].shape[0], came["q"].shape[-2], came["k"].shape[-2]
    at_queries, at_keys = places(request, batch, queries, new)
    roles = "qkv" if request.module else "qk"
    came |= {
        role: _placed(rules.position, came[role], at_queries if role == "q" else at_keys, tensors) for role in roles
    }
    if request.module:
        for role, x in came.items():
            projected = x @ tensors[f"{role}_proj.weight"].T + tensors.get(f"{role}_proj.bias", torch.zeros(()))
            came[role] = _split(projected, counts[role])
    q, k, v = came["q"], came["k"], came["v"]
    if rules.qk_norm is not None:
        q, k = (_normed(rules.qk_norm, x, tensors[f"{role}_norm.weight"]) for role, x in (("q", q), ("k", k)))
    if isinstance(rules.position, positions.Rope):
        q, k = (_rotated(rules.position, x, at) for x, at in ((q, at_queries), (k, at_keys)))
    if request.past:
        past = [tensors[name] if request.batched else tensors[name][None] for name in ("past_key", "past_value")]
        past = [x[:, None] if x.ndim == 3 else x for x in past]
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return q, k, v


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _clamped(number: int) -> int:
    return max(-FURTHEST, min(int(number), FURTHEST))


def first_places(request: IfRequested, batch: int) -> list[int]:
    """The place of each sequence's first query in masks."""
    given = request.body.get("offsets")
    if given is None:
        return [request.past] * batch
    return [_clamped(each) for each in np.broadcast_to(np.asarray(given), (batch,)).tolist()]


def places(request: IfRequested, batch: int, queries: int, new: int) -> tuple[list[list[int]], list[list[int]]]:
    """The places of queries and new keys in a position encoding."""
    if request.body.get("positions") is not None:
        rows = np.asarray(request.body["positions"]).reshape(batch, queries).tolist()
        at = [[_clamped(each) for each in row] for row in rows]
        return at, at
    at = [[first + i for i in range(queries)] for first in first_places(request, batch)]
    return at, [[request.past + j for j in range(new)]] * batch


def _placed(position: spec.Position, x: Tensor, at: list[list[int]], tensors: dict[str, Tensor]) -> Tensor:
    """Inputs ``[B, L, W]`` or ``[B, H, L, W]`` with what an encoding adds to them."""
    width = x.shape[-1]
    if isinstance(position, positions.Sinusoidal):
        rows = [[_wave(place, c, width, position.theta) for c in range(width)] for row in at for place in row]
        added = torch.tensor(rows, dtype=torch.float64).reshape(len(at), x.shape[-2], width)
    elif isinstance(position, positions.LearnedPosition):
        added = tensors["position.weight"][torch.tensor(at, dtype=torch.int64).reshape(len(at), x.shape[-2])]
    else:
        return x
    return x + (added[:, None] if x.ndim == 4 else added)


def _wave(place: int, c: int, width: int, theta: float) -> float:
    angle = place * theta ** (-(c - c % 2) / width)
    return math.cos(angle) if c % 2 else math.sin(angle)


def _normed(norm: positions.QKNorm, x: Tensor, weight: Tensor) -> Tensor:
    along = (-1,) if norm.over == "head" else (1, 3)
    scale = (x.square().mean(along, keepdim=True) + norm.eps).rsqrt()
    weight = weight if norm.over == "head" else weight.view(1, x.shape[1], 1, x.shape[3])
    return x * scale * (1 + weight if norm.unit_offset else weight)


def _rotated(rope: positions.Rope, x: Tensor, at: list[list[int]]) -> Tensor:
    dim, theta, stretch = rope.dim or x.shape[-1], rope.theta, 1.0
    match rope.scaling:
        case positions.LinearScaling(factor=factor):
            stretch = factor
        case positions.NtkScaling(factor=factor):
            theta *= factor ** (dim / (dim - 2))
    out = list(x.unbind(-1))
    where = torch.tensor(at, dtype=torch.float64).reshape(len(at), 1, x.shape[2])
    for c in range(dim // 2):
        a, b = (c, c + dim // 2) if rope.style == "half" else (2 * c, 2 * c + 1)
        angle = where * (theta ** (-2 * c / dim) / stretch)
        out[a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return torch.stack(out, -1)


def _extended(request: IfRequested, x: Tensor, bias: str) -> Tensor:
    """Keys or values behind which stand those that the spec adds."""
    batch, heads, _, width = x.shape
    added = (
        [request.tensors[bias].view(1, heads, 1, width).expand(batch, -1, -1, -1)] if request.spec.add_bias_kv else []
    )
    added += [torch.zeros(batch, heads, 1, width, dtype=torch.float64)] if request.spec.add_zero_attn else []
    return torch.cat([x, *added], 2)


# ── which pairs, and their scores ────────────────────────────────────────────────────────────────────────────────────


def _real(request: IfRequested, batch: int, keys: int, all_keys: int) -> Tensor:
    """``[B, K]``, true for a key that is no padding."""
    real = np.ones((batch, all_keys), bool)
    if request.body.get("key_mask") is not None:
        real[:, :keys] &= np.asarray(request.body["key_mask"]).reshape(batch, keys)
    if request.body.get("key_lengths") is not None:
        real[:, :keys] &= np.arange(keys) < np.asarray(request.body["key_lengths"]).reshape(batch, 1)
    return torch.from_numpy(real)


def _visible(request: IfRequested, batch: int, queries: int, keys: int, real: Tensor) -> Tensor:
    """``[B, H, Q, K]``, true where a query may look."""
    seen = np.ones((batch, queries, keys), bool)
    given = request.body.get("global_mask")
    surplus = keys - request.past - queries
    for b, first in enumerate(first_places(request, batch)):
        own = [] if given is None else np.flatnonzero(np.asarray(given).reshape(batch, keys)[b]).tolist()
        masks = _with_global(request.spec.masks, own)
        for i, j in product(range(queries), range(keys)):
            seen[b, i, j] = all(may_look(mask, first + i, j, surplus, keys) for mask in masks)
    wide = np.ones((batch, request.heads, queries, real.shape[1]), bool)
    wide[..., :keys] = seen[:, None]
    mask = request.body.get("mask")
    if mask is not None:
        narrow = np.asarray(mask) if mask.dtype == np.bool_ else np.asarray(mask, np.float64) > -np.inf
        wide[..., :keys] &= _fitted(narrow, keys, False)
    return torch.from_numpy(wide) & real[:, None, None, :]


def _fitted(mask: np.ndarray, keys: int, hidden: Any) -> np.ndarray:
    """A request's mask with a column for each key."""
    mask = np.asarray(mask).reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[-1] in {1, keys}:
        return mask
    return np.concatenate([mask, np.full((*mask.shape[:3], keys - mask.shape[-1]), hidden)], -1)


def may_look(mask: spec.Mask, p: int, j: int, surplus: int, keys: int) -> bool:
    """The definition of each mask, as the contract words it; surplus is new keys − queries."""
    match mask:
        case spec.Causal(align="top_left"):
            return j <= p
        case spec.Causal(align="bottom_right"):
            return j <= p + surplus
        case spec.SlidingWindow(left=left, right=right):
            return (left is None or p - left <= j) and (right is None or j <= p + right)
        case spec.GlobalTokens(positions=positions):
            return p in positions or j in positions
        case spec.AnyOf(of=masks):
            return any(may_look(each, p, j, surplus, keys) for each in masks)
        case spec.AllOf(of=masks):
            return all(may_look(each, p, j, surplus, keys) for each in masks)
        case spec.PrefixLM(length=length):
            return j < length or j <= p
        case spec.Block(size=size, neighbours=neighbours):
            return abs(j // size - p // size) <= neighbours
        case spec.Strided(stride=stride, local=local):
            return abs(p - j) <= (stride if local is None else local) or (p - j) % stride == 0
        case spec.FixedStride(stride=stride, summary=summary):
            return j // stride == p // stride or j % stride >= stride - summary
        case spec.RandomBlocks(size=size, count=count, seed=seed):
            return j // size in draw(seed, p // size, -(-keys // size), count)
        case spec.Documents(lengths=lengths):
            starts = [0, *accumulate(lengths)]
            return sum(start <= p for start in starts) == sum(start <= j for start in starts)
    raise AssertionError(mask)


def draw(seed: int, row: int, blocks: int, count: int) -> list[int]:
    """The blocks of keys that a block of queries sees, in the order in which they are drawn."""

    def noise(last: int) -> int:
        state = 0
        for word in (seed, row % 2**32, row // 2**32 % 2**32, last, 0):
            state = ((state ^ word) + 0x9E3779B9) % 2**32
            state = (state ^ state >> 16) * 0x21F0AAAD % 2**32
            state = (state ^ state >> 15) * 0x735A2D97 % 2**32
            state ^= state >> 15
        return state

    drawn: list[int] = []
    for last in range(max(0, blocks - count), blocks):
        number = noise(last) % (last + 1)
        drawn.append(last if number in drawn else number)
    return drawn


def _with_global(masks: Sequence[spec.Mask], own: list[int]) -> list[spec.Mask]:
    """The masks with the global tokens of one sequence."""
    if not own or not masks:
        return [*masks]

    def added(mask: spec.Mask) -> spec.Mask:
        if isinstance(mask, spec.GlobalTokens):
            return mask.model_copy(update={"positions": [*mask.positions, *own]})
        if isinstance(mask, spec.AnyOf | spec.AllOf):
            return mask.model_copy(update={"of": [added(each) for each in mask.of]})
        return mask

    joined = [added(mask) for mask in masks]
    if joined != [*masks]:
        return joined
    return [spec.AnyOf(of=[spec.AllOf(of=[*masks]), spec.GlobalTokens(positions=own)])]


def score_pairs(score: spec.Score, q: Tensor, k: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    if isinstance(score, spec.Bilinear):
        return (q @ tensors["score.weight"]) @ k.mT
    if isinstance(score, spec.Additive):
        to_q, to_k = q @ tensors["score.query_weight"].mT, k @ tensors["score.key_weight"].mT
        hidden = torch.tanh(to_q[:, :, :, None] + to_k[:, :, None])  # [B, H, Q, K, hidden]
        return (hidden * tensors["score.v"][:, None, None]).sum(-1)
    products = q @ k.mT
    match score:
        case spec.Dot():
            return products
        case spec.ScaledDot(scale=scale):
            return products * (q.shape[-1] ** -0.5 if scale is None else scale)
        case spec.Gaussian(sigma=sigma):
            width = tensors["score.sigma"].view(-1, 1, 1) if sigma == "learned" else sigma
            return -(q[:, :, :, None] - k[:, :, None]).square().sum(-1) / (2 * width**2)
        case spec.Cosine(scale=scale):
            factor = tensors["score.scale"].view(-1, 1, 1) if scale == "learned" else scale
            lengths = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None]
            return torch.where(lengths > 0, products / lengths.where(lengths > 0, 1.0), 0.0) * factor
    raise AssertionError(score)


def _bias(request: IfRequested, batch: int, queries: int, keys: int, all_keys: int) -> Tensor:
    """``[B, H, Q, K]``: what the position and a float mask add to the scores."""
    at_queries, new = places(request, batch, queries, keys - request.past)
    at_keys = [[*range(request.past), *row] for row in new]
    bias = torch.zeros(batch, request.heads, queries, all_keys, dtype=torch.float64)
    position = request.spec.position
    if position.name in {"alibi", "relative_bias"}:
        ahead = [[[j - i for j in at_keys[b]] for i in at_queries[b]] for b in range(batch)]
        if isinstance(position, positions.Alibi):
            far = torch.tensor(ahead, dtype=torch.float64).reshape(batch, 1, queries, keys)
            far = -far.abs() if position.symmetric else far
            bias[..., :keys] = far * torch.tensor(_slopes(request.heads), dtype=torch.float64).view(1, -1, 1, 1)
        else:
            buckets = [_bucket(position, each) for rows in ahead for row in rows for each in row]
            where = torch.tensor(buckets, dtype=torch.int64).reshape(batch, queries, keys)
            table = request.tensors["relative_bias.weight"][where].movedim(-1, 1)
            bias = torch.cat([table, bias[..., keys:]], -1)
    if "mask" in request.tensors:
        mask = request.tensors["mask"]
        mask = mask.view((1,) * (4 - mask.ndim) + mask.shape)
        mask = torch.where(mask > -torch.inf, mask, 0.0)
        if mask.shape[-1] == 1:
            mask = mask.expand(*mask.shape[:3], keys)
        blank = torch.zeros(*mask.shape[:3], all_keys - mask.shape[-1], dtype=torch.float64)
        bias = bias + torch.cat([mask, blank], -1)
    return bias


def _slopes(heads: int) -> list[float]:
    """The authors' recursion for any number of heads."""
    if math.log2(heads).is_integer():
        return [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
    whole = 2 ** math.floor(math.log2(heads))
    return _slopes(whole) + _slopes(2 * whole)[0::2][: heads - whole]


def _bucket(rule: positions.RelativeBias, ahead: int) -> int:
    count = rule.num_buckets // 2 if rule.bidirectional else rule.num_buckets
    distance = abs(ahead) if rule.bidirectional else max(-ahead, 0)
    single, bucket = count // 2, distance
    if distance >= single:
        grown = math.log(distance / single) / math.log(rule.max_distance / single) * (count - single)
        bucket = single + math.floor(grown + 1e-9)
    return min(bucket, count - 1) + (count if rule.bidirectional and ahead > 0 else 0)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _weights(request: IfRequested, masked: Tensor, visible: Tensor, real: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weights, zero in rows that see nothing, and the logarithm of a softmax's sum."""
    rule = request.spec.normalizer
    x = masked / rule.temperature
    some = (x > -torch.inf).any(-1, keepdim=True)
    if isinstance(rule, spec.Sigmoid):
        count = real.sum(-1).clamp(min=1).view(-1, 1, 1, 1).double()
        return torch.where(
            x > -torch.inf, torch.sigmoid(x + (-count.log() if rule.bias is None else rule.bias)), 0.0
        ), None
    if isinstance(rule, spec.Softmax):
        if rule.sinks:
            sinks = (request.tensors["sinks"] / rule.temperature).view(1, -1, 1, 1).expand(*x.shape[:3], 1)
            x, some = torch.cat([x, sinks], -1), torch.ones_like(some)
        safe = torch.where(some, x, 0.0)
        lse = torch.where(some, safe.logsumexp(-1, keepdim=True), -torch.inf)
        return torch.where(some, safe.softmax(-1), 0.0)[..., : masked.shape[-1]], lse[..., 0]
    power = 1 if isinstance(rule, spec.Sparsemax) else 2
    safe = torch.where(some, x, 0.0)
    highest = safe.detach().amax(-1, keepdim=True) if safe.shape[-1] else 0.0  # which changes nothing but the rounding
    return torch.where(some, _above_threshold((safe - highest) / power, power), 0.0), None


def _above_threshold(x: Tensor, power: int) -> Tensor:
    """max(x − τ, 0)^power, summing to 1: τ is the root of a polynomial over the largest scores that stay positive."""
    if not x.shape[-1]:
        return x
    ordered = x.sort(-1, descending=True).values
    real = ordered > -torch.inf
    filled = torch.where(real, ordered, 0.0)
    count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64)
    mean = filled.cumsum(-1) / count
    if power == 1:
        tau = mean - 1 / count
    else:
        spread = (filled.square().cumsum(-1) - count * mean.square()).clamp(min=0)
        delta = (1 - spread) / count
        tau = mean - torch.where(delta > 0, delta.where(delta > 0, 1.0).sqrt(), 0.0)
    support = (real & (tau < ordered)).sum(-1, keepdim=True).clamp(min=1)
    return (x - tau.gather(-1, support - 1)).clamp(min=0) ** power


# ── edits ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _edited(request: IfRequested, tap: str, x: Tensor) -> Tensor:
    axes = AXES.get(tap, ("heads", "queries", "keys"))
    first = x.ndim - 2 if tap == "output" else 1
    for edit in request.body.get("edits") or ():
        if edit["tap"] != tap:
            continue
        lists = [range(size) for size in x.shape]
        for dim, axis in enumerate(axes, first):
            lists[dim] = edit.get(axis) if edit.get(axis) is not None else lists[dim]
        if "value" not in edit:
            lists = [sorted(set(each)) for each in lists]
        index = torch.meshgrid([torch.tensor([*each], dtype=torch.int64) for each in lists], indexing="ij")
        part = x[index]
        if "value" in edit:
            new = torch.from_numpy(np.asarray(edit["value"], np.float64)).expand(part.shape)
        elif "add" in edit:
            new = part + torch.from_numpy(np.asarray(edit["add"], np.float64))
        else:
            new = part * edit["scale"] if "scale" in edit else torch.full_like(part, edit["set"])
        x = x.index_put(index, new)
        if edit.get("renormalize"):
            total = x.sum(-1, keepdim=True)
            rows = torch.zeros(x.shape[:3], dtype=torch.bool)
            rows[torch.meshgrid([torch.tensor([*each], dtype=torch.int64) for each in lists[:3]], indexing="ij")] = True
            x = torch.where(rows[..., None], x / total.where(total != 0, 1.0), x)
    return x


# ── methods ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _approximated(request: IfRequested, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    method = request.spec.method
    if isinstance(method, spec.Linformer):
        keys = k.shape[2]
        to_keys = request.tensors["method.key_projection"][:, :keys]
        to_values = to_keys if method.shared else request.tensors["method.value_projection"][:, :keys]
        scores = score_pairs(request.spec.score, q, to_keys @ k, request.tensors)
        return (scores / request.spec.normalizer.temperature).softmax(-1) @ (to_values @ v)
    assert isinstance(method, spec.Linear)
    assert method.rule == "sum"
    q, k = _features(method.map, q), _features(method.map, k) * real[:, None, :, None]
    weights = q @ k.mT
    if request.spec.masks:
        at = torch.tensor(first_places(request, q.shape[0])).view(-1, 1) + torch.arange(q.shape[2])
        weights = weights * (torch.arange(k.shape[2]) <= at[:, None, :, None])
    if not method.normalized:
        return weights @ v * (1.0 if method.scale is None else method.scale)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.where(total > 0, 1.0), 0.0) @ v


def _features(name: str, x: Tensor) -> Tensor:
    match name:
        case "elu":
            return torch.nn.functional.elu(x) + 1
        case "relu":
            return x.relu()
        case "l2":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return x


def has_formula(rules: spec.AttentionSpec) -> bool:
    """True if this file covers the spec: all but random features, landmarks, gates, and rarer scalings of RoPE."""
    method, scaling = rules.method, getattr(rules.position, "scaling", None)
    if isinstance(scaling, positions.NtkScaling):
        plain = scaling.original_max_position_embeddings is None
    else:
        plain = scaling is None or isinstance(scaling, positions.LinearScaling)
    return plain and (
        isinstance(method, spec.Exact | spec.Linformer) or (isinstance(method, spec.Linear) and method.rule == "sum")
    )
