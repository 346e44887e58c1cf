"""Masks: sets of query-key pairs, as dense tensors, as counts and in blocks.

It imports the core's registry and tensors alone. Read ``rules.py`` first.
"""

from attention_service.core.masks.rules import MASKS

__all__ = ["MASKS"]
