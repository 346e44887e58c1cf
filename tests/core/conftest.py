"""Problems to attend to, and the plain formula to hold every other way against."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import strategies as st
from tests import plain_attention
from tests.plain_attention import IfRequested
from torch import Tensor

import attention_service.runtime  # noqa: F401  # it registers the passes that the cost model rehearses
from attention_contract import positions, spec
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Problem, RunningInputs

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


UNPLACED = {"position": positions.NoPosition(), "qk_norm": None, "add_bias_kv": False, "add_zero_attn": False}


def plain_taps(problem: Problem) -> dict[str, Tensor]:
    """Every tap in plain float64. The keys of a problem are normed, rotated and extended already."""
    names = ("mask", "key_mask", "key_lengths", "offsets")
    body = {name: x for name in names if (x := getattr(problem, name)) is not None}
    past, tensors = problem.past, dict(problem.learned)
    tensors |= {"query": problem.q, "key": problem.k[:, :, past:], "value": problem.v[:, :, past:]}
    tensors |= {"past_key": problem.k[:, :, :past], "past_value": problem.v[:, :, :past]}
    if problem.mask is not None and problem.mask.is_floating_point():
        tensors["mask"] = body["mask"] = problem.mask.double()
    body = {name: x.detach().cpu().numpy() for name, x in body.items()} | dict.fromkeys(("key", "value"))
    given = problem.spec
    if given.position.name not in {"alibi", "relative_bias"}:
        given = given.model_copy(update=UNPLACED)
    heads, kv_heads = problem.q.shape[1], problem.k.shape[1]
    tensors = {name: x.detach().cpu().double() for name, x in tensors.items()}
    return plain_attention.attend(IfRequested(body, given, heads, kv_heads, past=past, tensors=tensors))


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
    if isinstance(options, spec.Linear) and problem.recurrent == RunningInputs():
        gates = normal(batch, kv_heads, keys, 1).sigmoid() if "gated" in options.rule else None
        beta = normal(batch, kv_heads, keys, 1).sigmoid() if "delta" in options.rule else None
        problem = replace(problem, recurrent=RunningInputs(None if gates is None else gates.log(), beta))
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
    return plain_taps


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


OFTEN = {*zip(SPECS, cycle(("none", "several"))), *zip(cycle(("default", "relative_bias, sigmoid")), MASKS)}
"""The pairs of every run: each spec and each mask once."""


@pytest.fixture(
    params=[
        pytest.param(pair, marks=() if pair in OFTEN else pytest.mark.slow, id=", ".join(pair))
        for pair in dict.fromkeys(PAIRS)
    ]
)
def every_spec_or_mask(request: pytest.FixtureRequest) -> spec.AttentionSpec:
    """Every spec without masks or with several, and every mask with one of two specs; under ``slow`` with both."""
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
