"""Policies of sessions: the tokens that each keeps.

A step's tokens see every token that is held before the step, and each other. After the step the policy drops tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from attention_contract.errors import InvalidRequest
from attention_contract.schemas import sessions as models
from attention_contract.schemas.sessions import Policy
from attention_contract.spec import AttentionSpec, Causal, Exact
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import added_keys


class Keeper(Protocol):
    """The state of one session's policy. B sequences, H query heads, Hkv key/value heads."""

    @property
    def grows(self) -> bool:
        """True if all tokens of later steps are kept, so that ``most`` bounds the first step alone."""

    @property
    def most(self) -> int:
        """The most tokens that are held after the first step."""

    def wants(self, queries: int, held: int) -> slice | None:
        """Return the new queries of a step whose weights the policy needs; None for none.

        held: tokens before the step.
        """

    def after_step(self, weights: Tensor | None, held: int, new: int) -> Tensor | None:
        """Return the held and new tokens that stay, ascending; None if all do.

        weights ``[B, H, wanted queries, held + new]``; the result is int64, broadcastable to ``[B, Hkv, kept]``.
        """

    def copy(self) -> "Keeper":
        """The state of a fork."""

    def reorder(self, rows: Sequence[int]) -> None:
        """Let each sequence continue another one's state."""

    def truncate(self, dropped: int, held: int, length: int) -> None:
        """Prepare to forget the last tokens. Raises InvalidRequest if that cannot be undone.

        held, length: tokens that are held, and all tokens, before.
        """


def keeper_of(policy: Policy, spec: AttentionSpec, kv_heads: int, heads: int) -> Keeper | None:
    """The state of a policy at the start; None for ``full``. Raises InvalidRequest if the spec does not allow it."""
    if isinstance(policy, models.FullPolicy):
        return None
    for fault in _faults(spec):
        raise InvalidRequest.at(
            "policy",
            f"{policy.name} drops tokens, and the module's spec has {fault}; open the session with policy full",
        )
    return _KEEPERS[type(policy)](policy, kv_heads, heads)


def _faults(spec: AttentionSpec) -> list[str]:
    """The parts of a spec that depend on the distance to tokens, or on their number, beyond the rotation of keys."""
    faults = [f"mask {mask.name}" for mask in spec.masks if not isinstance(mask, Causal)]
    if POSITIONS.of(spec.position).biased:
        faults.append(f"position {spec.position.name}")
    if not isinstance(spec.method, Exact):
        faults.append(f"method {spec.method.name}")
    if added_keys(spec):
        faults.append("keys that it adds after all others")
    return faults


def _refuse_truncation(reason: str) -> InvalidRequest:
    return InvalidRequest.at(
        "length", f"{reason}; before a step that you may want to undo, fork the session, and continue with the fork"
    )


class WindowKeeper:
    """Keep the first tokens and the last ones. Source: Xiao et al. 2024, section 3.2."""

    grows = False

    def __init__(self, policy: models.WindowSinks, kv_heads: int, heads: int) -> None:
        self.policy = policy

    @property
    def most(self) -> int:
        """Return the number of tokens that it chooses and of its window's."""
        return self.policy.sinks + self.policy.window

    def wants(self, queries: int, held: int) -> slice | None:
        """Return None: the choice needs no weights."""
        return None

    def after_step(self, weights: Tensor | None, held: int, new: int) -> Tensor | None:
        """Return the sinks and the window."""
        keys, sinks, window = held + new, self.policy.sinks, self.policy.window
        if keys <= sinks + window:
            return None
        return torch.cat([torch.arange(sinks), torch.arange(keys - window, keys)])[None, None]

    def copy(self) -> "WindowKeeper":
        """Return itself, which has no state."""
        return self

    def reorder(self, rows: Sequence[int]) -> None:
        """Do nothing: all sequences keep the same places."""

    def truncate(self, dropped: int, held: int, length: int) -> None:
        """Refuse if the window has dropped tokens that it would hold again."""
        if dropped and held != length:
            raise _refuse_truncation("the window has dropped tokens that it would hold again")


