"""Masks: sets of query-key pairs, as dense tensors, as counts and in blocks."""

from attention_service.core.masks.rules import MASKS

__all__ = ["MASKS"]
