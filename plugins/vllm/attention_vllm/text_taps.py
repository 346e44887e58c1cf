"""Taps of all tokens of a text, as the passes that read its prompt compute them. Notation as in ``layer_facts``."""

import torch

from attention_service.core.inspection.weights import weights_of
from attention_service.core.problem import Selection
from attention_vllm.asked_requests import AskedRequest, KernelCall
from attention_vllm.layer_facts import LayerFacts
from attention_vllm.pass_rows import PassRow


def read_taps(call: KernelCall, facts: LayerFacts, asked: AskedRequest, row: PassRow) -> None:
    """Keep the context ``[H, Q, D]`` of a row's tokens in a layer, after edits, and their weights ``[H, Q, K]``."""
    heads = asked.bound.heads[call.layer].heads
    chosen = slice(None) if heads is None else list(heads)
    taken = asked.tapped.setdefault(call.layer, {})
    if "context" in asked.bound.taps:
        context = call.output[row.start : row.stop].transpose(0, 1)[chosen]
        taken["context"] = context.float().cpu().numpy().copy()
    if "weights" in asked.bound.taps:
        q = call.query[row.start : row.stop].transpose(0, 1)[None]
        keys = call.keys(row)[None]
        first = torch.tensor([row.first], device=q.device)
        weights = weights_of(facts.problem(q, keys, None, first), Selection())
        taken["weights"] = weights[0, chosen].cpu().numpy()
