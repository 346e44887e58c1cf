"""Linear probes of two classes: the fit, its cross-validation, and the interval of an AUC.

Notation: N samples, d numbers of a feature. Samples of one text stand in one group, and are never divided by a fold.
scikit-learn fits; it is imported by the first fit, since that takes a second and 80 MB.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_service.core.cancellation import checkpoint

Method = Literal["logistic", "ridge"]
Floats = NDArray[np.float64]
_STEPS: Final = 10_000
"""Iterations of L-BFGS, of which standardized features need far fewer."""
_NORMAL_95: Final = 1.959963984540054
_HALVINGS: Final = 60


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A fitted probe, with the quality of probes that were fitted to other texts."""

    weights: Floats
    """``[d]``"""
    bias: float
    auc: float
    auc_low: float
    auc_high: float
    threshold: float


def fit_probe(
    features: NDArray[Any], labels: NDArray[np.int64], groups: NDArray[np.int64], *, method: Method = "logistic",
    regularization: float = 1.0, folds: int = 5, false_positive_rate: float = 0.05,
) -> LinearProbe:  # fmt: skip
    """Fit a probe to ``features [N, d]`` with ``labels [N]`` of 0 and 1; ``groups [N]``: the text of each sample.

    The weights are of features as they are, not of standardized ones. Raises InvalidRequest for ``labels`` if the texts
    of a class are fewer than the folds.
    """
    from sklearn.model_selection import StratifiedGroupKFold  # noqa: PLC0415

    check_groups(labels, groups, folds)
    x = np.asarray(features, np.float64)
    scores = np.empty(len(x))
    divided = StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    for train, test in divided.split(x, labels, groups):
        checkpoint()
        if len(np.unique(labels[train])) < 2:
            raise InvalidRequest.at(
                "folds", "a fold has all texts of one class; ask for fewer folds, or send more texts"
            )
        weights, bias = _fitted(x[train], labels[train], method, regularization)
        scores[test] = x[test] @ weights + bias
    checkpoint()
    weights, bias = _fitted(x, labels, method, regularization)
    positive = labels == 1
    area = auc(scores[positive], scores[~positive])
    low, high = auc_interval(area, *(len(np.unique(groups[chosen])) for chosen in (positive, ~positive)))
    return LinearProbe(weights, bias, area, low, high, threshold_at(scores[~positive], false_positive_rate))


def check_groups(labels: NDArray[np.int64], groups: NDArray[np.int64], folds: int) -> None:
    """Raise InvalidRequest unless each class has samples in at least as many texts as there are folds."""
    for label in (0, 1):
        count = len(np.unique(groups[labels == label]))
        if count < folds:
            raise InvalidRequest.at(
                "labels",
                f"expected label {label} in at least {folds} texts, one for each fold; got {count}. Send more texts, "
                "or ask for fewer folds",
            )


def _fitted(x: Floats, labels: NDArray[np.int64], method: Method, regularization: float) -> tuple[Floats, float]:
    """The weights ``[d]`` and the bias, for features before their standardization."""
    from sklearn.linear_model import LogisticRegression, RidgeClassifier  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    scaler = StandardScaler().fit(x)
    if method == "logistic":
        model = LogisticRegression(C=1 / regularization, max_iter=_STEPS)
    else:
        model = RidgeClassifier(alpha=regularization)
    model.fit(scaler.transform(x), labels)
    weights = model.coef_.reshape(-1) / scaler.scale_
    return weights, float(np.ravel(model.intercept_)[0] - weights @ scaler.mean_)


def auc(positives: Floats, negatives: Floats) -> float:
    """The share of pairs whose positive scores higher; a tie counts half. Source: Mann & Whitney 1947."""
    ordered = np.sort(negatives)
    below = np.searchsorted(ordered, positives, "left").mean()
    not_above = np.searchsorted(ordered, positives, "right").mean()
    return float((below + not_above) / (2 * len(negatives)))


def auc_interval(area: float, positives: int, negatives: int) -> tuple[float, float]:
    """The interval of 95 % of an AUC over so many independent positives and negatives.

    It has a width also at 0 and 1. Source: Newcombe 2006, Confidence intervals for an effect size measure based on the
    Mann-Whitney statistic, part 2, method 5.
    """
    more = (positives + negatives) / 2 - 1

    def deviates(true: float) -> float:
        spread = 1 + more * (1 - true) / (2 - true) + more * true / (1 + true)
        return abs(area - true) - _NORMAL_95 * math.sqrt(true * (1 - true) * spread / (positives * negatives))

    return _root(deviates, area, 0.0), _root(deviates, area, 1.0)


def _root(deviates: Any, inside: float, outside: float) -> float:
    """The place between the two at which a value is no longer inside, by halving."""
    if deviates(outside) <= 0:
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if deviates(middle) <= 0 else (inside, middle)
    return inside


def threshold_at(negatives: Floats, rate: float) -> float:
    """The smallest score above which at most this share of negative scores lies."""
    ordered = np.sort(negatives)
    return float(ordered[len(ordered) - 1 - math.floor(rate * len(ordered) + 1e-9)])
