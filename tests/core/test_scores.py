"""Every score against its definition, in float64, its gradients and its limits."""

import pytest
import torch
from tests.plain_attention import score_pairs
from torch.nn.functional import cosine_similarity

from attention_contract import spec
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Widths
from attention_service.core.scores import SCORES, additive_sums

OPTIONS = [
    spec.Dot(),
    spec.ScaledDot(),
    spec.Bilinear(),
    spec.Additive(hidden=5),
    spec.Gaussian(sigma=0.7),
    spec.Gaussian(sigma="learned"),
    spec.Cosine(scale=4.0),
    spec.Cosine(scale="learned"),
]
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 4, 2, 3, 6, 5


def ids(options):
    return f"{options.name}{' learned' if 'learned' in dict(options).values() else ''}"


@pytest.fixture(params=OPTIONS, ids=ids)
def options(request):
    return request.param


@pytest.fixture
def inputs(options):
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(BATCH, HEADS, QUERIES, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(BATCH, KV_HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    needed = learned_of(spec.AttentionSpec(score=options), Widths(HEADS, KV_HEADS, WIDTH, WIDTH))
    drawn = {n: torch.rand(each.shape, generator=generator, dtype=torch.float64) + 0.5 for n, each in needed.items()}
    return q, k, drawn


def test_scores_are_those_of_the_definition(options, inputs, monkeypatch):
    q, k, learned = inputs
    expected = score_pairs(options, q, k.repeat_interleave(HEADS // KV_HEADS, 1), learned)
    for block in (2**20, 100, 7):  # elements of a hidden layer held at a time, down to less than one pair's
        monkeypatch.setattr(additive_sums, "BLOCK", block)
        found = SCORES.of(options).scores(q, k, learned)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    single = SCORES.of(options).scores(q.float(), k.float(), {n: x.float() for n, x in learned.items()})
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(options=4)
def test_gradients_and_their_gradients_with_respect_to_all_that_goes_in(options, inputs, monkeypatch):
    monkeypatch.setattr(additive_sums, "BLOCK", 200)
    q, k, learned = inputs
    q, k, learned = q[:1, :2, :2], k[:1, :1, :3], {name: x[:2] for name, x in learned.items()}
    leaves = [x.clone().requires_grad_() for x in (q, k, *learned.values())]

    def scores(q, k, *values):
        return SCORES.of(options).scores(q, k, dict(zip(learned, values, strict=True)))

    assert torch.autograd.gradcheck(scores, leaves)
    assert torch.autograd.gradgradcheck(scores, leaves)


def test_learned_tensors_are_those_of_the_options():
    widths = Widths(HEADS, KV_HEADS, WIDTH, 3)
    shapes = {ids(each): {n: x.shape for n, x in SCORES.of(each).learned(widths).items()} for each in OPTIONS}
    assert shapes == {
        "dot": {},
        "scaled_dot": {},
        "bilinear": {"score.weight": (4, 5, 5)},
        "additive": {"score.query_weight": (4, 5, 5), "score.key_weight": (4, 5, 5), "score.v": (4, 5)},
        "gaussian": {},
        "gaussian learned": {"score.sigma": (4,)},
        "cosine": {},
        "cosine learned": {"score.scale": (4,)},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_zero_vector_is_unlike_everything(dtype):
    q = torch.tensor([[[[0.0, 0.0], [3.0, 4.0]]]], dtype=dtype, requires_grad=True)
    k = torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]], dtype=dtype, requires_grad=True)
    scores = SCORES.of(spec.Cosine()).scores(q, k, {})
    torch.testing.assert_close(scores, torch.tensor([[[[0, 0], [0, 0.6]]]], dtype=dtype))
    for gradient in torch.autograd.grad(scores.sum(), (q, k)):
        assert gradient.isfinite().all()
        assert gradient[0, 0, 0].count_nonzero() == 0


def test_a_gaussian_score_tells_near_points_apart_far_from_zero():
    """In float32 a difference of squares alone would be lost: the squares here are 1e8, the distances 0.01."""
    q = torch.tensor([[[[1e4], [1e4 + 0.125]]]])
    k = torch.tensor([[[[1e4 + 0.0625], [1e4 + 0.25]]]])
    scores = SCORES.of(spec.Gaussian(sigma=0.1)).scores(q, k, {})
    exact = -((q.double() - k.double().mT) ** 2) / (2 * 0.1**2)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-38, 1e-22, 1e20, 1e38])
def test_a_cosine_and_its_gradient_do_not_depend_on_how_long_vectors_are(size):
    generator = torch.Generator().manual_seed(1)
    q, k, upstream = (torch.randn(shape, generator=generator) for shape in ((1, 2, 3, 5), (1, 2, 4, 5), (1, 2, 3, 4)))
    score = SCORES.of(spec.Cosine())
    found, gradients = [], []
    for by in (1.0, size):
        x = (q / q.abs().max() * by).requires_grad_()
        found.append(score.scores(x, k / k.abs().max() * by, {}))
        (gradient,) = torch.autograd.grad(found[-1], x, upstream)
        gradients.append(gradient / (1 / by))
    exact = cosine_similarity(q.double()[..., None, :], k.double()[..., None, :, :], dim=-1)
    assert found[1].double().sub(exact).abs().max() < 1e-6
    assert (gradients[1] - gradients[0]).abs().max() < 1e-5


def test_a_gaussian_score_minds_only_its_own_points():
    q = torch.ones(1, 1, 2, 3)
    k = torch.ones(1, 1, 3, 3).index_fill(2, torch.tensor([2]), torch.nan)
    scores = SCORES.of(spec.Gaussian()).scores(q, k, {})
    assert scores[..., :2].abs().max() == 0
    assert scores[..., 2].isnan().all()


def test_a_gaussian_score_that_overflows_for_every_key_is_no_number():
    q, k = torch.full((1, 1, 1, 2), 1e25), torch.eye(2)[None, None]
    assert SCORES.of(spec.Gaussian()).scores(q, k, {}).isnan().all()
