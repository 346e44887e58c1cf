"""Scores of pairs of texts, in the forms of ``/v1/rerank`` and ``/v1/score`` of vLLM and Jina."""

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from attention_contract.base import ABSENT, IfRequested, WireModel, at_fault
from attention_contract.schemas.openai import OpenAIRan, OpenAIRequest, Usage
from attention_contract.schemas.prompts import Text

MAX_SCORED: Final = 1024
"""Pairs of one request."""
ScoredTexts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_SCORED)]


class ScoringRequest(OpenAIRequest):
    """The fields of both requests."""

    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    """The most tokens of a pair, of a reranker: the longer of the two texts is cut first, at its end. Default, and -1:
    as many as the model reads."""
    use_activation: bool | None = None
    """False: the score is a reranker's logit itself."""


class RerankRequest(ScoringRequest):
    """Order documents by their relevance to a query."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, max_length=MAX_SCORED)]
    top_n: int | None = Field(default=None, ge=0, lt=2**31)
    """The number of documents to return, the most relevant first. Default, and 0: all."""
    return_documents: bool | None = None
    """False leaves the texts of the documents out of the reply."""


class ScoreRequest(ScoringRequest):
    """Score one text against several, or each of several against the text at its place."""

    text_1: ScoredTexts | None = None
    """The first texts of the pairs, or their queries."""
    queries: ScoredTexts | None = None
    """The same by another name."""
    text_2: ScoredTexts | None = None
    """The second texts of the pairs, or documents: as many as first ones, or any number beside one first text."""
    documents: ScoredTexts | None = None
    """The same by another name."""

    @model_validator(mode="after")
    def _pairs(self) -> "ScoreRequest":
        for name, other_name in (("text_1", "queries"), ("text_2", "documents")):
            given = [field for field in (name, other_name) if getattr(self, field) is not None]
            if len(given) != 1:
                raise at_fault(other_name if given else name, f"expected one of {name} and {other_name}")
        count, other = len(self.first), len(self.second)
        if count not in {1, other}:
            raise at_fault(
                self.place(0, 2).partition(".")[0], f"expected one text for each of {count} first ones; got {other}"
            )
        return self

    def place(self, index: int, side: Literal[1, 2]) -> str:
        """The field of a first or second text, with its index where it came in a list."""
        name = f"text_{side}" if getattr(self, f"text_{side}") is not None else ("queries", "documents")[side - 1]
        return name if isinstance(getattr(self, name), str) else f"{name}.{index}"

    @property
    def first(self) -> list[str]:
        """The first texts."""
        return _listed(self.text_1 or self.queries)

    @property
    def second(self) -> list[str]:
        """The second texts."""
        return _listed(self.text_2 or self.documents)


def _listed(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []


class RankedDocument(WireModel):
    """The text of a document."""

    text: str


class RankedResult(WireModel):
    """The relevance of one document."""

    index: int
    """Its place among the documents of the request."""
    document: IfRequested[RankedDocument] = ABSENT
    relevance_score: float
    """A reranker's logit after its config's activation, by default the logistic function; the cosine of the vectors
    of an embedding model."""
    truncated: IfRequested[bool] = ABSENT
    """True if the pair was cut."""


class Ranking(WireModel):
    """Documents by their relevance, the most relevant first."""

    id: str
    model: str
    usage: Usage
    results: list[RankedResult]
    ran: IfRequested[OpenAIRan] = ABSENT


class PairScore(WireModel):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float
    """A reranker's logit after its config's activation, by default the logistic function; the cosine of the vectors
    of an embedding model."""
    truncated: IfRequested[bool] = ABSENT
    """True if the pair was cut."""


class PairScores(WireModel):
    """The scores of pairs, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Seconds since 1970."""
    model: str
    data: list[PairScore]
    usage: Usage
    ran: IfRequested[OpenAIRan] = ABSENT


EXAMPLE_RANKING: Final = {"model": "reranker", "query": "who sat?", "documents": ["the cat sat", "the dog ran"]}
EXAMPLE_SCORES: Final = {"model": "reranker", "text_1": "who sat?", "text_2": ["the cat sat", "the dog ran"]}
