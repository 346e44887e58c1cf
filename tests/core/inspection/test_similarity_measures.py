"""Divergences and CKA against their formulas in numpy, whatever the tiles and groups."""

import numpy as np
import pytest
import torch

from attention_service.core.inspection import similarity
from attention_service.core.inspection.head_reader import HeadReader, UnfitNumbers
from attention_service.core.inspection.similarity import divergences, groups, linear_cka


@pytest.fixture(params=[2**20, 16])
def tiny(request, monkeypatch):
    """Tiles of everything at once, and of a few rows."""
    monkeypatch.setattr(similarity, "ELEMENTS", request.param)
    monkeypatch.setattr(similarity, "FEATURES", request.param)
    monkeypatch.setattr(similarity, "GROUP", min(request.param, 2048))


def compared(*parts):
    tensors = [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]

    def read(which, rows):
        return torch.stack([tensors[at][rows.start : rows.stop].double() for at in which])

    return HeadReader(read, tuple(part.shape[1] for part in parts), parts[0].shape[0])


def divergence(p, q):
    """The mean of KL(p || m) / 2 + KL(q || m) / 2 over the rows where both have weights."""

    def kl(x, y):
        return np.sum(np.where(x > 0, x * np.log(np.where(x > 0, x, 1) / np.where(x > 0, y, 1)), 0), -1)

    real = (p.sum(-1) > 0) & (q.sum(-1) > 0)
    p, q = (x[real] / x[real].sum(-1, keepdims=True) for x in (p, q))
    mixed = (p + q) / 2
    return np.mean((kl(p, mixed) + kl(q, mixed)) / 2)


def cka(x, y):
    """HSIC of the linear kernels, by the centring matrix (Kornblith et al. 2019, eq. 3)."""
    centring = np.eye(len(x)) - 1 / len(x)

    def hsic(one, other):
        return np.trace(one @ centring @ other @ centring)

    x, y = x @ x.T, y @ y.T
    return hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y))


def test_a_divergence_is_that_of_the_formula(tiny, rng):
    a, b = rng.dirichlet(np.ones(7), (3, 9)), 3 * rng.dirichlet(np.full(7, 0.1), (2, 9))
    a[0, :, 5:] = 0
    a[1, 4], b[1, 2] = 0, 0  # queries that look nowhere
    expected = [[divergence(p, q) for q in b] for p in a]
    np.testing.assert_allclose(divergences(compared(*a), compared(*b)), expected, rtol=1e-9)
    own = [[divergence(p, q) for q in a] for p in a]
    np.testing.assert_allclose(divergences(compared(*a), None), own, rtol=1e-9, atol=1e-15)


def test_equal_weights_have_no_divergence_and_disjoint_ones_ln_2(rng):
    same, left, right = rng.dirichlet(np.ones(4), 5), np.eye(4)[[0] * 5], np.eye(4)[[3] * 5]
    found = divergences(compared(same, left, right), None)
    np.testing.assert_allclose(found.diagonal(), 0, atol=1e-15)
    np.testing.assert_allclose(found[1, 2], np.log(2))


def test_heads_without_a_common_query_have_no_number():
    rows = np.zeros((2, 2, 3))
    rows[0, 0], rows[1, 1] = 1 / 3, 1 / 3
    found = divergences(compared(*rows), None)
    assert found.isnan().tolist() == [[False, True], [True, False]]
    assert divergences(compared(np.zeros((0, 3))), None).isnan().all()


def test_cka_is_that_of_the_formula_for_features_of_any_widths(tiny, rng):
    a = [rng.normal(size=(30, width)) + 5 for width in (4, 9, 3)]
    b = [a[0] @ rng.normal(size=(4, 6)) + rng.normal(size=(30, 6)), rng.normal(size=(30, 20))]
    np.testing.assert_allclose(
        linear_cka(compared(*a), compared(*b)), [[cka(x, y) for y in b] for x in a], rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(linear_cka(compared(*a), None), [[cka(x, y) for y in a] for x in a], rtol=1e-9)


def test_cka_ignores_rotations_scales_and_means(rng):
    features = rng.normal(size=(20, 5))
    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    found = linear_cka(compared(features), compared(3 * features @ rotation + 100))
    np.testing.assert_allclose(found, 1, rtol=1e-9)
    for constant in (np.full((20, 5), 0.1), np.zeros((20, 5))):
        assert linear_cka(compared(features), compared(constant)).item() == 0


@pytest.mark.parametrize("number", [-0.5, np.nan, np.inf])
def test_numbers_without_a_similarity_are_refused(number):
    rows = np.ones((2, 3))
    rows[1, 1] = number
    with pytest.raises(UnfitNumbers, match="finite and not negative"):
        divergences(compared(rows), None)
    if number != -0.5:
        with pytest.raises(UnfitNumbers, match="finite"):
            linear_cka(compared(rows), None)


def test_groups_have_few_columns_or_one_part():
    assert groups([1000, 1000, 1000, 5000, 10]) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
