"""Directions between the states of two sides: the difference of their means, or the principal component of pairs.

Notation: N pairs, d numbers of a state. scikit-learn is imported by the first decomposition.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mean_difference(positive: Floats, positives: int, negative: Floats, negatives: int) -> Floats:
    """Return the mean of the positive states minus that of the negative ones, ``[d]``, by their sums and counts.

    Source: Rimsky et al. 2023, Steering Llama 2 via contrastive activation addition, eq. 1.
    """
    return positive / positives - negative / negatives


def principal_direction(differences: NDArray[Any]) -> Floats | None:
    """Return the first principal component ``[d]``, of length 1, of differences ``[N, d]`` of pairs.

    They are positive minus negative, and centred first. The sign is that by which more positive states lie ahead of
    their negative ones. None if all differences are the same. Source: Zou et al. 2023, Representation engineering; the
    centring and the sign are those of ``pca_diff`` in repeng 0.4.
    """
    from sklearn.decomposition import PCA  # noqa: PLC0415

    x = np.asarray(differences, np.float64)
    if not np.ptp(x, axis=0).any():
        return None
    direction: Floats = PCA(n_components=1, svd_solver="full").fit(x).components_[0]
    ahead = x @ direction
    return -direction if (ahead < 0).sum() > (ahead > 0).sum() else direction
