"""Problems to attend to, and the formula written out in plain loops to hold every other way against."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import attention_service.runtime  # noqa: F401  # it registers the passes that the cost model rehearses
from attention_contract import positions, spec
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Problem, Running

SPECS = {
    "default": spec.AttentionSpec(),
    "dot": spec.AttentionSpec(score=spec.Dot()),
    "bilinear": spec.AttentionSpec(score=spec.Bilinear()),
    "additive": spec.AttentionSpec(score=spec.Additive(hidden=3)),
    "additive, sparsemax": spec.AttentionSpec(score=spec.Additive(), normalizer=spec.Sparsemax()),
    "gaussian": spec.AttentionSpec(score=spec.Gaussian(sigma=0.8)),
    "gaussian, learned": spec.AttentionSpec(score=spec.Gaussian(sigma="learned"), softcap=2.0),
    "cosine": spec.AttentionSpec(score=spec.Cosine(scale=-3.0)),
    "cosine, learned": spec.AttentionSpec(score=spec.Cosine(scale="learned"), normalizer=spec.Sigmoid()),
    "sinks": spec.AttentionSpec(normalizer=spec.Softmax(sinks=True)),
    "sinks and temperature": spec.AttentionSpec(normalizer=spec.Softmax(sinks=True, temperature=0.5)),
    "negative scale": spec.AttentionSpec(score=spec.ScaledDot(scale=-0.3)),
    "zero scale": spec.AttentionSpec(score=spec.ScaledDot(scale=0.0)),
    "softcap": spec.AttentionSpec(softcap=0.7),
    "temperature": spec.AttentionSpec(normalizer=spec.Softmax(temperature=2.5)),
    "sigmoid": spec.AttentionSpec(normalizer=spec.Sigmoid()),
    "sigmoid, bias": spec.AttentionSpec(normalizer=spec.Sigmoid(bias=0.75, temperature=0.5)),
    "sparsemax": spec.AttentionSpec(normalizer=spec.Sparsemax()),
    "sparsemax, temperature": spec.AttentionSpec(normalizer=spec.Sparsemax(temperature=2.5)),
    "entmax15": spec.AttentionSpec(normalizer=spec.Entmax15()),
    "entmax15, temperature and softcap": spec.AttentionSpec(softcap=0.7, normalizer=spec.Entmax15(temperature=0.25)),
    "sinusoidal": spec.AttentionSpec(position=positions.Sinusoidal()),
    "learned": spec.AttentionSpec(position=positions.LearnedPosition(length=9)),
    "rope": spec.AttentionSpec(position=positions.Rope(), qk_norm=positions.QKNorm()),
    "alibi": spec.AttentionSpec(position=positions.Alibi(), softcap=0.9),
    "relative_bias": spec.AttentionSpec(position=positions.RelativeBias(num_buckets=4, max_distance=3)),
    "relative_bias, sigmoid": spec.AttentionSpec(
        position=positions.RelativeBias(num_buckets=4, max_distance=5, bidirectional=False), normalizer=spec.Sigmoid()
    ),
    "softcap and temperature": spec.AttentionSpec(softcap=0.7, normalizer=spec.Softmax(temperature=0.5)),
}

MASKS = {
    "none": [],
    "causal": [spec.Causal()],
    "causal, bottom right": [spec.Causal(align="bottom_right")],
    "sliding_window": [spec.SlidingWindow(left=2, right=1)],
    "sliding_window, one side": [spec.SlidingWindow(left=1)],
    "sliding_window, unlimited": [spec.SlidingWindow()],
    "sliding_window, causal": [spec.SlidingWindow(right=0)],
    "global_tokens": [spec.GlobalTokens(positions=[0, 3, 2**31 - 1])],
    "any": [spec.AnyOf(of=[spec.SlidingWindow(left=1, right=1), spec.GlobalTokens(positions=[2])])],
    "all": [
        spec.AllOf(of=[spec.SlidingWindow(left=2), spec.AnyOf(of=[spec.Causal(), spec.GlobalTokens(positions=[1])])])
    ],
    "prefix_lm": [spec.PrefixLM(length=2)],
    "block": [spec.Block(size=2)],
    "block, neighbours": [spec.Block(size=2, neighbours=1), spec.Causal()],
    "strided": [spec.Strided(stride=3, local=0)],
    "strided, causal": [spec.Strided(stride=2), spec.Causal()],
    "fixed": [spec.FixedStride(stride=3)],
    "random_blocks": [spec.RandomBlocks(size=2, count=1, seed=3)],
    "documents": [spec.Documents(lengths=[1, 2])],
    "several": [spec.Causal(), spec.AnyOf(of=[spec.SlidingWindow(left=1), spec.GlobalTokens(positions=[0, 4])])],
}


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


CAUSAL = [spec.Causal()]
APPROXIMATIONS = {
    "linear": spec.AttentionSpec(method=spec.Linear()),
    "linear, causal": spec.AttentionSpec(method=spec.Linear(), masks=CAUSAL),
    "linear, relu": spec.AttentionSpec(method=spec.Linear(features="relu"), masks=CAUSAL),
    "linear, not normalized": spec.AttentionSpec(method=spec.Linear(features="identity", scale=0.5), masks=CAUSAL),
    "gated": spec.AttentionSpec(method=spec.Linear(rule="gated"), masks=CAUSAL),
    "delta": spec.AttentionSpec(method=spec.Linear(rule="delta"), masks=CAUSAL),
    "gated delta": spec.AttentionSpec(method=spec.Linear(rule="gated_delta", scale=0.5), masks=CAUSAL),
    "performer": spec.AttentionSpec(method=spec.Performer(features=7)),
    "performer, causal": spec.AttentionSpec(method=spec.Performer(), masks=CAUSAL, score=spec.Dot()),
    "performer, bilinear": spec.AttentionSpec(method=spec.Performer(features=5), score=spec.Bilinear()),
    "linformer": spec.AttentionSpec(method=spec.Linformer(rank=3, length=400)),
    "linformer, shared": spec.AttentionSpec(
        method=spec.Linformer(rank=3, length=400, shared=True), normalizer=spec.Softmax(temperature=0.7)
    ),
    "nystrom": spec.AttentionSpec(method=spec.Nystrom(landmarks=3)),
    "nystrom, cosine": spec.AttentionSpec(method=spec.Nystrom(landmarks=2), score=spec.Cosine(scale=2.0)),
}
"""Every method beside the exact one, with every rule of it."""


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


def attend_in_loops(problem: Problem) -> dict[str, Tensor]:
    """Every tap in float64, one query and key at a time."""
    q, k, v = problem.q.double(), problem.k.double(), problem.v.double()
    (batch, heads, queries, _), kv_heads, keys = q.shape, k.shape[1], k.shape[2]
    learned = {name: x.double() for name, x in problem.learned.items()}
    given = problem.spec
    names = ("scores", "capped_scores", "masked_scores", "weights")
    taps = {name: torch.zeros(batch, heads, queries, keys, dtype=torch.float64) for name in names}
    taps["lse"] = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    taps["context"] = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    for b, h, i in product(range(batch), range(heads), range(queries)):
        at = b, h, i
        group = h // (heads // kv_heads)
        offset = problem.past if problem.offsets is None else int(problem.offsets.expand(batch)[b])
        for j in range(keys):
            score = scored(given.score, q[b, h, i].tolist(), k[b, group, j].tolist(), learned, h)
            capped = score if given.softcap is None else given.softcap * math.tanh(score / given.softcap)
            sees = all(may_look(mask, i + offset, j, keys - problem.past - queries, keys) for mask in given.masks)
            sees = sees and (problem.key_mask is None or bool(problem.key_mask[b, j]))
            sees = sees and (problem.key_lengths is None or j < int(problem.key_lengths[b]))
            masked = capped + biased(given.position, heads, h, j - i - offset, learned)
            if problem.mask is not None:
                mask = problem.mask.expand(batch, heads, queries, -1)
                column = 0 if mask.shape[-1] == 1 else j
                if column >= mask.shape[-1] or (mask.dtype == torch.bool and not mask[b, h, i, column]):
                    sees = False
                elif mask.dtype != torch.bool:
                    masked += float(mask[b, h, i, column])
            taps["scores"][*at, j], taps["capped_scores"][*at, j] = score, capped
            taps["masked_scores"][*at, j] = masked if sees else -math.inf
        tempered = [s / given.normalizer.temperature for s in taps["masked_scores"][at].tolist()]
        if "sinks" in learned:
            tempered.append(float(learned["sinks"][h]) / given.normalizer.temperature)
        if (highest := max(tempered, default=-math.inf)) > -math.inf:
            taps["lse"][at] = math.log(sum(math.exp(s - highest) for s in tempered)) + highest
            weights = normalized(given.normalizer, tempered, real_keys(problem, b))[:keys]
            taps["weights"][at] = torch.tensor(weights, dtype=torch.float64)
            taps["context"][at] = sum(weights[j] * v[b, group, j] for j in range(keys) if weights[j])
    if not isinstance(given.normalizer, spec.Softmax):
        del taps["lse"]
    return taps


def biased(position: spec.Position, heads: int, h: int, ahead: int, learned: dict[str, Tensor]) -> float:
    """What the position adds to the score of head h for a key so many places ahead, by its definition."""
    match position:
        case positions.Alibi():
            assert heads in {1, 2, 4, 8}, "a power of two has the simple series"
            return -(2.0 ** (-8 * (h + 1) / heads)) * abs(ahead)
        case positions.RelativeBias(num_buckets=count, max_distance=furthest, bidirectional=both):
            count = count // 2 if both else count
            distance = abs(ahead) if both else max(-ahead, 0)
            single = count // 2
            bucket = distance
            if distance >= single:
                bucket = single + int(math.log(distance / single) / math.log(furthest / single) * (count - single))
            bucket = min(bucket, count - 1) + (count if both and ahead > 0 else 0)
            return float(learned["relative_bias.weight"][bucket, h])
    return 0.0


def scored(score: spec.Score, q: list[float], k: list[float], learned: dict[str, Tensor], h: int) -> float:
    """One score, by its definition."""

    def of(name: str) -> list:
        return learned[f"score.{name}"][h].tolist()

    def dot(x: list[float], y: list[float]) -> float:
        return sum(a * b for a, b in zip(x, y, strict=True))

    match score:
        case spec.Dot():
            return dot(q, k)
        case spec.ScaledDot(scale=scale):
            return dot(q, k) * (len(q) ** -0.5 if scale is None else scale)
        case spec.Bilinear():
            return sum(a * dot(row, k) for a, row in zip(q, of("weight"), strict=True))
        case spec.Additive():
            rows = zip(of("query_weight"), of("key_weight"), strict=True)
            return dot(of("v"), [math.tanh(dot(to_q, q) + dot(to_k, k)) for to_q, to_k in rows])
        case spec.Gaussian(sigma=sigma):
            sigma = of("sigma") if sigma == "learned" else sigma
            return -(math.dist(q, k) ** 2) / (2 * sigma**2)
        case spec.Cosine(scale=scale):
            lengths = math.hypot(*q) * math.hypot(*k)
            return (of("scale") if scale == "learned" else scale) * dot(q, k) / lengths if lengths else 0.0
    raise AssertionError(score)


def real_keys(problem: Problem, b: int) -> int:
    """How many keys of a sequence are no padding."""
    keys = range(problem.k.shape[2])
    lengths = problem.key_lengths
    return sum(
        (problem.key_mask is None or bool(problem.key_mask[b, j])) and (lengths is None or j < int(lengths[b]))
        for j in keys
    )


def normalized(normalizer: spec.Normalizer, scores: list[float], length: int) -> list[float]:
    """One row of weights, by the definitions; the thresholds by bisection, where the entries sort."""
    match normalizer:
        case spec.Softmax():
            highest = max(scores)
            total = sum(math.exp(s - highest) for s in scores)
            return [math.exp(s - highest) / total for s in scores]
        case spec.Sigmoid(bias=bias):
            bias = -math.log(length) if bias is None else bias
            return [1 / (1 + math.exp(-s - bias)) if s > -math.inf else 0.0 for s in scores]
        case spec.Sparsemax():
            return above_threshold(scores, 1)
        case spec.Entmax15():
            return above_threshold([s / 2 for s in scores], 2)
    raise AssertionError(normalizer)


def above_threshold(scores: list[float], power: int) -> list[float]:
    """max(s − τ, 0)^power, summing to 1."""
    high = max(scores)
    low = high - 1
    for _ in range(100):
        middle = (low + high) / 2
        if sum(max(s - middle, 0) ** power for s in scores) >= 1:
            low = middle
        else:
            high = middle
    return [max(s - low, 0) ** power for s in scores]


def random_problem(
    batch=2, heads=2, kv_heads=1, queries=4, keys=5, width=2, value_width=3, dtype=torch.float64, seed=0, **more
) -> Problem:
    """Normal numbers; ``more`` are the other fields of a problem."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    problem = Problem(
        q=normal(batch, heads, queries, width),
        k=normal(batch, kv_heads, keys, width),
        v=normal(batch, kv_heads, keys, value_width),
        **more,
    )
    options = problem.spec.method
    if isinstance(options, spec.Linear) and problem.recurrent == Running():
        gates = normal(batch, kv_heads, keys, 1).sigmoid() if "gated" in options.rule else None
        beta = normal(batch, kv_heads, keys, 1).sigmoid() if "delta" in options.rule else None
        problem = replace(problem, recurrent=Running(None if gates is None else gates.log(), beta))
    needed = learned_of(problem.spec, problem.widths)
    learned = {name: normal(*each.shape) for name, each in needed.items()}
    if "score.sigma" in learned:
        learned["score.sigma"] = learned["score.sigma"].abs() + 0.5
    return replace(problem, learned=learned | problem.learned)


