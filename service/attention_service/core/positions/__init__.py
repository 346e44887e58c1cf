"""Position encodings of queries and keys."""

from attention_service.core.positions import embeddings, rotary, score_biases  # noqa: F401  # they register themselves
from attention_service.core.positions.base import POSITIONS, Heads, Inert, Position, PositionCost, check_position

__all__ = ["POSITIONS", "Heads", "Inert", "Position", "PositionCost", "check_position"]
