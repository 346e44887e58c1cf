"""Complexity: what a shape or a sweep of shapes would cost, how much fits, and what costs less; without computing.

But for what is asked to be measured beside the prediction.

It imports ``operations``, ``scheduling`` and the rooms below. Read ``reporting.py`` first.
"""

from attention_service.runtime.operations.complexity.measured_crossover import tried
from attention_service.runtime.operations.complexity.reporting import report

__all__ = ["report", "tried"]
