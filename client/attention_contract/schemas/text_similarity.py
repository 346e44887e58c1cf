"""The similarity of two texts, or of a text and an image, by a whole model, and what in them made it."""

from typing import Annotated, Literal

from pydantic import Field

from attention_contract.base import ABSENT, IfRequested, WireModel
from attention_contract.schemas.prompts import ImageBytes, ModelRan, Text, TokenLabelsReply
from attention_contract.tensors import AnyNumber

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""A way from the states of a text's tokens to one vector, by the names of sentence-transformers."""
SimilaritySide = Text | ImageBytes
"""A text, or an image of a model that puts both into one space."""
SimilarPair = Annotated[list[SimilaritySide], Field(min_length=2, max_length=2)]


class TextSimilarityRequest(WireModel):
    """Compare two texts, or several pairs, by the vectors that ``/v1/embeddings`` makes of them.

    A model such as CLIP and SigLIP, which ``takes`` text and images and generates nothing, compares images too.
    """

    pairs: Annotated[list[SimilarPair], Field(min_length=1, max_length=128)]
    """The two sides of each pair: a text, or an image as ``{"base64": …}``."""
    gradients: bool = True
    """Return ``tokens`` too."""
    prompt_names: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """The prompts of a sentence-transformers checkpoint to put before the first and the second text of each pair, as in
    ``["query", "document"]``; default: the checkpoint's own default prompt. An empty name stands for no prompt."""
    pooling: Pooling | None = None
    """The pooling, in place of the checkpoint's."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """The name or path of an adapter that answers beside the model, as the model ``base:adapter`` does."""
    alone: bool = False
    """Share no pass with other requests, as these requests never do."""


class TextSimilarityReply(WireModel):
    """The similarity of each pair."""

    similarity: list[AnyNumber]
    """The cosine of the two vectors."""
    tokens: IfRequested[list[list[list[AnyNumber]]]] = ABSENT
    """For each pair, and each of its sides: ∂cosine/∂embedding · embedding of every token. Of an image, the embeddings
    are the input of its first layer: a number for each patch, and for its other tokens."""
    labels: list[list[TokenLabelsReply]]
    """The tokens of both sides of each pair, those of a prompt too; of an image, its patches with their rectangles."""
    ran: ModelRan
