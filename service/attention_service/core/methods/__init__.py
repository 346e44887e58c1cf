"""Methods: how the context comes about, exactly or approximately.

It imports ``kernels``, ``masks`` and ``scores``. Read ``base.py`` first.
"""

from attention_service.core.methods import exact, linear, linformer, nystrom, performer  # noqa: F401  # they register
from attention_service.core.methods.approximation import Approximation, approximation_of
from attention_service.core.methods.base import METHODS, Method, MethodCost, check_spec

__all__ = ["METHODS", "Approximation", "Method", "MethodCost", "approximation_of", "check_spec"]
