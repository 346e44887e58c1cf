"""Linear probes against the conditions of their optimum, pairs that are counted, and data whose answer is known."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from attention_contract.errors import InvalidRequest
from attention_service.core.inspection.linear_probes import auc, auc_interval, fit_probe, threshold_at

WIDTH = 6


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def drawn(rng, count=200):
    """Samples of which one number alone tells the class, with noise."""
    labels = np.arange(count) % 2
    features = rng.normal(size=(count, WIDTH)) * [1, 10, 0.1, 1, 1, 1] + 3
    features[:, 2] += 0.15 * labels
    return features, labels, np.arange(count)


@pytest.mark.sampled(regularization=1)
@pytest.mark.parametrize("regularization", [0.1, 3.0])
def test_the_logistic_weights_are_at_the_minimum_of_the_penalized_loss(rng, regularization):
    x, labels, groups = drawn(rng)
    probe = fit_probe(x, labels, groups, regularization=regularization)
    scale = x.std(0)
    own = probe.weights * scale  # of standardized features, to which the penalty applies
    residual = 1 / (1 + np.exp(-(x @ probe.weights + probe.bias))) - labels
    gradient = ((x - x.mean(0)) / scale).T @ residual + regularization * own
    np.testing.assert_allclose(gradient, 0, atol=2e-2)
    assert abs(residual.sum()) < 2e-2
    assert np.argmax(abs(own)) == 2


@pytest.mark.parametrize("regularization", [1.0, 50.0])
def test_the_ridge_weights_solve_the_normal_equations(rng, regularization):
    x, labels, groups = drawn(rng)
    probe = fit_probe(x, labels, groups, method="ridge", regularization=regularization)
    standard = (x - x.mean(0)) / x.std(0)
    target = 2.0 * labels - 1
    own = np.linalg.solve(standard.T @ standard + regularization * np.eye(WIDTH), standard.T @ (target - target.mean()))
    np.testing.assert_allclose(probe.weights * x.std(0), own, rtol=1e-8)
    np.testing.assert_allclose(x @ probe.weights + probe.bias, standard @ own + target.mean(), atol=1e-8)


def test_the_auc_counts_pairs(rng):
    positives, negatives = rng.integers(0, 6, 30).astype(float), rng.integers(0, 5, 40).astype(float)
    pairs = [(p > n) + 0.5 * (p == n) for p in positives for n in negatives]
    assert auc(positives, negatives) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert auc(np.array([2.0]), np.array([1.0])) == 1


@pytest.mark.parametrize(("area", "positives", "negatives"), [(0.8, 20, 30), (0.5, 9, 9), (0.97, 100, 7)])
def test_an_end_of_the_interval_deviates_by_the_normal_quantile(area, positives, negatives):
    for end in auc_interval(area, positives, negatives):
        more = (positives + negatives) / 2 - 1
        variance = end * (1 - end) / (positives * negatives)
        variance *= 1 + more * (1 - end) / (2 - end) + more * end / (1 + end)
        assert abs(area - end) / math.sqrt(variance) == pytest.approx(norm.ppf(0.975), rel=1e-6)


def test_a_perfect_probe_of_few_texts_has_a_wide_interval():
    low, high = auc_interval(1.0, 5, 5)
    assert high == 1
    assert 0.4 < low < 0.75
    assert auc_interval(1.0, 500, 500)[0] > 0.98


def test_the_tokens_of_a_text_are_in_one_fold(rng):
    """Each text has a mark of its own, so that tokens of it tell its label, and those of others do not."""
    texts, tokens = 40, 10
    groups = np.repeat(np.arange(texts), tokens)
    labels = groups % 2
    x = rng.normal(size=(texts, 60))[groups] + 0.01 * rng.normal(size=(texts * tokens, 60))
    assert 0.2 < fit_probe(x, labels, groups).auc < 0.8
    assert fit_probe(x, labels, np.arange(len(x))).auc > 0.99
    assert fit_probe(x, labels, groups).auc_low < fit_probe(x, labels, groups).auc


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.1, 0.5])
def test_the_threshold_is_the_smallest_with_the_rate(rng, rate):
    negatives = rng.normal(size=100)
    threshold = threshold_at(negatives, rate)
    assert (negatives > threshold).mean() <= rate
    assert (negatives >= threshold).mean() > rate


def test_a_class_with_fewer_texts_than_folds_is_refused(rng):
    x, labels, groups = drawn(rng, 20)
    labels[:] = 0
    labels[:3] = 1
    with pytest.raises(InvalidRequest, match="label 1 in at least 5 texts") as fault:
        fit_probe(x, labels, groups)
    assert fault.value.param == "labels"
