"""The check of a gradient: what is wrong fails, whatever the step."""

import math

import pytest
import torch

from attention_service.runtime.operations import gradient_check
from attention_service.runtime.operations.central_differences import derivative, verdict
from attention_service.runtime.operations.gradient_check import CHECKED_ELEMENTS


def compare(f, x, gradient):
    upstream = torch.ones_like(f(x))
    passes = []

    def output(value):
        passes.append(value)
        return f(value)

    size = float(f(x).abs().sum())
    return gradient_check._compare(gradient_check._Probe(x, output), gradient, upstream, size, CHECKED_ELEMENTS), len(
        passes
    )


def smooth(x):
    return torch.exp(-x.square()).cumsum(0)


def fast(x):
    return torch.sin(x * 1e6)


def faster(x):
    return torch.sin(x * 1e13)


@pytest.mark.parametrize("wrong", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize(("f", "size"), [(smooth, 1), (fast, 1), (faster, 1e-13)])
def test_a_gradient_passes_only_where_it_is_right(f, size, wrong):
    x = torch.linspace(-1, 1, 7, dtype=torch.float64) * size
    (gradient,) = torch.autograd.grad(f(y := x.clone().requires_grad_()).sum(), y)
    gradient[2] *= 1 + wrong
    found, _ = compare(f, x, gradient)
    assert found.passed is (wrong == 0.0 or float(gradient[2].abs()) == 0.0), found


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0])
def test_a_gradient_that_is_wrong_everywhere_fails(factor):
    x = torch.linspace(0.1, 1, 40, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(fast(y := x.clone().requires_grad_()).sum(), y)
    assert not compare(fast, x, gradient * factor)[0].passed


def test_no_gradient_of_a_function_that_is_no_number_passes():
    x = torch.ones(2, dtype=torch.float64)
    assert not compare(lambda y: y * torch.nan, x, torch.ones_like(x))[0].passed
    assert not compare(lambda y: y * torch.inf, x, torch.full_like(x, torch.inf))[0].passed


def test_a_smooth_function_takes_as_many_passes_as_are_planned_for():
    x = torch.linspace(-1, 1, CHECKED_ELEMENTS, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(smooth(y := x.clone().requires_grad_()).sum(), y)
    assert compare(smooth, x, gradient)[1] <= 6 * CHECKED_ELEMENTS


def narrow(x):
    """A norm of numbers close to zero, as of a head of a delta rule: linear for steps far below 1e-6 alone."""
    return x / (x.square().mean() + 1e-14).sqrt()


@pytest.mark.parametrize("wrong", [0.0, 1e-3, -1e-3, 1.0, -1.0])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-8])
def test_the_step_is_chosen_by_convergence(size, wrong):
    x = torch.linspace(-1, 1, 8, dtype=torch.float64) * size
    upstream = torch.linspace(1, 2, 8, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((narrow(y := x.clone().requires_grad_()) * upstream).sum(), y)
    largest = int(gradient.abs().argmax())
    gradient[largest] *= 1 + wrong
    found = gradient_check._compare(gradient_check._Probe(x, narrow), gradient, upstream, 8.0, CHECKED_ELEMENTS)
    assert found.passed is (wrong == 0.0), found


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("wrong", [0.0, 1e-3, -1.0])
@pytest.mark.parametrize("width", [1.0, 1e-4, 1e-7])
def test_differences_converge_at_any_curvature(width, wrong, scale):
    """The derivative of c · tanh(x / w) is known: c / w at 0, whatever step comes first."""
    right = scale / width
    found = derivative(
        lambda h: scale * (math.tanh(h / width) - math.tanh(-h / width)) / (2 * h), 1e-3, 0.0, 2e-16 * scale,
        enough=1e-7 * right, expected=right * (1 + wrong),
    )  # fmt: skip
    assert found.value == pytest.approx(right, rel=1e-6)
    assert verdict([right * (1 + wrong)], [found]).passed is (wrong == 0.0)


def test_a_gradient_of_zero_passes_beside_differences_that_are_rounding():
    """A bias of keys changes no weight: the first quotients are some 1e-13, the next ones exactly 0."""
    found = derivative(lambda h: 1e-13 if h >= 1e-3 else 0.0, 1e-3, 0.0, 2e-16, enough=1e-7, expected=1e-17)
    assert found.error <= 1e-12
    assert verdict([1e-17], [found]).passed


def test_a_gradient_of_zero_fails_where_steps_are_lost_in_rounding():
    found = derivative(
        lambda h: ((1 + h) - (1 - h)) / (2 * h), 1e-12, 0.0, 2e-16, enough=1e-7, expected=0.0
    )  # fmt: skip
    assert not verdict([0.0], [found]).passed
