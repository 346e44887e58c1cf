"""Normalizers: from scores to weights.

It imports the core's registry and tensors alone. Read ``base.py`` first.
"""

from attention_service.core.normalizers.base import (
    NORMALIZERS,
    Exponential,
    Normalizer,
    PairCost,
    has_log_weights,
    has_lse,
)
from attention_service.core.normalizers.exponentials import Sigmoid, Softmax
from attention_service.core.normalizers.projected import Entmax15, Sparsemax

__all__ = [
    "NORMALIZERS",
    "Entmax15",
    "Exponential",
    "Normalizer",
    "PairCost",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "has_log_weights",
    "has_lse",
]
