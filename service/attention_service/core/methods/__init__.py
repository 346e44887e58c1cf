"""Methods: how the context comes about, exactly or approximately."""

from attention_service.core.methods import exact, linear, linformer, nystrom, performer  # noqa: F401  # they register
from attention_service.core.methods.base import (
    METHODS,
    Approximation,
    Method,
    MethodCost,
    approximation_of,
)

__all__ = ["METHODS", "Approximation", "Method", "MethodCost", "approximation_of"]
