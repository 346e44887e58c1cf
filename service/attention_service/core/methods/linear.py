"""Linear attention and its rules of writing to the state: sums, gates, and the delta rule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

from attention_contract import spec
from attention_service.core.kernels.extent import Extent
from attention_service.core.masks.visibility import real_keys
from attention_service.core.methods.approximation import Approximation, no_order, nothing_between, reach_in
from attention_service.core.methods.base import METHODS, MethodCost, Refusal
from attention_service.core.methods.features import Elementwise
from attention_service.core.methods.recurrence import Features, StateRule, WrittenTokens
from attention_service.core.methods.recurrence_cost import FeatureCost, running_cost
from attention_service.core.problem import Learned, Problem, RunningInputs, Widths
from attention_service.core.tensors import constant, one_for_each_query_head, product

_FEATURE_FLOPS = {"elu": 3, "relu": 1, "identity": 0, "l2": 3}
"""exp, subtract, compare and add as one of 3 an element, half of which take each branch; square, sum and multiply."""


@METHODS.register(
    spec.Linear,
    formula="o_i = φ(q_i) S_i / φ(q_i)·z_i, S_i = Σ_{j ≤ i} φ(k_j) v_jᵀ, z_i = Σ_{j ≤ i} φ(k_j); gated and delta rules",
    gradient="rule sum: ∂S_j = ∂S_{j+1} + φ(q_j) ∂o_jᵀ, ∂φ(q_j) = S_j ∂o_j, ∂φ(k_j) = ∂S_j v_j, ∂v_j = ∂S_jᵀ φ(k_j)",
    cost="O(n·d²)",
    source="Katharopoulos et al. 2020, eqs. 4-12; delta: Schlag et al. 2021, eq. 24; gated delta: Yang et al. 2025",
)
@dataclass(frozen=True)
class Linear(Approximation):
    """A state of fixed size that every key updates and every query reads."""

    options: spec.Linear

    @property
    def gated(self) -> bool:
        """True if the spec has a gate."""
        return self.options.rule in {"gated", "gated_delta"}

    @property
    def delta(self) -> bool:
        """True if the spec has a β."""
        return self.options.rule in {"delta", "gated_delta"}

    def taps(self, spec: spec.AttentionSpec) -> tuple[str, ...]:
        """Return the taps; the weights are implicit."""
        return "q", "k", "v", "weights", "context"

    def learned(self, widths: Widths) -> dict[str, Learned]:
        """Return the learned tensors of a module's gate and β, one per key/value head; raw requests send gate and β."""
        if widths.d_model is None:
            return {}
        names = [name for name, wanted in (("gate", self.gated), ("beta", self.delta)) if wanted]
        shapes = (("weight", (widths.kv_heads, widths.d_model), None), ("bias", (widths.kv_heads,), 0.0))
        return {
            f"method.{name}.{part}": Learned(shape, fill, heads=None) for name in names for part, shape, fill in shapes
        }

    def refuses(self, spec_: spec.AttentionSpec) -> Iterator[Refusal]:
        """Yield masks other than causal, and every option of scores, which this method does not have."""
        features = f"φ(q)·φ(k) with features {self.options.map} is its score"
        if spec_.score != spec.ScaledDot():
            yield "spec.score", f"{features}; leave score out, or take method exact"
        if spec_.softcap is not None:
            yield "spec.softcap", f"{features}; leave softcap out, or take method exact"
        if spec_.normalizer != spec.Softmax():
            yield "spec.normalizer", f"its sum is divided by or not (normalize); leave {_name(spec_)} out"
        yield from no_order(spec_)
        yield from nothing_between(spec_)
        if self.options.rule != "sum" and not spec_.masks:
            yield "spec.masks", f"rule {self.options.rule} depends on the order of the keys; give the mask causal"

    def implied(self, problem: Problem, rows: Sequence[int]) -> Tensor | None:
        """Return φ(q)·φ(k) over its sum, for a normalized rule ``sum`` without an initial state."""
        if self.options.rule != "sum" or not self.options.normalized or problem.recurrent.state is not None:
            return None
        return implied_by(self._features(), problem, rows)

    def weights(self, problem: Problem) -> Tensor:
        """Compute M by the recurrence itself, whose context is M for the values of a unit matrix.

        For the gated delta rule with Γ_ij = Π_{j < t ≤ i} γ_t that is
        M = tril(QKᵀ ⊙ Γ)·(I + tril(diag(β)·(KKᵀ ⊙ Γ), −1))⁻¹·diag(β). Source: Yang et al. 2025, section 3.3.
        """
        given, units = problem.recurrent, unit_values(problem.k)
        state = given.state
        if state is not None:  # it counts in the normalizer alone
            state = state.new_zeros(()).expand(*state.shape[:3], units.shape[3])
        given = replace(given, state=state, wanted=False)
        return self._context(replace(problem, v=units, recurrent=given))["context"]

    def _from_weights(self, problem: Problem, weights: Tensor) -> dict[str, Tensor]:
        given = problem.recurrent
        results = {"context": product(weights, problem.v.to(weights.dtype)).to(problem.v.dtype)}
        if given.wanted:
            results = self._context(problem) | results
        if given.state is not None:
            rest = replace(problem, v=torch.zeros_like(problem.v), recurrent=replace(given, wanted=False))
            results["context"] = results["context"] + self._context(rest)["context"]
        return results

    def cost(self, extent: Extent) -> MethodCost:
        """Return the cost by ``running_cost``."""
        per = _FEATURE_FLOPS[self.options.map]
        features = FeatureCost(extent.head_dim, per, per + (self.options.scale is not None))
        counted = running_cost(extent, features, normalize=self.options.normalized, gated=self.gated, delta=self.delta)
        learned = (self.gated + self.delta) * extent.batch * extent.new_keys * extent.kv_heads * (extent.d_model or 0)
        return replace(counted, projections=2 * learned)

    def carried(self, *, module: bool) -> frozenset[str]:
        """Return the state, and gate and β of raw attention."""
        sent = {"initial_state": True, "initial_normalizer": self.options.normalized}
        sent |= {"gate": self.gated and not module, "beta": self.delta and not module, "return_state": True}
        return frozenset(name for name, wanted in sent.items() if wanted)

    def orders(self) -> tuple[str, str]:
        """Return orders for a state of d features by d values."""
        return "n·d²", "n·d"

    def _features(self) -> Elementwise:
        return Elementwise(self.options.map, 1.0 if self.options.scale is None else self.options.scale)

    def _context(self, problem: Problem) -> dict[str, Tensor]:
        given = problem.recurrent
        real = real_keys(problem)
        kept = None if real is None else real[:, None, :, None]  # [B, 1, K, 1]
        log_gate, beta = (
            x if x is None or kept is None else x.masked_fill(~kept, 0) for x in (given.log_gate, given.beta)
        )
        if (log_gate is not None) != self.gated or (beta is not None) != self.delta:
            raise ValueError(f"rule {self.options.rule} was given other tensors than it reads")
        state = given.state
        if state is not None and self.options.normalized:
            if given.normalizer is None:
                raise ValueError("a normalized state comes with its normalizer")
            state = torch.cat([state, given.normalizer[..., None]], 3)
        running = StateRule(self._features(), self.options.normalized)
        tokens = WrittenTokens(problem.k, problem.v, kept, log_gate, beta)
        context, final = running.attend(problem.q, tokens, reach_in(problem), state, want_state=given.wanted)
        results = {"context": context}
        if given.wanted:
            width = problem.v.shape[3]
            if final is None:  # there was no key
                final = context.new_zeros(*problem.k.shape[:2], problem.k.shape[3], width + self.options.normalized)
            results["final_state"] = final[..., :width]
            if self.options.normalized:
                results["final_normalizer"] = final[..., width]
        return results


