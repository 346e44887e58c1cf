"""Gradients by an upstream gradient are those of ``torch.autograd.grad``."""

import pytest
import torch

from attention_service.core.pullback import pullback, pullback_where_used


@pytest.fixture
def graph():
    torch.manual_seed(0)
    x, y, unused = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    return (x.sin() * y.exp()).mT, (x, y, unused)


@pytest.mark.parametrize("again", [False, True])
def test_they_are_what_autograd_gives(graph, again):
    output, at = graph
    upstream = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(output, at, upstream, create_graph=True, materialize_grads=True, allow_unused=True)
    found = pullback([output], at, [upstream], again=again)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [gradient.requires_grad for gradient in found] == [again] * 3
    if again:
        products, expected_products = (
            torch.autograd.grad(each[0].sum(), at[:2], retain_graph=True) for each in (found, expected)
        )
        assert all(map(torch.equal, products, expected_products))


def test_nothing_is_made_up_for_what_is_not_used(graph):
    output, at = graph
    assert [gradient is None for gradient in pullback_where_used([output], at, [torch.ones(4, 3)])] == [
        False,
        False,
        True,
    ]


def test_an_upstream_of_another_shape_is_refused(graph):
    output, at = graph
    with pytest.raises(ValueError, match=r"expected shape \[4, 3\], got \[3, 4\]"):
        pullback([output], at, [torch.ones(3, 4)])
