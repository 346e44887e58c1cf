"""Complexity: what a shape or a sweep of shapes would cost, how much fits, and what costs less; without computing."""

from attention_service.runtime.complexity.reporting import report

__all__ = ["report"]
