"""Vectors and similarities of many texts, of some texts at a time."""

from collections.abc import Iterator, Sequence

from attention_contract.schemas.openai import EmbeddingRequest, Embeddings, Usage
from attention_contract.schemas.text_similarity import TextSimilarityReply, TextSimilarityRequest
from attention_service.models.answers.embeddings.text_embeddings import EmbeddingPlan, embed
from attention_service.models.answers.embeddings.vector_similarity import similarity_reply
from attention_service.models.costs.answer_parts import BACKWARD, OwnTime, Passes
from attention_service.models.costs.pass_memory import PassMemory
from attention_service.models.loaded.loaded_model import LoadedModel


def embeddings(
    loaded: LoadedModel, memory: PassMemory, request: EmbeddingRequest, plan: EmbeddingPlan
) -> Passes[Embeddings]:
    """Return a vector for each text."""
    parts: list[Embeddings] = []
    for some in parts_of([len(row) for row in plan.rows], memory):
        if parts:
            yield len(some)
        parts.append(embed(loaded, request, plan.of(some)))
    data = [item for part in parts for item in part.data]
    tokens = sum(part.usage.prompt_tokens for part in parts)
    return parts[0].model_copy(
        update={
            "data": [item.model_copy(update={"index": index}) for index, item in enumerate(data)],
            "usage": Usage(prompt_tokens=tokens, total_tokens=tokens),
        }
    )


def similarities(
    loaded: LoadedModel, memory: PassMemory, request: TextSimilarityRequest, plan: EmbeddingPlan
) -> Passes[TextSimilarityReply]:
    """Return the cosine of each pair, and the share of each token in it."""
    rows, time = plan.rows, OwnTime()
    half, passes = len(rows) // 2, BACKWARD if request.gradients else 1
    tokens = [2 * max(len(rows[pair]), len(rows[half + pair])) for pair in range(half)]
    replies: list[TextSimilarityReply] = []
    for some in parts_of(tokens, memory, passes):
        if replies:
            yield from time.between(2 * passes * len(some))
        both = [*some, *(half + pair for pair in some)]
        replies.append(similarity_reply(loaded, request, plan.of(both)))
    if len(replies) == 1:
        return replies[0]
    lists = {
        name: [item for part in replies for item in getattr(part, name)]
        for name in ("similarity", "labels", *(["tokens"] if request.gradients else ()))
    }
    ran = replies[0].ran.model_copy(update={"compute_ms": time.took_ms})
    return replies[0].model_copy(update={**lists, "ran": ran})


def parts_of(tokens: Sequence[int], memory: PassMemory, times: int = 1) -> Iterator[range]:
    """The texts of each part, in their order: as many as are fast together if each is as long as the longest."""
    first = 0
    while first < len(tokens):
        end, longest = first + 1, tokens[first]
        while end < len(tokens):
            longest = max(longest, tokens[end])
            if end + 1 - first > memory.in_part(longest, times):
                break
            end += 1
        yield range(first, end)
        first = end
