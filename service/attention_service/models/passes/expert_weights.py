"""The weights by which a layer sums its experts, in the call of the module that holds the experts.

Notation: N tokens of all texts, k experts of a token, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

Argument = int | str
"""The place of an argument among those of a call, or its name."""
_ONE_HOT: Final = 3
"""The dimensions of a choice ``[N, k, E]``; one of indices has two."""


class ExpertArguments(NamedTuple):
    """The arguments of a call that choose experts for tokens and weigh them."""

    states: Argument
    """``[N, d]``, or ``[B, L, d]``"""
    choice: Argument
    """Integers: the experts ``[N, k]``, or ``[N, k, E]`` with 1 for the expert and 0 for the others."""
    weights: Argument
    """``[N, k]``"""


def expert_arguments(args: Sequence[Any], options: Mapping[str, Any]) -> ExpertArguments | None:
    """Find the arguments by their shapes; None for a call that has no such."""
    given: dict[Argument, Tensor] = {at: x for at, x in enumerate(args) if isinstance(x, Tensor)}
    given |= {name: x for name, x in options.items() if isinstance(x, Tensor)}
    whole = [at for at, x in given.items() if x.dtype in {torch.int32, torch.int64} and x.ndim in {2, _ONE_HOT}]
    real = [at for at, x in given.items() if x.is_floating_point() and x.ndim > 1]
    if len(whole) != 1 or len(real) != 2:
        return None
    states, weights = real
    shape = given[whole[0]].shape[:2]
    if given[weights].shape != shape or given[states].numel() != shape[0] * given[states].shape[-1]:
        return None
    return ExpertArguments(states, whole[0], weights)


def argument(args: Sequence[Any], options: Mapping[str, Any], at: Argument) -> Any:
    """Return one argument of a call."""
    return args[at] if isinstance(at, int) else options[at]


def with_arguments(
    args: Sequence[Any], options: Mapping[str, Any], changed: Mapping[Argument, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with others in the place of some."""
    placed = tuple(changed.get(at, x) for at, x in enumerate(args))
    return placed, {**options, **{name: x for name, x in changed.items() if isinstance(name, str)}}


def texts_of(state: Tensor) -> tuple[int, int]:
    """The numbers B and L of states ``[B, L, …]``, or ``[L, d]``."""
    return (state.shape[0], state.shape[1]) if state.ndim > 2 else (1, len(state))


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """The weights of all experts in the calls of one module."""

    layer: nn.Module
    """The layer of the experts, which is given states ``[B, L, d]``."""
    arguments: ExpertArguments
    experts: int
    """E"""

    def weights(self, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
        """The weights ``[N, E]`` of a call: 0 for an expert that is not taken."""
        choice, weights = self._given(args, options)
        if choice.ndim == _ONE_HOT:
            return (choice * weights[..., None]).sum(1)
        return weights.new_zeros(len(weights), self.experts).scatter_add(1, choice.long(), weights)

    def changed(
        self, args: Sequence[Any], options: Mapping[str, Any], before: Tensor, after: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with other weights ``[N, E]``.

        A token whose weights stay has the same experts as before, so that another token's edit computes none for it.
        They are those of ``after`` in autograd's graph.
        """
        choice, weights = self._given(args, options)
        if after.requires_grad:
            own = (choice * after[:, None]).sum(-1) if choice.ndim == _ONE_HOT else after.gather(1, choice.long())
            weights = weights.detach() + (own - own.detach())
        touched = (after != before).any(-1)
        taken = after != 0
        most = max(weights.shape[1], int(taken[touched].sum(-1).max()) if bool(touched.any()) else 0)
        experts = (~taken).to(torch.int8).argsort(dim=-1, stable=True)[:, :most]  # those that are taken come first
        chosen = after.gather(1, experts)
        more = most - weights.shape[1]
        experts = torch.where(chosen != 0, experts, experts[:, :1])
        kept_weights = torch.cat([weights, weights.new_zeros(len(weights), more)], 1)
        kept = torch.cat([choice, choice[:, :1].expand(-1, more, *choice.shape[2:])], 1)
        rows = touched[:, None]
        if choice.ndim == _ONE_HOT:
            rows, experts = rows[..., None], nn.functional.one_hot(experts, self.experts)
        at = self.arguments
        return with_arguments(args, options, {
            at.choice: torch.where(rows, experts.to(choice.dtype), kept),
            at.weights: torch.where(touched[:, None], chosen.to(weights.dtype), kept_weights),
        })  # fmt: skip

    def _given(self, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return argument(args, options, self.arguments.choice), argument(args, options, self.arguments.weights)