def drawn_masks() -> st.SearchStrategy[spec.Mask]:
    """Any registered mask, and unions and intersections of them."""
    reach, size = st.none() | st.integers(0, 12), st.integers(1, 7)
    leaves = st.one_of(
        st.builds(spec.Causal, align=st.sampled_from(["top_left", "bottom_right"])),
        st.builds(spec.SlidingWindow, left=reach, right=reach),
        st.builds(spec.GlobalTokens, positions=st.lists(st.integers(0, 20), min_size=1, max_size=5)),
        st.builds(spec.PrefixLM, length=st.integers(0, 20)),
        st.builds(spec.Block, size=size, neighbours=st.integers(0, 2)),
        st.builds(spec.Strided, stride=size, local=reach),
        st.builds(spec.FixedStride, stride=st.integers(4, 7), summary=st.integers(1, 4)),
        st.builds(spec.RandomBlocks, size=size, count=st.integers(1, 4), seed=st.integers(0, 2**31 - 1)),
        st.builds(spec.Documents, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4)),
    )

    def either(of: list[spec.Mask]) -> st.SearchStrategy[spec.Mask]:
        return st.sampled_from([spec.AnyOf(of=of), spec.AllOf(of=of)])

    return st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(either), max_leaves=5)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Problems here are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return random_problem


