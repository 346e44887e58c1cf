"""Scores: how well a query and a key agree.

It imports the core's registry and tensors alone. Read ``base.py`` first.
"""

from attention_service.core.scores.base import SCORES, Product, Score, ScoreCost
from attention_service.core.scores.dots import Bilinear, Dot, ScaledDot
from attention_service.core.scores.hidden import Additive
from attention_service.core.scores.norms import SMALLEST_SIGMA, Cosine, Gaussian

__all__ = [
    "SCORES",
    "SMALLEST_SIGMA",
    "Additive",
    "Bilinear",
    "Cosine",
    "Dot",
    "Gaussian",
    "Product",
    "ScaledDot",
    "Score",
    "ScoreCost",
]
