"""Edits of one request in one layer of a pass, tile by tile. Notation as in ``layer_facts``."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from attention_service.core.edits import BoundEdit, begun_at, narrowed
from attention_service.core.problem import Selection
from attention_service.core.stages import stages
from attention_vllm.layer_facts import LayerFacts

_TILE: Final = 2**21
"""Scores that are computed at once."""


def edited_contexts(
    facts: LayerFacts, q: Tensor, k: Tensor, v: Tensor, edits: Sequence[BoundEdit], first: int, begin: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the queries of each tile that edits change, their context ``[H, q, D]`` and weights ``[H, q, K]``.

    ``q [H, Q, D]``, ``k`` and ``v`` ``[Hkv, K, D]``; ``first``: the position of the first query; ``begin``: the first
    token that is edited. No query before it sees an edited key.
    """
    queries, keys = q.shape[1], k.shape[1]
    step = max(1, _TILE // (facts.heads * keys))
    for start in range(max(0, begin - first), queries, step):
        part = slice(start, min(start + step, queries))
        places = range(first + part.start, first + part.stop)
        own = narrowed(edits, Selection(queries=places), facts.heads, facts.kv_heads, keys=range(keys))
        if begin:
            own = begun_at(own, begin, places, range(keys))
        if not own:
            continue
        offset = torch.tensor([places.start], device=q.device)
        problem = facts.problem(q[None, :, part], k[None], v[None], offset)
        taps = dict(stages(problem, ("weights", "context"), own))
        yield part, taps["context"][0], taps["weights"][0]
