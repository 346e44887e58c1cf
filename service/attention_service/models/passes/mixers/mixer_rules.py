"""Layers that mix tokens by a running state, in the code of transformers: the arguments of each rule as a recurrence.

Notation as in ``core.methods.recurrence``; N are the numbers of a state for each value.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu, softplus

from attention_contract.schemas.models import LayerKind
from attention_service.core.methods.linear import recurrent_context, recurrent_weights
from attention_service.core.tensors import wide

_EPSILON: Final = 1e-6
"""The ε of the normalization of queries and keys, in every rule that has it."""


@dataclass(frozen=True, eq=False)
class Formula:
    """A mixing whose weights have a formula over pairs of tokens."""

    v: Tensor
    """``[B, H, L, V]``"""
    state_width: int
    """The numbers of the running state for each value."""
    formula: Callable[[], Tensor]

    def weights(self) -> Tensor:
        """Compute M ``[B, H, L, L]``, the lower triangular matrix with o = M·v, in float32 or wider."""
        return self.formula()


@dataclass(frozen=True, eq=False)
class Recurrence:
    """S_i = γ_i S_{i−1} + k_i (β_i (v_i − S_{i−1}ᵀ k_i))ᵀ and o_i = S_iᵀ q_i + d v_i, over one text from its start."""

    q: Tensor
    """``[B, H, L, N]``"""
    k: Tensor
    """``[B, H, L, N]``"""
    v: Tensor
    """``[B, H, L, V]``"""
    log_gate: Tensor
    """ln γ ``[B, H, L, 1 or N]``"""
    beta: Tensor | None = None
    """``[B, H, L, 1]``; None for S_i = γ_i S_{i−1} + k_i v_iᵀ."""
    skip: Tensor | None = None
    """d ``[H]``; None for 0."""

    @property
    def state_width(self) -> int:
        """N."""
        return self.k.shape[3]

    def weights(self) -> Tensor:
        """Compute M ``[B, H, L, L]``, the lower triangular matrix with o = M·v, in float32 or wider."""
        weights = recurrent_weights(self.q, self.k, self.log_gate, self.beta)
        return weights if self.skip is None else weights + torch.diag_embed(self._skipped.expand(weights.shape[:3]))

    def context(self) -> Tensor:
        """Compute o ``[B, H, L, V]``."""
        context = recurrent_context(self.q, self.k, self.v, self.log_gate, self.beta)
        return context if self.skip is None else context + self._skipped[..., None] * self.v

    @property
    def _skipped(self) -> Tensor:
        return torch.empty(0) if self.skip is None else self.skip[None, :, None]


Mixing = Formula | Recurrence
"""One mixing of tokens that is linear in its values, over one text from its start."""


class MixerRule(NamedTuple):
    """One rule: a function, or a module, that the forward of a layer calls."""

    kind: LayerKind
    values: str
    """The argument with the values."""
    read: Callable[[Mapping[str, Any]], Mixing]
    """Reads the arguments by their names, and the module that runs as ``module``."""
    order: tuple[int, ...] = (0, 2, 1, 3)
    """The dimensions of values and of the result in the order ``[B, H, L, V]``, or ``[B, H, L]`` of single numbers."""
    method: str | None = None
    """The method that computes it, of a module; None for a function."""
    gate: str | None = None
    """The argument by whose silu the result is multiplied, behind the mixed output."""
    returns_state: bool = False
    """True if the result is a pair with the last state, whether that is wanted or not."""
    by_channel: bool = False
    """True if each channel has weights of its own, so that heads are channels."""

    def by_head(self, x: Tensor) -> Tensor:
        """Values, or a result, as ``[B, H, L, V]``."""
        return x.permute(self.order)[..., None] if len(self.order) == 3 else x.permute(self.order)

    def as_called(self, x: Tensor) -> Tensor:
        """The same of ``[B, H, L, V]`` as the code has them."""
        return (x[..., 0] if len(self.order) == 3 else x).permute(self.order)


def _by_head(x: Tensor) -> Tensor:
    """``[B, L, H, …]`` to ``[B, H, L, …]``."""
    return wide(x).transpose(1, 2)


def _delta(arguments: Mapping[str, Any]) -> Recurrence:
    """Read the gated delta rule, and that with a gate for each feature (Kimi delta attention)."""
    q, k, v = (_by_head(arguments[name]) for name in ("query", "key", "value"))
    if arguments.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
    groups = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    gate = _by_head(arguments["g"])
    return Recurrence(
        q * q.shape[-1] ** -0.5, k, v, gate[..., None] if gate.ndim == 3 else gate,
        _by_head(arguments["beta"])[..., None],
    )  # fmt: skip


def _step(arguments: Mapping[str, Any], bias: str, shape: tuple[int, ...], flag: str) -> Tensor:
    """The step size of a state space; ``shape``: that of its bias."""
    step: Tensor = arguments["dt"]
    if (added := arguments.get(bias)) is not None:
        step = step + added.to(step.dtype).view(shape)
    step = softplus(step) if arguments.get(flag) else step
    return wide(step.clamp(*arguments["dt_limit"]) if "dt_limit" in arguments else step)


def _mamba2(arguments: Mapping[str, Any]) -> Recurrence:
    """Read a selective state space with one decay a head. Source: Dao and Gu 2024, section 5."""
    v, step = _by_head(arguments["hidden_states"]), _step(arguments, "dt_bias", (-1,), "dt_softplus")
    step = step.transpose(1, 2)[..., None]  # [B, H, L, 1]
    q, k = (_by_head(arguments[name]) for name in ("C", "B"))
    groups = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(groups, 1) for x in (q, k))
    decay = arguments["A"].to(v.dtype).view(-1, 1, 1) * step.to(v.dtype)
    skip = arguments.get("D")
    return Recurrence(q, k * step.to(v.dtype), v, decay, None, None if skip is None else skip.to(v.dtype))


def _mamba(arguments: Mapping[str, Any]) -> Recurrence:
    """Read a selective state space with one decay a channel and state: heads are channels. Source: Gu and Dao 2023."""
    v = wide(arguments["hidden_states"])[..., None]  # [B, C, L, 1]
    step = _step(arguments, "delta_bias", (-1, 1), "delta_softplus")[..., None].to(v.dtype)
    q, k = (wide(arguments[name]).transpose(1, 2)[:, None].to(v.dtype) for name in ("C", "B"))  # [B, 1, L, N]
    skip = arguments.get("D")
    return Recurrence(
        q.expand(-1, v.shape[1], -1, -1), k * step, v, arguments["A"].to(v.dtype)[None, :, None] * step, None,
        None if skip is None else skip.to(v.dtype),
    )  # fmt: skip


def _rwkv(arguments: Mapping[str, Any]) -> Formula:
    """Read the fading average of RWKV: a softmax of keys less the decay since, by channel. Source: Peng et al. 2023."""
    k, v = (wide(arguments[name]).transpose(1, 2) for name in ("key", "value"))  # [B, C, L]
    decay, bonus = (wide(arguments[name]) for name in ("time_decay", "time_first"))

    def weights() -> Tensor:
        at = torch.arange(k.shape[2], device=k.device)
        since = (at[:, None] - at - 1).to(k.dtype)
        scores = k[:, :, None] - decay.exp()[:, None, None] * since.clamp_min(0)
        scores = scores + bonus[:, None, None] * (since < 0)
        return scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1)

    return Formula(v[..., None], 3, weights)


def _rg_lru(arguments: Mapping[str, Any]) -> Formula:
    """Read a real-gated linear recurrent unit, with one decay a channel. Source: De et al. 2024, section 2.4."""
    v = wide(arguments["hidden_states"]).transpose(1, 2)  # [B, C, L]
    reset = arguments["reset"].transpose(1, 2)  # [B, 1, L]
    return Formula(v[..., None], 1, partial(_faded, wide(arguments["recurrent_gate"]).transpose(1, 2), reset))


def _faded(gate: Tensor, reset: Tensor) -> Tensor:
    """The products of the gates ``[B, C, L]`` behind token j up to i; 0 over a reset."""
    logs, turns = gate.masked_fill(reset, 1).log().cumsum(2), reset.cumsum(2)
    fading = logs[..., None] - logs[:, :, None]
    apart = torch.ones_like(fading, dtype=torch.bool).triu(1) | (turns[..., None] != turns[:, :, None])
    gates: Tensor = fading.masked_fill(apart, -torch.inf).exp()
    return gates


def _mlstm(arguments: Mapping[str, Any]) -> Formula:
    """Read an LSTM with a matrix memory. Source: Beck et al. 2024, section 2.3; its ε is that of the code."""
    epsilon = arguments["module"].config.eps
    q, k, v, begin, forget = (wide(arguments[name]) for name in ("query", "key", "value", "igate", "fgate"))

    def weights() -> Tensor:
        faded = logsigmoid(forget).cumsum(2)  # [B, H, L]
        logs = faded[..., None] - faded[:, :, None] + begin[:, :, None]
        logs = logs.masked_fill(torch.ones_like(logs, dtype=torch.bool).triu(1), -torch.inf)
        largest = torch.maximum(logs.amax(3), faded)  # that of an empty state is 0
        pairs = q @ k.mT * q.shape[3] ** -0.5 * (logs - largest[..., None]).exp()
        total: Tensor = torch.maximum(pairs.sum(3).abs(), (-largest).exp()) + epsilon
        shares: Tensor = pairs / total[..., None]
        return shares

    return Formula(v, k.shape[3] + 1, weights)


RULES: Final[Mapping[str, MixerRule]] = {
    "torch_chunk_gated_delta_rule": MixerRule("linear", "value", _delta, returns_state=True),
    "chunk_kimi_delta_attention": MixerRule("linear", "value", _delta, returns_state=True),
    "mamba2_chunk_scan": MixerRule("state_space", "hidden_states", _mamba2),
    "mamba_selective_scan": MixerRule("state_space", "hidden_states", _mamba, (0, 1, 2), gate="z", by_channel=True),
    "rwkv_linear_attention": MixerRule("linear", "value", _rwkv, (0, 2, 1), returns_state=True, by_channel=True),
    "rg_lru": MixerRule(
        "state_space", "hidden_states", _rg_lru, (0, 2, 1), "_rnn_scan", returns_state=True, by_channel=True
    ),
    "mlstm_backend": MixerRule("linear", "value", _mlstm, (0, 1, 2, 3), "forward", returns_state=True),
}
"""The rules by the name of their function in a modeling file, or of a module inside the layer's."""


