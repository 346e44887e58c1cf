"""Scores of pairs of texts: the activation of a reranker's logit, or the cosine of two vectors."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from attention_contract.base import ABSENT
from attention_contract.errors import InvalidRequest, NotFinite
from attention_contract.schemas.openai import EmbeddingRequest, OpenAIRan, Usage
from attention_contract.schemas.openai_api.scoring import (
    PairScore,
    PairScores,
    RankedDocument,
    RankedResult,
    Ranking,
    RerankRequest,
    ScoreRequest,
)
from attention_service.models.answers.embeddings.sentence_settings import read_sentence_settings
from attention_service.models.answers.embeddings.text_embeddings import EmbeddingPlan, plan_texts
from attention_service.models.answers.embeddings.vector_parts import embeddings, parts_of
from attention_service.models.answers.embeddings.vector_steps import activation_of
from attention_service.models.costs.answer_parts import Passes
from attention_service.models.costs.pass_memory import PassMemory
from attention_service.models.inputs.input_stacks import Tokens
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import weights_with
from attention_service.models.loaded.model_runner import Predictions, RunSpec

ScoringRequest = RerankRequest | ScoreRequest
_UNLIMITED: Final = 2**31
"""A length that transformers writes for none."""


class TextPair(NamedTuple):
    """Two texts, and the fields of the request that have them."""

    first: str
    second: str
    first_field: str
    second_field: str


@dataclass(frozen=True)
class ScoringPlan:
    """A request for scores, checked."""

    rows: Sequence[Tokens] = ()
    """The tokens of each pair, of a reranker."""
    truncated: Sequence[bool] = ()
    embedding: EmbeddingPlan | None = None
    """The distinct texts, of an embedding model."""
    places: Sequence[tuple[int, int]] = ()
    """The two texts of each pair among these."""
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid
    """The way from a logit to a score, of a reranker."""

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row that is run."""
        return [len(row.ids) for row in self.rows] if self.embedding is None else [*map(len, self.embedding.rows)]


def plan_scoring(loaded: LoadedModel, request: ScoringRequest) -> ScoringPlan:
    """Check a request. Raises InvalidRequest that names the field at fault, and InvalidCheckpoint."""
    pairs, name = _pairs(request), type(loaded.model).__name__
    if loaded.head.scores and loaded.reader.enters == "tokens":
        return _of_reranker(loaded, request, pairs)
    if loaded.head.predicts is None or read_sentence_settings(Path(str(loaded.model.name_or_path))) is not None:
        if request.truncate_prompt_tokens not in {None, -1}:
            raise InvalidRequest.at("truncate_prompt_tokens", f"{name} reads each text alone; leave it out")
        if request.use_activation is False:
            raise InvalidRequest.at("use_activation", f"{name} scores by the cosine of two vectors; leave it out")
        return _of_vectors(loaded, pairs)
    raise InvalidRequest.at(
        "model",
        f"{name} scores no pairs; expected a classifier with one class, as rerankers are, or a model of embeddings",
    )


def _pairs(request: ScoringRequest) -> list[TextPair]:
    if isinstance(request, RerankRequest):
        return [TextPair(request.query, text, "query", f"documents.{at}") for at, text in enumerate(request.documents)]
    first, second = request.first, request.second
    return [
        TextPair(first[at % len(first)], text, request.place(at % len(first), 1), request.place(at, 2))
        for at, text in enumerate(second)
    ]


def _of_reranker(loaded: LoadedModel, request: ScoringRequest, pairs: Sequence[TextPair]) -> ScoringPlan:
    reader, asked = loaded.reader, request.truncate_prompt_tokens
    if "text_pair" not in reader.takes:
        raise InvalidRequest.at("model", f"{type(loaded.model).__name__} reads no pairs: {reader.no_tokenizer}")
    limits = [reader.max_length, getattr(reader.tokenizer, "model_max_length", None), None if asked == -1 else asked]
    known = [stated_limit for stated_limit in limits if isinstance(stated_limit, int) and stated_limit < _UNLIMITED]
    limit = min(known, default=None)
    for text, field in {pair.first: pair.first_field for pair in reversed(pairs)}.items():
        ids = reader.tokens(text, field).ids  # a text that cannot be read alone is at fault itself
        reader.check(ids if limit is None else ids[: max(1, limit)], field)
    rows, truncated = list[Tokens](), list[bool]()
    for pair in pairs:
        row = reader.tokens(pair.first, pair.second_field, pair=pair.second)
        truncated.append(limit is not None and len(row.ids) > limit)
        if truncated[-1]:
            row = reader.tokens(pair.first, pair.second_field, pair=pair.second, limit=limit)
        if limit is not None and (len(row.ids) > limit or not row.ids):
            raise InvalidRequest.at(
                "truncate_prompt_tokens", f"{limit} tokens have no room for those that the tokenizer adds", limit=limit
            )
        reader.check(row.ids, pair.second_field)
        rows.append(row)
    raw = request.use_activation is False
    return ScoringPlan(rows, truncated, activation=nn.Identity() if raw else _activation(loaded.model.config))


