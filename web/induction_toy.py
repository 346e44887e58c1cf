"""Train a small attention-only model until it repeats what it has read, and record one text.

Two layers of four heads, causal, without a feed-forward part. The texts are random letters that repeat after a random
number of them, so that a head must find the letter after an earlier equal one. Source: Olsson et al. 2022 (induction
heads), on a task of random repeats. Training stops when the loss on repeated letters is below 0.05 nats; it takes about
half a minute.
"""

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTH, WIDTH, HEADS, LAYERS = 40, 64, 4, 2
TEXT = ("uncopyrightable" * 3)[:LENGTH]
"""Fifteen different letters, repeated."""


class CausalLayer(nn.Module):
    """Multi-head attention over normalized states, added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, states: Tensor, taps: list[tuple[Tensor, Tensor, Tensor]] | None) -> Tensor:
        """Return the new states ``[B, L, WIDTH]``, and add q, k and v to the taps."""
        normed = self.norm(states)
        q, k, v = (part(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if taps is not None:
            taps.append((q, k, v))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        added: Tensor = self.o(context.transpose(1, 2).flatten(2))
        return states + added


class Repeater(nn.Module):
    """Letters and their places in, scores of the next letter out."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(CausalLayer() for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: Tensor, taps: list[tuple[Tensor, Tensor, Tensor]] | None = None) -> Tensor:
        """Return the scores ``[B, L, letters]`` of each next letter."""
        states = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for layer in self.layers:
            states = layer(states, taps)
        scores: Tensor = self.out(self.norm(states))
        return scores


def trained(steps: int = 5000) -> tuple[Repeater, float]:
    """Return the trained model and its last loss on repeated letters, in nats."""
    torch.manual_seed(0)
    model, loss = Repeater(), torch.tensor(math.inf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        period = torch.randint(6, 20, (64, 1))
        places = torch.arange(LENGTH).expand(64, LENGTH)
        letters = torch.randint(0, len(LETTERS), (64, LENGTH)).gather(1, places % period)
        scores = model(letters[:, :-1]).flatten(0, 1)
        losses = nn.functional.cross_entropy(scores, letters[:, 1:].flatten(), reduction="none").view(64, -1)
        repeated = (places >= period)[:, 1:]
        loss = losses[repeated].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.05:
            break
    return model, loss.item()


def record_toy() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and tensors of a recording of the trained model, by full name."""
    model, loss = trained()
    taps: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        model(torch.tensor([[LETTERS.index(letter) for letter in TEXT]]), taps)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    tensors: dict[str, np.ndarray] = {}
    for layer, (q, k, v) in enumerate(taps):
        scores = (q.double() @ k.double().mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -math.inf)
        parts = {"weights": scores.softmax(-1), "q": q, "k": k, "v": v}
        tensors |= {f"layers.{layer}.{name}": part[0].numpy() for name, part in parts.items()}
    names = [[f"L{layer}H{head}" for head in range(HEADS)] for layer in range(LAYERS)]
    facts = {
        "format": 1, "model": f"a trained toy: 2 layers, attention only, loss {loss:.2f}", "text": TEXT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "versions": {"torch": torch.__version__},
        "tokens": {"layers": list(TEXT)},
        "attentions": [{"name": f"layers.{layer}", "heads": heads} for layer, heads in enumerate(names)],
    }  # fmt: skip
    return facts, tensors