@pytest.fixture(scope="session")
def reference() -> Callable[[Problem], dict[str, Tensor]]:
    return attend_in_loops


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def every_spec(request: pytest.FixtureRequest) -> spec.AttentionSpec:
    return request.param


@pytest.fixture(params=MASKS.values(), ids=MASKS)
def every_mask(request: pytest.FixtureRequest) -> list[spec.Mask]:
    return request.param


PAIRS = [
    *((name, masks) for name in SPECS for masks in ("none", "several")),
    *((name, masks) for masks in MASKS for name in ("default", "relative_bias, sigmoid")),
]


@pytest.fixture(params=dict.fromkeys(PAIRS), ids=", ".join)
def every_spec_or_mask(request: pytest.FixtureRequest) -> spec.AttentionSpec:
    """Every spec without masks and with several, and every mask with two specs."""
    name, masks = request.param
    return SPECS[name].model_copy(update={"masks": MASKS[masks]})


@pytest.fixture(params=APPROXIMATIONS.values(), ids=APPROXIMATIONS)
def every_approximation(request: pytest.FixtureRequest) -> spec.AttentionSpec:
    return request.param


class DoubledTorch:
    """The torch module as a modeling file sees it, with float64 under the names of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let modules of Transformers compute in float64: they ask for float32, and its rounding hides a wrong formula."""

    def let(*modules) -> None:
        for module in modules:
            monkeypatch.setattr(module, "torch", DoubledTorch())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)

    return let
