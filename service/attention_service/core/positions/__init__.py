"""Position encodings of queries and keys.

It imports ``masks``, and the core's registry and tensors. Read ``base.py`` first.
"""

from attention_service.core.positions import embeddings, rotary, score_biases  # noqa: F401  # they register themselves
from attention_service.core.positions.base import POSITIONS, HeadSubset, Inert, Position, PositionCost, check_position

__all__ = ["POSITIONS", "HeadSubset", "Inert", "Position", "PositionCost", "check_position"]