class HeavyKeeper:
    """Keep the last tokens and those with most weight so far. Source: Zhang et al. 2023, algorithm 1."""

    grows = False

    def __init__(self, policy: models.HeavyHitters, kv_heads: int, heads: int) -> None:
        self.policy = policy
        self.kv_heads = kv_heads
        self.votes: Tensor | None = None
        """``[B, Hkv, held]``: the weight that each held token got so far, from all queries and heads of its group."""

    @property
    def most(self) -> int:
        """Return the number of tokens that it chooses and of its window's."""
        return self.policy.heavy + self.policy.window

    def wants(self, queries: int, held: int) -> slice | None:
        """Return all queries: each votes."""
        return slice(0, queries)

    def after_step(self, weights: Tensor | None, held: int, new: int) -> Tensor | None:
        """Return the heavy hitters before the window, and the window."""
        if weights is None:
            raise TypeError("heavy hitters are chosen by weights")
        votes = _votes(weights, self.kv_heads)
        if self.votes is not None:
            votes = votes + pad(self.votes, (0, new))
        self.votes = votes
        window, keys = self.policy.window, held + new
        if keys <= self.policy.heavy + window:
            return None
        kept = _best(votes[..., : keys - window], self.policy.heavy, keys)
        self.votes = votes.gather(2, kept)
        return kept

    def copy(self) -> "HeavyKeeper":
        """The votes so far, which a tensor of its own replaces at each step."""
        made = HeavyKeeper(self.policy, self.kv_heads, 0)
        made.votes = self.votes
        return made

    def reorder(self, rows: Sequence[int]) -> None:
        """Let the votes follow their sequences."""
        if self.votes is not None:
            self.votes = self.votes[list(rows)]

    def truncate(self, dropped: int, held: int, length: int) -> None:
        """Refuse: votes of the forgotten tokens cannot be taken back."""
        if dropped:
            raise _refuse_truncation("the last tokens have voted for the heavy hitters")


class SnapKeeper:
    """Keep of the first step what its last queries look at. Source: Li et al. 2024, section 4."""

    grows = True

    def __init__(self, policy: models.SnapKV, kv_heads: int, heads: int) -> None:
        self.policy = policy
        self.kv_heads = kv_heads
        self.later: int | None = None
        """Tokens since the first step; None before it."""

    @property
    def most(self) -> int:
        """Return the number of tokens that it chooses and of its window's."""
        return self.policy.keep + self.policy.window

    def wants(self, queries: int, held: int) -> slice | None:
        """Return the last queries of the first step."""
        return None if self.later is not None else slice(max(queries - self.policy.window, 0), queries)

    def after_step(self, weights: Tensor | None, held: int, new: int) -> Tensor | None:
        """After the first step, return the tokens with most votes, and its last ones."""
        if self.later is not None:
            self.later += new
            return None
        if not new:
            return None
        if weights is None:
            raise TypeError("SnapKV chooses by weights")
        self.later = 0
        keys, (window, size) = held + new, (self.policy.window, self.policy.kernel)
        if keys <= self.policy.keep + window:
            return None
        votes = _votes(weights, self.kv_heads)[..., : keys - window]
        return _best(max_pool1d(votes, size, stride=1, padding=size // 2), self.policy.keep, keys)

    def copy(self) -> "SnapKeeper":
        """The same count."""
        made = SnapKeeper(self.policy, self.kv_heads, 0)
        made.later = self.later
        return made

    def reorder(self, rows: Sequence[int]) -> None:
        """Do nothing: the choice is made, or not begun."""

    def truncate(self, dropped: int, held: int, length: int) -> None:
        """Refuse to go back into a first step of which tokens were dropped."""
        if self.later is None:
            return
        if dropped > self.later and held != length:
            raise _refuse_truncation("tokens of the first step were dropped, and all of them would be needed again")
        self.later = self.later - dropped if dropped <= self.later else None if dropped == length else 0


def _votes(weights: Tensor, kv_heads: int) -> Tensor:
    """The weight that each key gets from all queries and the heads of its group: ``[B, Hkv, K]``."""
    batch, heads, queries, keys = weights.shape
    by_group = weights.double().reshape(batch, kv_heads, heads // kv_heads * queries, keys)
    return by_group.sum(2)


def _best(votes: Tensor, count: int, keys: int) -> Tensor:
    """The ``count`` keys with most votes, and all keys after those voted on: ascending, ``[B, Hkv, kept]``.

    Of equal votes, the earlier key stays.
    """
    chosen = votes.sort(dim=2, descending=True, stable=True).indices[..., :count].sort(2).values
    rest = torch.arange(votes.shape[2], keys, device=votes.device).expand(*votes.shape[:2], -1)
    return torch.cat([chosen, rest], 2)


_KEEPERS: dict[type[Any], Callable[[Any, int, int], Keeper]] = {
    models.WindowSinks: WindowKeeper,
    models.HeavyHitters: HeavyKeeper,
    models.SnapKV: SnapKeeper,
}
