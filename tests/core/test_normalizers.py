"""The softmax: known values, temperature, dtypes."""

import math

import pytest
import torch

from attention_contract import spec
from attention_service.core.attention import attend
from attention_service.core.normalizers import Softmax
from attention_service.core.scores import Dot, ScaledDot


def test_known_softmax():
    weights = Softmax(spec.Softmax()).weights(torch.tensor([2.0, 1.0, 0.5]))
    torch.testing.assert_close(weights, torch.tensor([0.6285, 0.2312, 0.1402]), rtol=0, atol=5e-5)


def test_known_scaling():
    raw = torch.tensor([0.2, 8.5, 1.1, 0.3, 0.5])
    k = torch.zeros(1, 1, 5, 64)
    k[0, 0, :, 0] = raw
    q = torch.zeros(1, 1, 1, 64)
    q[..., 0] = 1
    torch.testing.assert_close(Dot(spec.Dot()).scores(q, k, {}).flatten(), raw)
    scaled = ScaledDot(spec.ScaledDot()).scores(q, k, {}).flatten()
    torch.testing.assert_close(scaled, torch.tensor([0.025, 1.0625, 0.1375, 0.0375, 0.0625]))


def test_temperature_divides_the_scores():
    x = torch.tensor([[2.0, 1.0, 0.5, -math.inf]])
    warm, plain = Softmax(spec.Softmax(temperature=2.0)), Softmax(spec.Softmax())
    assert warm.weights(x).equal(plain.weights(x / 2))
    assert warm.lse(x).equal(plain.lse(x / 2))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_large_scores_do_not_overflow(scale):
    weights = Softmax(spec.Softmax()).weights(torch.tensor([3.0, 3.0, -3.0]) * scale)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("asked", "given", "runs_in"),
    [
        ("float32", torch.float16, torch.float32),
        ("float32", torch.bfloat16, torch.float32),
        ("float32", torch.float32, torch.float32),
        ("float32", torch.float64, torch.float64),
        ("float64", torch.float32, torch.float64),
        ("float64", torch.float16, torch.float64),
        ("float16", torch.float32, torch.float16),
        ("bfloat16", torch.float64, torch.bfloat16),
        ("bfloat16", torch.float16, torch.bfloat16),
    ],
)
def test_the_dtype_asked_for_is_a_floor_unless_it_is_a_half_type(asked, given, runs_in, make_problem):
    normalizer = spec.Softmax(dtype=asked)
    assert Softmax(normalizer).runs_in(given) == runs_in
    problem = make_problem(dtype=given, spec=spec.AttentionSpec(normalizer=normalizer))
    attended = attend(problem, ("weights", "lse"), kernel="materialized")
    assert attended.taps["weights"].dtype == given
    assert attended.taps["lse"].dtype == runs_in
    assert attended.context.dtype == given


def test_a_half_type_is_coarser(make_problem):
    def weights(dtype):
        problem = make_problem(keys=50, spec=spec.AttentionSpec(normalizer=spec.Softmax(dtype=dtype)))
        return attend(problem, ("weights",), kernel="materialized").taps["weights"]

    error = (weights("bfloat16") - weights("float64")).abs().max()
    assert 1e-5 < error < 1e-2
