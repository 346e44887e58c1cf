"""Predictions of a whole model for a text, unedited and with edits of its attention."""

from typing import Literal

from pydantic import Field

from attention_contract.base import Listed, WireModel
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.recordings import LayerName

MAX_TEXT = 2_000
"""Characters of a text. The logits of every token are in memory at once."""


class PredictText(WireModel):
    """Ask a checkpoint of the model repository for the tokens that it predicts, unedited and edited."""

    checkpoint: str = Field(min_length=1, max_length=1024)
    """Its path inside the model repository: a folder with config.json, a tokenizer and safetensors files."""
    text: str = Field(min_length=1, max_length=MAX_TEXT, pattern=r"^[^\x00]*$")
    target: str | None = Field(default=None, min_length=1, max_length=MAX_TEXT, pattern=r"^[^\x00]*$")
    """The decoder's text, of a model with an encoder and a decoder."""
    edits: dict[LayerName, Listed[Edit]] = Field(default_factory=dict, max_length=1024)
    """Edits by attention, such as ``layers.0`` or ``decoder.0.cross``: ``set`` or ``scale`` of q, k, v, weights and
    context, or a positive ``scale`` of all masked_scores."""
    position: int | None = Field(default=None, ge=0, lt=2**31)
    """The token whose prediction is told; null for the last."""
    top_k: int = Field(default=5, ge=1, le=100)
    """Tokens to name of each of the two predictions, the likeliest first."""


class PredictedToken(WireModel):
    """One token of the vocabulary, in both predictions."""

    token: str
    id: int
    logit: float
    edited_logit: float
    probability: float
    edited_probability: float


class TextPredictions(WireModel):
    """Tokens that a model predicts, unedited and edited."""

    tokens: list[str]
    """The tokens that the model read; of a model with two stacks, the decoder's."""
    predicts: Literal["next", "own"]
    """``next``: each token predicts the one that follows. ``own``: each predicts the one in its place, as in BERT."""
    position: int
    """The token whose prediction ``top`` tells."""
    top: list[PredictedToken]
    """The likeliest tokens of either prediction, by unedited probability."""
    divergence: list[float]
    """Σ p · ln(p / q) of each token's unedited prediction p and edited prediction q, in nats; 0 if they are equal."""
