"""Integrated gradients by a named rule and from a named baseline, beside loops over the embeddings of eager models."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.models.small_models import IDS, eager, loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelGradientsRequest
from attention_service.models.answers.integrated_path import quadrature
from attention_service.models.answers.model_gradients import ModelGradients

WIDTH = eager("gpt2").config.hidden_size
GIVEN = np.linspace(-1, 1, len(IDS) * WIDTH, dtype=np.float32).reshape(len(IDS), WIDTH)
TOKEN = 7


def gradients(family="gpt2", **integrated):
    request = ModelGradientsRequest(tokens=IDS, of={"token": TOKEN}, integrated=integrated, by_head=False)
    return ModelGradients(loaded(family), request).reply(4)


def begins(model):
    """The states at the begin of each path, by the fields that ask for them."""
    table = model.get_input_embeddings().weight.detach()
    return [
        ({}, torch.zeros(WIDTH)),
        ({"baseline": {"token": 5}}, table[5]),
        ({"baseline": "mean"}, table.double().mean(0).float()),
        ({"baseline_embeddings": GIVEN}, torch.from_numpy(GIVEN)),
        ({"baseline_embeddings": GIVEN[0]}, torch.from_numpy(GIVEN[0])),
    ]


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("rule", ["midpoint", "gauss"])
def test_the_path_is_that_of_a_loop_over_its_points(rule, case):
    model, steps = eager("gpt2"), 6
    fields, begin = begins(model)[case]
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    alphas = (nodes + 1) / 2 if rule == "gauss" else (np.arange(steps) + 0.5) / steps
    shares = weights / 2 if rule == "gauss" else [1 / steps] * steps

    def value(states):
        return model(inputs_embeds=states[None]).logits[0, -1].log_softmax(-1)[TOKEN]

    embedded = model.get_input_embeddings().weight.detach()[IDS]
    begin = begin.expand_as(embedded)
    mean = torch.zeros_like(embedded)
    for alpha, share in zip(alphas, shares, strict=True):
        point = (begin + alpha * (embedded - begin)).float().requires_grad_()
        [gradient] = torch.autograd.grad(value(point), point)
        mean += float(share) * gradient
    attributions = (mean * (embedded - begin)).sum(-1)
    with torch.no_grad():
        ends = float(value(begin.float())), float(value(embedded))
    reply = gradients(steps=steps, rule=rule, **fields)
    np.testing.assert_allclose(reply.tokens, attributions, atol=2e-4)
    assert float(reply.baseline) == pytest.approx(ends[0], abs=1e-4)
    told = reply.completeness
    assert float(told.attributed) == pytest.approx(float(attributions.sum()), abs=1e-3)
    assert float(told.expected) == pytest.approx(ends[1] - ends[0], abs=1e-4)
    assert float(told.gap) == pytest.approx(float(told.attributed - told.expected), abs=1e-9)
    assert float(told.relative_gap) == pytest.approx(float(told.gap / abs(told.expected)), rel=1e-6)


@pytest.mark.parametrize(("rule", "method"), [("gauss", "gausslegendre"), ("midpoint", "riemann_middle")])
def test_the_attributions_are_those_of_captum(rule, method):
    captum = pytest.importorskip("captum.attr")
    model = eager("gpt2")
    table = model.get_input_embeddings().weight.detach()
    embedded = table[IDS][None]
    found, gap = captum.IntegratedGradients(
        lambda states: model(inputs_embeds=states).logits[:, -1].log_softmax(-1)[:, TOKEN]
    ).attribute(embedded, table[5].expand_as(embedded), n_steps=20, method=method, return_convergence_delta=True)
    reply = gradients(steps=20, rule=rule, baseline={"token": 5})
    np.testing.assert_allclose(reply.tokens, found[0].sum(-1).detach(), atol=1e-5)
    assert float(reply.completeness.gap) == pytest.approx(float(gap), abs=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_each_rule_integrates_the_polynomials_that_it_should(steps):
    """Gauss-Legendre of n points those of degree 2n − 1, the midpoint rule linear ones: gradients of a quadratic L."""
    for rule, degree in (("gauss", 2 * steps - 1), ("midpoint", 1)):
        scales, shares = quadrature(rule, steps)
        for power in range(degree + 1):
            assert (shares * scales**power).sum() == pytest.approx(1 / (power + 1), rel=1e-12)


def test_the_logarithmic_rule_covers_what_is_above_its_smallest_scale():
    scales, shares = quadrature("log_gauss", 20, 6)
    assert shares.sum() == pytest.approx(1 - 1e-6, rel=1e-9)
    assert scales.min() > 1e-6
    told = gradients(steps=60).completeness
    assert abs(float(told.gap)) < 1e-2
    assert gradients(steps=60, rule="log_gauss").completeness.gap == told.gap


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"baseline": {"token": 10**6}}, "integrated.baseline.token"),
        ({"baseline": {"token": "[MASK]"}}, "integrated.baseline.token"),
        ({"baseline_embeddings": GIVEN[:2]}, "integrated.baseline_embeddings"),
        ({"baseline_embeddings": np.full(WIDTH, np.nan, np.float32)}, "integrated.baseline_embeddings"),
    ],
)
def test_a_baseline_that_the_model_does_not_have_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        gradients(steps=2, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"baseline": "mean", "rule": "log_gauss"}, {"baseline": "mean", "baseline_embeddings": GIVEN},
        {"steps": 0}, {"steps": 513}, {"rule": "simpson"}, {"baseline": "ones"},
    ],
)  # fmt: skip
def test_paths_that_there_are_not_are_refused(fields):
    with pytest.raises(ValidationError):
        ModelGradientsRequest(tokens=IDS, integrated={"steps": 2} | fields)
