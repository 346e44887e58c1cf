"""Runs of a model by transformers, and of this package with edits, to which the questions are held."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.inputs.input_stacks import Tokens
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.residual_stream import ResidualStream
from attention_service.models.loaded.streams.stream_search import find_stream
from attention_service.models.passes.attention_pass import AttentionPass, LayerTask

IDS: Final = [5, 3, 7, 8, 6, 4, 9, 10, 11]
TEXTS: Final = [IDS, IDS[:5]]
TOKEN: Final = 7
"""The token whose log-probability is measured."""
LEAST: Final = 1e-3
"""Effects below this are compared by their size in log-probabilities: rounding is a share of these."""


class NotAskedError(Exception):
    """A question that is not asked of a model type."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail
        """The reason."""


def texts_of(loaded: LoadedModel) -> list[list[int]]:
    """Return the texts to ask about: one of a model that mixes padding into its texts."""
    return TEXTS[:1] if loaded.reader.mixes_padding(len(IDS)) else TEXTS


@lru_cache(maxsize=1)
def stream_of(loaded: LoadedModel) -> ResidualStream:
    """Return the residual stream of a model. Raises InvalidRequest."""
    return find_stream(loaded)


def known_stream(loaded: LoadedModel) -> ResidualStream | None:
    """Return the residual stream of a model if it has one that is known."""
    with suppress(InvalidRequest):
        return stream_of(loaded)
    return None


@contextmanager
def hooked(*hooks: Any) -> Iterator[None]:
    """Remove hooks at the end of the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ── by transformers ──────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def eager_logits(model: PreTrainedModel, loaded: LoadedModel, ids: list[int]) -> np.ndarray:
    """Return the logits ``[L, V]`` of one text."""
    inputs = loaded.reader.read(ModelForwardRequest(tokens=ids))
    cache = {"use_cache": False} if "use_cache" in loaded.reader.names else {}
    return np.asarray(model(**inputs.arguments, **cache, return_dict=True).logits[0].cpu(), np.float64)


def eager_states(model: PreTrainedModel, loaded: LoadedModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the last states ``[L, d]`` of a text, and the embeddings that are fed for it, in a graph."""
    stack = loaded.reader.batch([Tokens(ids, [None] * len(ids))])
    reads: Any = model.get_encoder() if loaded.reader.pairs else model
    arguments: dict[str, Any] = dict(loaded.reader.arguments(stack))
    if "use_cache" in loaded.reader.names and not loaded.reader.pairs:
        arguments["use_cache"] = False
    bases: list[Any] = []
    own = model.base_model.register_forward_hook(lambda _, __, output: bases.append(output))
    with hooked(own), fed_embeddings(model, reads) as leaves:
        output = reads(**arguments, output_hidden_states=True, return_dict=True)
    last = output.get("last_hidden_state")
    states = output["hidden_states"][-1] if last is None else last
    base = getattr(bases[0] if bases else None, "last_hidden_state", None)
    if base is not None and base.shape != states.shape:  # of several streams, or of two halves
        states = base
    if states.shape[:2] == stack.ids.shape[::-1] != stack.ids.shape:
        states = states.transpose(0, 1)
    return states[0][: len(ids)], leaves[0]


@contextmanager
def fed_embeddings(model: PreTrainedModel, reads: Any) -> Iterator[list[Tensor]]:
    """Feed the embeddings of the first table that runs as a leaf of a graph, which is yielded in a list."""
    table: Any = getattr(reads, "get_input_embeddings", model.get_input_embeddings)()
    leaves: list[Tensor] = []

    def feed(_: Any, __: Any, output: Tensor) -> Tensor | None:
        if leaves:
            return None
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[0].clone()  # some models scale it in place

    with hooked(table.register_forward_hook(feed)):
        yield leaves


def by_token(product: Tensor, length: int) -> Tensor:
    """Return the sums ``[L]`` over the width of ``[1, L, d]`` or ``[L, 1, d]``, without tokens that a model adds."""
    return product.sum(-1).flatten()[:length].detach()


# ── by this package ──────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def logits_with(loaded: LoadedModel, ids: list[int], edits: Any) -> np.ndarray:
    """Return the logits ``[L, V]`` of one text in a pass with edits."""
    request = ModelForwardRequest(tokens=ids, edits=edits)
    checked = check_request(loaded, request, lambda _: True)
    tasks = {
        place.key: LayerTask(edits=request.edits.get(str(place.key), ()), key_mask=checked.keys(place).mask)
        for place in loaded.all_places
    }
    logits = loaded.run(checked.inputs.arguments, AttentionPass(tasks)).logits.cpu()
    mask = checked.inputs.predicted.mask
    return np.asarray(logits[0] if mask is None else logits[0][mask[0].cpu()], np.float64)


def log_p(logits: np.ndarray, token: int = TOKEN) -> float:
    """Return the log-probability of a token, by logits ``[V]``."""
    return float(log_ps(logits)[token])


def log_ps(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities ``[…, V]``."""
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
