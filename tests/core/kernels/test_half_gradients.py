"""Gradients of half types keep the cancellation in ∂s = w·(∂o·v − Σ o·∂o)."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_contract.spec import AttentionSpec, Causal, Gaussian, SlidingWindow, Softmax
from attention_service.core import slices
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.kernels.fused import cpu_slices

NAMES = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float32, Needs())]
HALF = [torch.bfloat16, torch.float16]
SPECS = {
    "dense": AttentionSpec(),
    "causal": AttentionSpec(masks=[Causal()]),
    "window": AttentionSpec(masks=[Causal(), SlidingWindow(left=9)]),
    "sinks": AttentionSpec(normalizer=Softmax(sinks=True)),
    "softcap": AttentionSpec(softcap=3.0, masks=[Causal()]),
}
SIZES = {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 17, "keys": 17, "width": 16, "value_width": 16}


@pytest.fixture(params=["whole", "in slices"], autouse=True)
def cut(request, monkeypatch):
    """Long calls of the fused kernel are cut, which merges contexts by their sums."""
    if request.param == "in slices":
        monkeypatch.setattr(slices, "SLICE_FLOPS", 1e4)
        monkeypatch.setattr(cpu_slices, "LEAST_ROWS", 5)


def upstream_of(problem):
    shape = *problem.q.shape[:3], problem.v.shape[3]
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(problem.q.dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "sinks"])
def test_what_is_added_to_a_whole_row_has_no_gradient(name, dtype, make_problem):
    spec = SPECS[name]
    for kernel in NAMES:
        if not unsuitable(kernel, spec, dtype, Needs()):
            row = torch.zeros(1, 1, 17, 1, dtype=dtype, requires_grad=True)
            given = make_problem(**SIZES, dtype=dtype, spec=spec, mask=row)
            (found,) = torch.autograd.grad(attend(given, kernel=kernel).context, row, upstream_of(given))
            assert found.abs().max() < 3e-6


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_values_with_much_in_common_leave_gradients_as_exact_as_their_type(spec, dtype, make_problem):
    """Twice the rounding of the result itself, relative to its norm; PyTorch's own gradient is 8 times as far off."""
    given = make_problem(**SIZES | {"queries": 200, "keys": 200}, dtype=dtype, spec=spec)
    given = replace(given, v=given.v + 4)
    upstream = upstream_of(given)

    def gradients(problem, kernel):
        leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        tracked = dict(zip("qkv", leaves, strict=True))
        context = attend(replace(problem, **tracked), kernel=kernel).context
        return torch.autograd.grad(context, leaves, upstream.to(context.dtype))

    exact = {name: getattr(given, name).double() for name in "qkv"}
    learned = {name: x.double() for name, x in given.learned.items()}
    expected = gradients(replace(given, **exact, learned=learned), "materialized")
    for kernel in ("fused", "blocked"):
        if not unsuitable(kernel, spec, dtype, Needs()):
            for found, wanted in zip(gradients(given, kernel), expected, strict=True):
                assert (found.double() - wanted).norm() < torch.finfo(dtype).eps / 2 * wanted.norm()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_gradient_of_a_learned_width_is_within_one_percent(dtype, make_problem):
    spec = AttentionSpec(score=Gaussian(sigma="learned"))
    given = make_problem(**SIZES, dtype=dtype, spec=spec)

    def gradient(problem, kernel):
        sigma = problem.learned["score.sigma"].detach().requires_grad_()
        context = attend(replace(problem, learned={"score.sigma": sigma}), kernel=kernel).context
        return torch.autograd.grad(context, sigma, upstream_of(given).to(context.dtype))[0].double()

    tensors = {name: getattr(given, name).double() for name in "qkv"}
    learned = {name: x.double() for name, x in given.learned.items()}
    expected = gradient(replace(given, **tensors, learned=learned), "materialized")
    torch.testing.assert_close(gradient(given, "blocked"), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("kernel", ["fused", "blocked"])
def test_only_a_gradient_costs_a_context_in_float32(kernel, make_problem):
    given = make_problem(**SIZES, dtype=torch.bfloat16, spec=SPECS["causal"])
    plain = attend(given, kernel=kernel).context
    tracked = attend(replace(given, q=given.q.clone().requires_grad_()), kernel=kernel).context
    assert plain.dtype == tracked.dtype == torch.bfloat16
    torch.testing.assert_close(tracked.detach(), plain, rtol=2e-2, atol=2e-2)
    expected = scaled_dot_product_attention(given.q, given.k, given.v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(plain, expected, rtol=2e-2, atol=2e-2)
