"""Complexity: what a shape or a sweep of shapes would cost, how much fits, and what costs less; without computing.

But for what is asked to be measured beside the prediction.
"""

from attention_service.runtime.operations.complexity.reporting import report
from attention_service.runtime.operations.complexity.trying import tried

__all__ = ["report", "tried"]
