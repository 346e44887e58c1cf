"""Modern Hopfield retrieval: states converge to stored patterns, and each update is one softmax attention over them.

Notation for shapes: B batch, H heads, N stored patterns, S states, D width.
Source: Ramsauer et al. 2021, "Hopfield Networks is All You Need".
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cosine_similarity

from attention_contract.spec import AttentionSpec, Dot
from attention_service.core.blocks import rows_at_once
from attention_service.core.cancellation import checkpoint
from attention_service.core.problem import Problem
from attention_service.core.stages import stages

SINGLE = 0.9
"""Smallest association weight of a state that is a single pattern: the sum of weights in the paper (figure 2)."""
DOT_PRODUCTS = AttentionSpec(score=Dot())
"""Spec of an update. The queries contain β, so that each head can have its own."""


@dataclass(frozen=True)
class PatternMemory:
    """Stored patterns and inverse temperature."""

    patterns: Tensor
    """Patterns, ``[B, H, N, D]``; zeros where the mask is false."""
    beta: Tensor
    """Inverse temperature, ``[H]``, positive."""
    mask: Tensor | None = None
    """Bool ``[B, N]``, true for a real pattern; at least one per sequence. None if all are real."""

    def attention(self, states: Tensor) -> Problem:
        """Return the attention that updates states ``[B, H, S, D]``: softmax(β ξ Xᵀ) X (eq. 3)."""
        queries = states * self.beta[:, None, None]
        return Problem(queries, self.patterns, self.patterns, DOT_PRODUCTS, key_mask=self.mask)

    def ground(self) -> Tensor:
        """Constants of the energy, β⁻¹ ln N + ½ max ‖x‖², ``[B, H, 1]``. With them, the energy is never negative."""
        batch, _, patterns, _ = self.patterns.shape
        count = self.beta.new_full((batch, 1), patterns) if self.mask is None else self.mask.sum(-1, keepdim=True)
        spread: Tensor = count.to(self.beta.dtype).log() / self.beta  # [B, H]
        widest: Tensor = vector_norm(self.patterns, dim=-1).amax(-1, keepdim=True)  # [B, H, 1]
        return spread[..., None] + widest.square() / 2


@dataclass(frozen=True)
class Retrieved:
    """Final states and their course; T is the number of updates of the slowest state."""

    states: Tensor
    """Final states, ``[B, H, S, D]``."""
    energy: Tensor
    """Energy before the first update and after each, ``[B, H, S, T + 1]``."""
    steps: Tensor
    """Number of updates, integer ``[B, H, S]``."""
    change: Tensor
    """Euclidean norm of the last update, ``[B, H, S]``."""
    pattern: Tensor
    """Pattern with the largest association weight in the last update, integer ``[B, H, S]``."""
    weight: Tensor
    """Association weight of ``pattern``, ``[B, H, S]``."""
    similarity: Tensor
    """Cosine of the state and ``pattern``, ``[B, H, S]``."""
    distance: Tensor
    """Euclidean distance of the state and ``pattern``, ``[B, H, S]``."""
    mixed: Tensor
    """Effective number of mixed patterns, exp of the weights' entropy, ``[B, H, S]``."""
    association: Tensor | None
    """Weights of the last update, ``[B, H, S, N]``."""

    @classmethod
    def empty(cls, states: Tensor, patterns: int, limit: int, *, association: bool) -> "Retrieved":
        """Allocate the results of at most ``limit`` updates."""
        shape = states.shape[:-1]
        steps, pattern = torch.zeros(2, *shape, dtype=torch.int64, device=states.device)
        change, weight, similarity, distance, mixed = states.new_empty(5, *shape)
        return cls(
            states=states.new_empty(states.shape),
            energy=states.new_empty(*shape, limit + 1),
            steps=steps,
            change=change,
            pattern=pattern,
            weight=weight,
            similarity=similarity,
            distance=distance,
            mixed=mixed,
            association=states.new_empty(*shape, patterns) if association else None,
        )

    def part(self, rows: slice) -> "Retrieved":
        """Return views of the results of some states."""
        here = {name: x[:, :, rows] for name, x in vars(self).items() if x is not None}
        return Retrieved(**{"association": None} | here)