def _activation(config: Any) -> nn.Module:
    """The way from a logit to a score that a checkpoint asks for, as vLLM reads it; default: the logistic function.

    Raises InvalidCheckpoint for a name that is no activation of PyTorch.
    """
    if (problem := getattr(config, "problem_type", None)) is not None:
        return nn.Identity() if problem == "regression" else nn.Sigmoid()
    sentences = getattr(config, "sentence_transformers", None)
    named = sentences.get("activation_fn") if isinstance(sentences, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    kind = str(named or "Sigmoid").rpartition(".")[2]
    return activation_of("Sigmoid" if kind == "Softmax" else kind).eval()  # a softmax of one number would be 1


def _of_vectors(loaded: LoadedModel, pairs: Sequence[TextPair]) -> ScoringPlan:
    if loaded.reader.tokenizer is None:
        raise InvalidRequest.at("model", f"{type(loaded.model).__name__} reads no texts: {loaded.reader.no_tokenizer}")
    queries = {pair.first: pair.first_field for pair in pairs}
    documents = {pair.second: pair.second_field for pair in pairs}
    settings = read_sentence_settings(Path(str(loaded.model.name_or_path)))
    prompts = {} if settings is None else settings.prompts
    one, other = (
        plan_texts(loaded, {field: text for text, field in texts.items()}, name if name in prompts else None, None)
        for name, texts in (("query", queries), ("document", documents))
    )
    embedding = EmbeddingPlan(one.settings, [*one.rows, *other.rows], [*one.left_out, *other.left_out])
    first = {text: at for at, text in enumerate(queries)}
    second = {text: at + len(first) for at, text in enumerate(documents)}
    places = [(first[pair.first], second[pair.second]) for pair in pairs]
    return ScoringPlan(embedding=embedding, places=places)


def scored(
    loaded: LoadedModel, memory: PassMemory, request: ScoringRequest, plan: ScoringPlan
) -> Passes[Ranking | PairScores]:  # fmt: skip
    """Return the scores of the pairs, some of them at a time."""
    if plan.embedding is None:
        scores = yield from _activated(loaded, memory, plan)
    else:
        asked = EmbeddingRequest(model=request.model, input="of the plan")
        embedded = yield from embeddings(loaded, memory, asked, plan.embedding)
        vectors = np.array([item.embedding for item in embedded.data], np.float64)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        scores = [float(vectors[one] @ vectors[other]) for one, other in plan.places]
    if not np.isfinite(scores).all():
        raise NotFinite("the scores are not finite", param="model", field="score")
    return _reply(loaded, request, plan, scores)


def _activated(loaded: LoadedModel, memory: PassMemory, plan: ScoringPlan) -> Passes[list[float]]:
    scores = list[float]()
    for some in parts_of(plan.lengths, memory):
        if scores:
            yield len(some)
        rows = [plan.rows[at] for at in some]
        lengths = {len(row.ids) for row in rows}
        alone = len(lengths) > 1 and loaded.reader.mixes_padding(max(lengths))
        for batch in [[row] for row in rows] if alone else [rows]:
            scores += plan.activation(_logits(loaded, batch)).tolist()
    return scores


@torch.inference_mode()
def _logits(loaded: LoadedModel, rows: Sequence[Tokens]) -> torch.Tensor:
    """The logit of each pair, ``[B]`` in float64."""
    stack = loaded.reader.batch(rows)
    spec = RunSpec(logits=Predictions([[0]] * len(rows), stack))
    logits = loaded.runner.run(loaded.reader.arguments(stack), spec).logits.logits
    return logits[:, 0, 0].double()


def _reply(
    loaded: LoadedModel, request: ScoringRequest, plan: ScoringPlan, scores: Sequence[float]
) -> Ranking | PairScores:  # fmt: skip
    count = sum(plan.lengths)
    usage = Usage(prompt_tokens=count, total_tokens=count)
    ran = OpenAIRan(weights=weights_with(loaded, loaded.adapters.active))
    cut = [cut_at or ABSENT for cut_at in plan.truncated] or [ABSENT] * len(scores)
    name = uuid.uuid4().hex
    if isinstance(request, ScoreRequest):
        data = [PairScore(index=at, score=score, truncated=cut[at]) for at, score in enumerate(scores)]
        return PairScores(
            id=f"score-{name}", created=int(time.time()), model=request.model, data=data, usage=usage, ran=ran
        )
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top_n or None]
    shows = request.return_documents is not False
    results = [
        RankedResult(
            index=at, relevance_score=scores[at], truncated=cut[at],
            document=RankedDocument(text=request.documents[at]) if shows else ABSENT,
        )
        for at in order
    ]  # fmt: skip
    return Ranking(id=f"rerank-{name}", model=request.model, usage=usage, results=results, ran=ran)