def rule_name(module: nn.Module) -> str | None:
    """The rule that the forward of a module calls once; None for none of them."""
    if getattr(module, "n_mamba_heads", 1) > 1:  # it calls the rule for each of them
        return None
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = (name for name in getattr(code, "co_names", ()) if name in RULES)
    return next((name for name in names if RULES[name].method is None or hasattr(module, name)), None)


class Place(NamedTuple):
    """The names among which the function of a rule stands."""

    space: dict[str, Any]
    name: str
    function: Callable[..., Any]


def place_of(module: nn.Module, name: str) -> Place:
    """The function that a module calls by the name of a rule."""
    method = RULES[name].method
    if method is None:
        space = inspect.unwrap(type(module).forward).__globals__
        return Place(space, name, space[name])
    inner = getattr(module, name)
    return Place(vars(inner), method, getattr(inner, method))


def is_lightning(module: nn.Module) -> bool:
    """True for a layer of lightning attention, which calls no function of its own."""
    return type(module).__name__.endswith("LightningAttention") and hasattr(module, "slope_rate")


def lightning(module: Any, projected: Tensor, attention_mask: Tensor | None) -> Recurrence:
    """Read lightning attention from its projection ``[B, L, 3·H·D]``. Source: Qin et al. 2024, section 2."""
    states = module.act_fn(projected)
    hide = inspect.unwrap(type(module).forward).__globals__["apply_mask_to_padding_states"]
    states = wide(hide(states, attention_mask))
    by_head = states.reshape(*states.shape[:2], module.num_attention_heads, 3 * module.head_dim).transpose(1, 2)
    q, k, v = torch.split(by_head, module.head_dim, 3)
    decay = -module.slope_rate.to(q.dtype).expand(len(q), -1, q.shape[2], 1)
    return Recurrence(q, k, v, decay)


def gated_by(x: Tensor, gate: Tensor | None) -> Tensor:
    """A mixed output times the silu of a gate."""
    return x if gate is None else x * silu(gate)


def with_values(recurrence: Recurrence, v: Tensor) -> Recurrence:
    """The same recurrence of other values."""
    return replace(recurrence, v=v)