def energy(memory: PatternMemory, states: Tensor, lse: Tensor, ground: Tensor) -> Tensor:
    """Return the energy E(ξ) = −lse(β, Xᵀξ) + ½ ξᵀξ + β⁻¹ ln N + ½ max ‖x‖², ``[B, H, S]`` (eq. 2).

    lse ``[B, H, S]`` is ln Σ exp(β xᵀξ), and the paper's lse(β, ·) is that over β. ground is ``memory.ground()``.
    """
    return states.square().sum(-1) / 2 - lse / memory.beta[:, None] + ground


def retrieve(
    memory: PatternMemory, states: Tensor, limit: int, eps: float | None = None, *, association: bool = False
) -> Retrieved:
    """Update states ``[B, H, S, D]`` ``limit`` times, or each until the norm of its update is below eps.

    Blocks of states converge one after the other, so that only the scores of one block are in memory.
    """
    batch, heads, count, _ = states.shape
    ground = memory.ground()
    out = Retrieved.empty(states, memory.patterns.shape[2], limit, association=association)
    taken = 0
    rows = rows_at_once(batch, heads, memory.patterns.shape[2])
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        taken = max(taken, _fall(memory, states[:, :, part], ground, out.part(part), limit, eps))
    return replace(out, energy=out.energy[..., : taken + 1])


def _fall(memory: PatternMemory, x: Tensor, ground: Tensor, out: Retrieved, limit: int, eps: float | None) -> int:
    """Update one block of states, write the results, and return the number of updates of its slowest state."""
    x, weights = x.clone(), x.new_empty(*x.shape[:-1], memory.patterns.shape[2])
    falling = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    rows: Tensor | slice = slice(None)  # states that still change in a head or sequence
    taken = 0
    while taken < limit and (eps is None or bool(falling.any())):
        checkpoint()
        now, still = x[:, :, rows], falling[:, :, rows]
        update = dict(stages(memory.attention(now), ("masked_scores", "weights", "context")))
        out.energy[:, :, rows, taken] = energy(
            memory, now, _lse(update.pop("masked_scores"), update["weights"]), ground
        )
        out.steps.add_(falling)
        taken += 1
        change = vector_norm(update["context"] - now, dim=-1)
        if eps is None:
            x, weights = update["context"], update["weights"]
            out.change.copy_(change)
            continue
        out.change[:, :, rows] = torch.where(still, change, out.change[:, :, rows])
        kept = weights[:, :, rows]
        torch.where(still[..., None], update["weights"], kept, out=kept)
        weights[:, :, rows] = kept
        x[:, :, rows] = torch.where(still[..., None], update["context"], now)
        falling[:, :, rows] = still & (change >= eps)
        left = falling.any(1).any(0)
        if bool((~left).any()):
            rows = left.nonzero()[:, 0]
        del update, kept, now, still
    end = energy(memory, x, dict(stages(memory.attention(x), ("lse",)))["lse"], ground)[..., None]
    ended = torch.arange(taken, device=x.device) >= out.steps[..., None]
    energies = out.energy[..., :taken]
    torch.where(ended, end, energies, out=energies)
    out.energy[..., taken:] = end
    out.states.copy_(x)
    _describe(memory, x, weights, out)
    return taken


def _lse(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the log-sum-exp of scores ``[..., N]`` with known softmax: s − ln w of the largest weight."""
    largest = weights.max(-1, keepdim=True)
    return (scores.gather(-1, largest.indices) - largest.values.log()).squeeze(-1)


def _describe(memory: PatternMemory, x: Tensor, weights: Tensor, out: Retrieved) -> None:
    """Describe the pattern that each state reached."""
    largest = weights.max(-1)
    out.weight.copy_(largest.values)
    out.pattern.copy_(largest.indices)
    out.mixed.copy_(torch.special.entr(weights).sum(-1).exp())
    nearest = memory.patterns.gather(2, largest.indices[..., None].expand(*x.shape))
    out.distance.copy_(vector_norm(x - nearest, dim=-1))
    out.similarity.copy_(cosine_similarity(x, nearest, dim=-1))
    if out.association is not None:
        out.association.copy_(weights)
