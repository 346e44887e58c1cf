"""Measure what a tiny model has learnt: its loss on held-out text, and the heads that look back and repeat."""

from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.tiny_text import documents

HELD_OUT: Final = 10_000
"""The seed of documents that no training sees."""
_TEXTS: Final = 200
_REPEATED: Final = 32
"""Tokens of a random sequence, which is said twice."""


@dataclass(frozen=True)
class Measures:
    """Measured figures. Tensors of heads are ``[layers, heads]``."""

    loss: float
    """Mean cross-entropy of the next token on held-out documents, in nats."""
    unigram: float
    """The same if every token had its share of those documents."""
    first_loss: float
    """The loss on random tokens, which nothing predicts."""
    second_loss: float
    """The loss on the same tokens said again."""
    previous: Tensor
    """The mean weight on the token before, in held-out documents."""
    induction: Tensor
    """The mean weight of a repeated random token on the one that followed it before."""
    first_key: Tensor
    """The mean weight on the first token, in held-out documents."""


def repeated(generator: torch.Generator, rows: int, length: int, vocabulary: int) -> Tensor:
    """Return random tokens, said twice after the first token of a text: ``[rows, 1 + 2 · length]``."""
    tokens = torch.randint(4, vocabulary, (rows, length), generator=generator)
    return torch.cat([torch.zeros(rows, 1, dtype=torch.long), tokens, tokens], dim=1)


def _losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of each token but the first: ``[B, L - 1]``."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def _run(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the weights ``[layers, B, H, L, L]`` by eager attention."""
    out: Any = model(tokens, output_attentions=True)
    return out.logits, torch.stack(out.attentions)


@torch.no_grad()
def measured(model: PreTrainedModel, words: PreTrainedTokenizerBase) -> Measures:
    """Measure a model that computes its attention eagerly."""
    losses, previous, first, counts = [], [], [], torch.zeros(len(words))
    for text in islice(documents(HELD_OUT), _TEXTS):
        tokens = torch.tensor([[*words(text).input_ids, words.eos_token_id]])
        logits, weights = _run(model, tokens)
        losses.append(_losses(logits, tokens).flatten())
        counts += torch.bincount(tokens[0, 1:], minlength=len(words))
        previous.append(weights.diagonal(-1, -2, -1).squeeze(1)[..., 1:])  # the second token's is the first
        first.append(weights[:, 0, :, 2:, 0])
    shares = counts / counts.sum()
    twice = repeated(torch.Generator().manual_seed(0), 64, _REPEATED, len(words))
    logits, weights = _run(model, twice)
    again = _losses(logits, twice)
    # The second saying begins at 1 + n; its token at i has stood at i - n, and i - n + 1 followed.
    looked = weights.diagonal(-(_REPEATED - 1), -2, -1)[..., 2:]
    return Measures(
        loss=torch.cat(losses).mean().item(),
        unigram=-(shares * shares.clamp(min=1e-12).log()).sum().item(),
        first_loss=again[:, :_REPEATED].mean().item(),
        second_loss=again[:, _REPEATED + 1 :].mean().item(),
        previous=torch.cat(previous, -1).mean(-1),
        induction=looked.mean((1, 3)),
        first_key=torch.cat(first, -1).mean(-1),
    )
