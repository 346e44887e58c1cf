"""The similarity of two texts by a whole model, and the words that made it."""

from typing import Annotated, Literal

from pydantic import Field

from attention_contract.base import ABSENT, IfRequested, WireModel
from attention_contract.schemas.prompts import ModelRan, Text, TokenLabelsReply
from attention_contract.tensors import AnyNumber

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""A way from the states of a text's tokens to one vector, by the names of sentence-transformers."""
TextPair = Annotated[list[Text], Field(min_length=2, max_length=2)]


class TextSimilarityRequest(WireModel):
    """Compare two texts, or several pairs, by the vectors that ``/v1/embeddings`` makes of them."""

    pairs: Annotated[list[TextPair], Field(min_length=1, max_length=128)]
    """The two texts of each pair."""
    gradients: bool = True
    """Return ``tokens`` too."""
    prompt_names: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """The prompts of a sentence-transformers checkpoint to put before the first and the second text of each pair, as in
    ``["query", "document"]``; default: the checkpoint's own default prompt. An empty name stands for no prompt."""
    pooling: Pooling | None = None
    """The pooling, in place of the checkpoint's."""


class TextSimilarityReply(WireModel):
    """The similarity of each pair."""

    similarity: list[AnyNumber]
    """The cosine of the two vectors."""
    tokens: IfRequested[list[list[list[AnyNumber]]]] = ABSENT
    """For each pair, and each of its texts: ∂cosine/∂embedding · embedding of every token."""
    labels: list[list[TokenLabelsReply]]
    """The tokens of both texts of each pair, those of a prompt too."""
    ran: ModelRan