def rates_of(tokens: Tensor, learned: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the logits of a module's gate (``name`` gate) or β (beta): ``[B, L, d_model]`` to ``[B, Hkv, L, 1]``."""
    made = linear(tokens, learned[f"method.{name}.weight"], learned[f"method.{name}.bias"])
    return made.transpose(1, 2)[..., None].to(torch.promote_types(made.dtype, torch.float32))


def running(
    spec_: spec.AttentionSpec,
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    keys: Tensor,
    *,
    wanted: bool,
) -> RunningInputs:
    """Return the inputs of the running state; a module's gate and β are computed from the tokens of its keys.

    keys ``[B, L, d_model]`` of a module.
    """
    method = METHODS.of(spec_.method)
    if not isinstance(method, Linear):
        return RunningInputs()
    log_gate = beta = None
    if method.gated:
        log_gate = (
            logsigmoid(rates_of(keys, parameters, "gate"))
            if "method.gate.weight" in parameters
            else _logarithm(_accumulated(tensors["gate"]))
        )
    if method.delta:
        beta = (
            rates_of(keys, parameters, "beta").sigmoid()
            if "method.beta.weight" in parameters
            else _accumulated(tensors["beta"])
        )
    if log_gate is not None and log_gate.ndim == 3:
        log_gate = log_gate[..., None]
    if beta is not None and beta.ndim == 3:
        beta = beta[..., None]
    return RunningInputs(log_gate, beta, tensors.get("initial_state"), tensors.get("initial_normalizer"), wanted)


def _logarithm(gate: Tensor) -> Tensor:
    """Logarithm of a gate; a value that underflowed counts as the smallest positive number."""
    return gate.clamp(min=torch.finfo(gate.dtype).tiny).log()


def _accumulated(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def implied_by(features: Features, problem: Problem, rows: Sequence[int]) -> Tensor:
    """Return the weights that features imply: φ(q_i)·φ(k_j) / Σ over the keys that query i sees, all real."""
    dtype = torch.promote_types(problem.q.dtype, torch.float32)
    index = constant(rows, problem.q.device, torch.int64)  # of none it would be floats
    real = real_keys(problem)
    kept = None if real is None else real[:, None, :, None]
    q = features.queries(problem.q.index_select(2, index).to(dtype))
    k, _ = features.keys(problem.k.to(dtype), kept)
    weights = q @ one_for_each_query_head(k, q.shape[1]).mT
    ahead = torch.arange(problem.k.shape[2], device=index.device) > (index + reach_in(problem))[:, None]
    weights = weights.masked_fill(ahead, 0)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


def unit_values(k: Tensor) -> Tensor:
    """Values ``[B, Hkv, K, K]`` that are 1 at the key of their column, in float32 or wider: of one matrix's memory."""
    batch, heads, keys, _ = k.shape
    unit = torch.eye(keys, device=k.device, dtype=torch.promote_types(k.dtype, torch.float32))
    return unit.expand(batch, heads, keys, keys)


def recurrent_context(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, beta: Tensor | None) -> Tensor:
    """Compute the context ``[B, H, L, V]`` of a causal recurrence over q and k as they are, from an empty state.

    log_gate ``[B, Hkv, L, 1 or D]``, beta ``[B, Hkv, L, 1]``; see ``recurrence.Tokens``.
    """
    tokens = WrittenTokens(k, v, None, log_gate, beta)
    return StateRule(Elementwise("identity", 1.0), normalize=False).attend(q, tokens, 0)[0]


def recurrent_weights(q: Tensor, k: Tensor, log_gate: Tensor, beta: Tensor | None) -> Tensor:
    """Compute the implicit weights ``[B, H, L, L]`` of ``recurrent_context``."""
    return recurrent_context(q, k, unit_values(k), log_gate, beta)


def _name(spec_: spec.AttentionSpec) -> str:
    return f"normalizer {spec_.normalizer.name} with its options"
