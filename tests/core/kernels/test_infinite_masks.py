"""+∞ in an added mask: a query that it concerns has no weights, whichever kernel computes them."""

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, Entmax15, Sigmoid, Softmax, Sparsemax
from attention_service.core import slices
from attention_service.core.attention import attend
from attention_service.core.kernels import KERNELS, Needs, unsuitable
from attention_service.core.kernels.fused import cpu_slices
from attention_service.core.problem import Problem

NAMES = [entry.name for entry in KERNELS if not unsuitable(entry.name, AttentionSpec(), torch.float32, Needs())]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["whole", "in slices"], autouse=True)
def cut(request, monkeypatch):
    if request.param == "in slices":
        monkeypatch.setattr(slices, "SLICE_FLOPS", 1.0)
        monkeypatch.setattr(cpu_slices, "LEAST_ROWS", 2)


def masked(make_problem, spec, dtype) -> Problem:
    """Query 2 of 4 is pushed to key 1 without end; so is query 3 to key 4, which a causal mask forbids."""
    mask = torch.zeros(4, 5, dtype=dtype)
    mask[2, 1] = mask[3, 4] = torch.inf
    mask[1, 0] = -torch.inf
    return make_problem(dtype=dtype, spec=spec, mask=mask, value_width=2)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("kernel", NAMES)
def test_its_query_gets_nan_and_no_other_is_touched(kernel, temperature, dtype, make_problem):
    spec = AttentionSpec(masks=[Causal()], normalizer=Softmax(temperature=temperature))
    problem = masked(make_problem, spec, dtype)
    leaves = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    found = attend(problem, ("weights", "lse"), kernel=kernel)
    for rows in (found.context, found.taps["weights"][..., :3]):
        assert rows[:, :, 2].isnan().all()
        assert rows[:, :, [0, 1, 3]].isfinite().all()
    assert found.taps["lse"][:, :, 2].eq(torch.inf).all()
    assert found.taps["lse"][:, :, [0, 1, 3]].isfinite().all()
    of_q, *others = torch.autograd.grad(found.context.sum(), leaves)
    assert of_q[:, :, 2].isnan().all()
    assert of_q[:, :, [0, 1, 3]].isfinite().all()
    assert all(each[:, :, :3].isnan().all() for each in others)  # keys and values that the query may look at


@pytest.mark.parametrize("normalizer", [Softmax(sinks=True), Sparsemax(), Entmax15(), Sigmoid()], ids=str)
def test_all_kernels_agree_with_every_normalizer(normalizer, make_problem):
    problem = masked(make_problem, AttentionSpec(normalizer=normalizer), torch.float64)
    expected = attend(problem, ("weights",), kernel="materialized")
    found = attend(problem, ("weights",), kernel="blocked")
    torch.testing.assert_close(found.context, expected.context, equal_nan=True)
    assert expected.context[:, :, 0].isfinite().all()
    assert expected.context[:, :, 2].isfinite().all() == (normalizer == Sigmoid())  # whose weight there is 1


def test_finite_numbers_never_become_infinite(make_problem):
    """As large as float64 has them, for queries in float32."""
    problem = make_problem(dtype=torch.float32, mask=torch.tensor([0, 1e300, 0, -1e300, 0], dtype=torch.float64))
    context = attend(problem, kernel="fused").context
    torch.testing.assert_close(context, problem.v[:, :, 1:2].expand_as(context))
