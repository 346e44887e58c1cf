"""BERT encoder with attention by the service and all other layers by ``transformers``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the checkpoint's folder contains all files

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from attention_client import Client
from attention_contract.schemas.attention import Ran
from attention_contract.schemas.weights import HeadStatistics

logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True)
class LayerSeen:
    """The service's reply for one layer."""

    module: str
    weights: Tensor
    """``[heads, queries, keys]``"""
    statistics: HeadStatistics
    """``[1, heads]`` each."""
    ran: Ran


@dataclass(frozen=True)
class Encoded:
    """One pass of a sentence through the encoder."""

    hidden: Tensor
    """Hidden states after the last layer, ``[tokens, d_model]``."""
    weights: list[Tensor]
    """Weights of every layer, ``[heads, queries, keys]``."""
    layers: list[LayerSeen] = field(default_factory=list)
    """The service's replies, if it computed the attention."""


class ServedAttention(nn.Module):
    """Replacement of a layer's attention by a module in the service."""

    def __init__(self, client: Client, module: str) -> None:
        super().__init__()
        self.client, self.module = client, module
        self.seen: list[LayerSeen] = []

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the projected output for hidden states ``[1, tokens, d_model]``, and the weights."""
        reply = self.client.forward(self.module, hidden, return_=["output", "weights"])
        inspected = self.client.weights(self.module, hidden, return_weights=False, version=reply.ran.version)
        assert reply.output is not None
        assert reply.weights is not None
        output, weights = torch.from_numpy(reply.output), torch.from_numpy(reply.weights)
        self.seen.append(LayerSeen(self.module, weights[0], inspected.statistics, reply.ran))
        return output, weights


class Encoder:
    """Encoder from a checkpoint with BERT's layout: tokens in, hidden states out."""

    def __init__(self, checkpoint: Path) -> None:
        if not (checkpoint / "config.json").is_file():
            raise FileNotFoundError(f"{checkpoint} is not a checkpoint folder: it has no config.json")
        local: dict[str, Any] = {"local_files_only": True}
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint, **local)
        self._model = AutoModel.from_pretrained(
            checkpoint, attn_implementation="eager", dtype=torch.float32, use_safetensors=True, **local
        ).eval()
        try:
            self._layers = list(self._model.encoder.layer)
        except AttributeError:
            raise ValueError(f"{checkpoint} is not an encoder with BERT's layout") from None

    @property
    def depth(self) -> int:
        """Return the number of layers."""
        return len(self._layers)

    def tokens(self, sentence: str) -> list[str]:
        """Return the tokens of a sentence, including those that the tokenizer adds."""
        ids: list[int] = self._inputs(sentence)["input_ids"][0].tolist()
        tokens: list[str] = self._tokenizer.convert_ids_to_tokens(ids)
        return tokens

    def run(self, sentence: str) -> Encoded:
        """Encode a sentence by ``transformers`` alone."""
        with torch.inference_mode():
            reply = self._model(**self._inputs(sentence), output_attentions=True)
        return Encoded(reply.last_hidden_state[0], [weights[0] for weights in reply.attentions])

    def run_served(self, sentence: str, client: Client, modules: list[str]) -> Encoded:
        """Encode a sentence with the attention of every layer computed by these modules of the service."""
        with self._served(client, modules) as attentions, torch.inference_mode():
            hidden = self._model(**self._inputs(sentence)).last_hidden_state[0]
        layers = [attention.seen[-1] for attention in attentions]
        return Encoded(hidden, [layer.weights for layer in layers], layers)

    @contextmanager
    def _served(self, client: Client, modules: list[str]) -> Iterator[list[ServedAttention]]:
        """Replace the attention of every layer by the service. The residual and the LayerNorm stay."""
        own = [(layer.attention.self, layer.attention.output.dense) for layer in self._layers]
        served = [ServedAttention(client, module) for module in modules]
        try:
            for layer, attention in zip(self._layers, served, strict=True):
                layer.attention.self, layer.attention.output.dense = attention, nn.Identity()
            yield served
        finally:
            for layer, (attention, dense) in zip(self._layers, own, strict=True):
                layer.attention.self, layer.attention.output.dense = attention, dense

    def _inputs(self, sentence: str) -> Any:
        longest = min(self._tokenizer.model_max_length, self._model.config.max_position_embeddings)
        return self._tokenizer(sentence, return_tensors="pt", truncation=True, max_length=longest)
