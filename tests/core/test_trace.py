"""The differentiable graph: every tap is a node of it, and its gradients are the closed forms."""

import math
from dataclasses import replace

import pytest
import torch

from attention_contract.spec import AttentionSpec, Causal, SlidingWindow, Softmax
from attention_service.core.attention import trace

TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")
SPECS = {
    "plain": AttentionSpec(),
    "causal": AttentionSpec(masks=[Causal()]),
    "softcap": AttentionSpec(softcap=1.5, masks=[Causal()]),
    "temperature": AttentionSpec(normalizer=Softmax(temperature=0.7)),
    "blind queries": AttentionSpec(masks=[SlidingWindow(left=0, right=0), Causal()]),
}


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request):
    return request.param


def upstream_of(context):
    return torch.randn(context.shape, generator=torch.Generator().manual_seed(7), dtype=context.dtype)


def test_the_closed_forms(spec, make_problem):
    problem = make_problem(queries=5, keys=4, width=3, spec=spec)
    nodes = trace(problem)
    upstream = upstream_of(nodes["context"])
    found = dict(zip(TAPS, torch.autograd.grad(nodes["context"], [nodes[tap] for tap in TAPS], upstream), strict=True))

    a, scale, temperature = nodes["weights"], 3**-0.5, spec.normalizer.temperature
    q, k, v = (problem.q, *(x.repeat_interleave(2, dim=1) for x in (problem.k, problem.v)))
    da = upstream @ v.mT
    ds = a * (da - (a * da).sum(-1, keepdim=True)) / temperature
    dcapped = ds
    if spec.softcap is not None:
        dcapped = ds * (1 - (nodes["capped_scores"] / spec.softcap) ** 2)
    expected = {
        "context": upstream,
        "weights": da,
        "masked_scores": ds,
        "capped_scores": ds,
        "scores": dcapped,
        "q": dcapped @ k * scale,
        "k": (dcapped.mT @ q * scale).unflatten(1, (1, 2)).sum(2),
        "v": (a.mT @ upstream).unflatten(1, (1, 2)).sum(2),
    }
    for name in TAPS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def test_forbidden_scores_and_blind_queries_have_gradient_zero(make_problem):
    spec = AttentionSpec(masks=[Causal(), SlidingWindow(left=1)])
    problem = make_problem(
        queries=8, keys=4, spec=spec, mask=torch.zeros(8, 4).index_fill(0, torch.tensor(0), -math.inf)
    )
    nodes = trace(problem)
    names = ("q", "scores", "capped_scores", "masked_scores")
    gradients = torch.autograd.grad(nodes["context"], [nodes[name] for name in names], upstream_of(nodes["context"]))
    forbidden = nodes["masked_scores"] == -math.inf
    blind = forbidden.all(-1)
    assert blind[0, 0].tolist() == [True, False, False, False, False, True, True, True]
    assert gradients[0][blind].count_nonzero() == 0
    assert gradients[0][~blind].count_nonzero() > 0
    for gradient in gradients[1:]:
        assert gradient[forbidden].count_nonzero() == 0
        assert gradient.isfinite().all()


def test_it_leads_to_tensors_that_ask_for_a_gradient_and_leaves_others_alone(make_problem):
    problem = make_problem()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    nodes = trace(replace(problem, q=problem.q * weight))
    assert torch.autograd.grad(nodes["context"].sum(), weight)[0].isfinite()
    assert not problem.k.requires_grad
    assert nodes["k"].requires_grad
