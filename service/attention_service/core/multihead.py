"""Multi-head attention around the attention itself: projections in, heads split, heads merged, projection out.

Source: Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import linear as whole_linear

from attention_contract.positions import QKNorm
from attention_contract.schemas.modules import Biases, Latent, ModuleConfig
from attention_contract.spec import AttentionSpec
from attention_service.core.cancellation import checked, checkpoint
from attention_service.core.masks.global_projections import has_separate
from attention_service.core.methods import METHODS
from attention_service.core.problem import Learned, Problem, Widths, added_keys
from attention_service.core.scores.qk_norm import normed
from attention_service.core.slices import cuts, exceeds_a_slice, slice_flops
from attention_service.core.stages import stage_tensors
from attention_service.core.tensors import pick, side_by_side

Parameters = Mapping[str, Tensor]
Joint = tuple[Tensor, Tensor | None]
"""Weight ``[(H + Hkv)·D + Hkv·V, d_model]`` and bias of the projections of queries, keys and values as one."""


@dataclass(frozen=True)
class Sizes:
    """The widths and head counts of a module, every default filled in."""

    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    key_width: int
    value_width: int
    biases: Biases
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    """Spec of the attention. It can require learned tensors."""
    latent: Latent | None = None

    @property
    def widths(self) -> Widths:
        """Widths that determine the shapes of the spec's learned tensors."""
        return Widths(self.heads, self.kv_heads, self.head_dim, self.value_dim, self.d_model)

    @property
    def inputs(self) -> tuple[int, int, int]:
        """Input widths of query, key and value."""
        return self.d_model, self.key_width, self.value_width

    @property
    def projected(self) -> tuple[int, int, int]:
        """Widths that the projections of query, key and value read: those of the inputs, or of their latents."""
        latent = self.latent or Latent.model_construct()
        both = latent.key_value
        return latent.query or self.d_model, both or self.key_width, both or self.value_width

    @cached_property
    def learned(self) -> dict[str, Learned]:
        """The spec's learned tensors, by name."""
        return learned_of(self.spec, self.widths)

    @classmethod
    def of(cls, config: ModuleConfig) -> "Sizes":
        """The sizes that a config stands for; without a word on biases, all projections have one."""
        head_dim = config.head_dim or config.d_model // config.num_heads
        everywhere = config.bias if isinstance(config.bias, bool) else True
        return cls(
            d_model=config.d_model,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads or config.num_heads,
            head_dim=head_dim,
            value_dim=config.value_dim or head_dim,
            key_width=config.key_width or config.d_model,
            value_width=config.value_width or config.d_model,
            biases=config.bias
            if isinstance(config.bias, Biases)
            else Biases(q_proj=everywhere, k_proj=everywhere, v_proj=everywhere, o_proj=everywhere),
            spec=config.spec,
            latent=config.latent,
        )

    def config(self, dtype: str) -> ModuleConfig:
        """One that stands for these sizes."""
        fields = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "bias": self.biases, "dtype": dtype}
        same = "d_model", "head_dim", "value_dim", "key_width", "value_width", "spec", "latent"
        return ModuleConfig.model_validate(fields | {name: getattr(self, name) for name in same})


def parameter_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by name, in the order of the computation."""
    read, latent = sizes.projected, sizes.latent
    shared = 0 if latent is None else latent.shared
    weights = {
        "q_proj": (sizes.heads * sizes.head_dim, read[0]),
        "k_proj": (sizes.kv_heads * (sizes.head_dim - shared), read[1]),
        "v_proj": (sizes.kv_heads * sizes.value_dim, read[2]),
        "o_proj": (sizes.d_model, sizes.heads * sizes.value_dim),
    }
    biases = {name: getattr(sizes.biases, name) for name in weights}
    if has_separate(sizes.spec.masks):
        apart = {f"{role}_global": f"{role}_proj" for role in "qkv"}
        weights |= {name: weights[like] for name, like in apart.items()}
        biases |= {name: biases[like] for name, like in apart.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for role, rank, width in _downs(sizes):
        down = rank + (shared if role == "kv" else 0)
        shapes[f"{role}_down.weight"] = (down, width)
        if latent is not None and latent.bias:
            shapes[f"{role}_down.bias"] = (down,)
        shapes[f"{role}_down_norm.weight"] = (rank,)
    for name, shape in weights.items():
        shapes[f"{name}.weight"] = shape
        if biases[name]:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes | {name: learned.shape for name, learned in sizes.learned.items()}


def _downs(sizes: Sizes) -> list[tuple[str, int, int]]:
    """Role, width and input width of each latent."""
    if sizes.latent is None:
        return []
    latents = ("q", sizes.latent.query, sizes.d_model), ("kv", sizes.latent.key_value, sizes.key_width)
    return [(role, rank, width) for role, rank, width in latents if rank is not None]


def initial_parameters(sizes: Sizes, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Xavier-uniform weights (Glorot & Bengio 2010, eq. 16) and zero biases, the same for a seed on every device.

    What the spec learns begins as it says.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    learned = sizes.learned
    for name, shape in parameter_shapes(sizes).items():
        plain = (1.0 if name.endswith("_norm.weight") else 0.0) if len(shape) == 1 else None
        fill = learned[name].fill if name in learned else plain
        if fill is not None:
            parameters[name] = torch.full(shape, fill, dtype=dtype)
        else:
            bound = (6 / (shape[-2] + shape[-1])) ** 0.5
            # Drawn in float32 whatever the dtype, so that a module in bfloat16 is the float32 one, rounded.
            uniform = torch.rand(shape, generator=generator)
            parameters[name] = uniform.mul_(2).sub_(1).mul_(bound).to(dtype)
    return parameters


def laid_side_by_side(parameters: Parameters, sizes: Sizes) -> dict[str, Tensor]:
    """The parameters with the projections of queries, keys and values one behind the other in memory.

    As long as all three read inputs of one width; then one product with all of them (``joint_projection``) is made of
    a token where it has all three roles.
    """
    laid = dict(parameters)
    if len(set(sizes.projected)) == 1 and sizes.latent is None:
        for kind in "weight", "bias":
            names = [name for role in "qkv" if (name := f"{role}_proj.{kind}") in parameters]
            parts = [parameters[name] for name in names]
            if len(names) == len("qkv") and _joint(parts) is None:
                rows = [len(part) for part in parts]
                # Not torch.cat, which loads symbolic shapes for the tensors of a plan, which are without numbers.
                together = parts[0].new_empty((sum(rows), *parts[0].shape[1:])).split_with_sizes(rows)
                for place, part in zip(together, parts, strict=True):
                    place.copy_(part)
                laid |= zip(names, together, strict=True)
    return laid


def joint_projection(parameters: Parameters) -> Joint | None:
    """The projections of the inputs as one, without a copy.

    None where they do not lie one behind the other, or only some have a bias.
    """
    biased = [f"{role}_proj.bias" in parameters for role in "qkv"]
    weight = _joint([parameters[f"{role}_proj.weight"] for role in "qkv"])
    if weight is None or any(biased) != all(biased):
        return None
    if not any(biased):
        return weight, None
    bias = _joint([parameters[f"{role}_proj.bias"] for role in "qkv"])
    return None if bias is None else (weight, bias)


def largest_finite(parameters: Parameters) -> float:
    """The largest Σ x² of a request's inputs for which every key and value is finite; −1 if there is none.

    By |w·x + b| ≤ ‖w‖·‖x‖ + |b| (Cauchy-Schwarz), with a margin for rounding.
    """
    dtype = parameters["k_proj.weight"].dtype
    largest = torch.finfo(dtype).max / 16
    # Sums, not maxima: Python's max passes over NaN.
    # A few rows at a time: a whole weight in float64 is memory that no plan counts.
    weights = (torch.split(parameters[f"{role}_proj.weight"], 64) for role in "kv")
    rows = sum(float(torch.cat([part.double().norm(dim=1) for part in parts]).max()) for parts in weights)
    biases = [bias for role in "kv" if (bias := parameters.get(f"{role}_proj.bias")) is not None]
    shift = sum(float(bias.double().abs().max()) for bias in biases)
    if not rows + shift < largest:  # or NaN
        return -1.0
    norm = (largest - shift) / max(rows, 1.0)
    return norm**2 if norm < math.sqrt(largest) else largest


def _joint(parts: Sequence[Tensor]) -> Tensor | None:
    return side_by_side(parts, 0) if all(part.is_contiguous() for part in parts) else None


def with_added_keys(problem: Problem) -> Problem:
    """The problem with the keys and values that its spec adds after all others, learned ones before zeros.

    As ``torch.nn.MultiheadAttention`` does with ``add_bias_kv`` and ``add_zero_attn``.
    """
    extra = added_keys(problem.spec)
    if not extra:
        return problem
    k, v, apart = problem.k, problem.v, problem.global_qkv
    if apart is not None:
        apart = (apart[0], _extended(apart[1], "bias_k", problem), _extended(apart[2], "bias_v", problem))
    k, v = _extended(k, "bias_k", problem), _extended(v, "bias_v", problem)
    return replace(problem, k=k, v=v, global_qkv=apart, added_keys=extra)


def _extended(x: Tensor, bias: str, problem: Problem) -> Tensor:
    """Keys or values with those that the spec adds."""
    parts = [x]
    batch, kv_heads, _, width = x.shape
    if problem.spec.add_bias_kv:
        parts.append(problem.learned[bias].view(1, kv_heads, 1, -1).expand(batch, -1, -1, -1))
    if problem.spec.add_zero_attn:
        parts.append(x.new_zeros(batch, kv_heads, 1, width))
    return torch.cat(parts, 2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, L, heads·W]`` to ``[B, heads, L, W]``."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``[B, heads, L, W]`` to ``[B, L, heads·W]``."""
    return x.transpose(1, 2).flatten(2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·wᵀ + b, in slices of rows with a checkpoint before each if it takes long on the CPU."""
    work = 2.0 * x.numel() * weight.shape[0]
    if not exceeds_a_slice(work) or not cuts(x):
        return whole_linear(x, weight, bias)
    rows, at_once = x.numel() // x.shape[-1], max(int(slice_flops() / (2.0 * weight.numel())), 1)
    if x.is_meta:  # two slices hold as much as many
        sizes = [at_once, rows - at_once] if rows > at_once else [rows]
    else:
        sizes = [min(at_once, rows - start) for start in range(0, rows, at_once)]
    parts = x.reshape(rows, -1).split_with_sizes(sizes)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        product_rows = torch.cat([checked(whole_linear(part, weight, bias)) for part in parts])
    else:
        product_rows = x.new_empty(rows, weight.shape[0])
        through = parts[:1] if x.is_meta else parts  # one after the other
        for part, into in zip(through, product_rows.split_with_sizes(sizes), strict=False):
            checkpoint()
            into.copy_(whole_linear(part, weight, bias))
    return product_rows.view(*x.shape[:-1], weight.shape[0])


def project(
    parameters: Parameters, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor, by: str = "proj"
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head; ``by`` says by which projections, ``proj`` or ``global``.

    query ``[B, Q, d_model]``, key ``[B, K, key_width]``, value ``[B, K, value_width]`` to
    q ``[B, H, Q, D]``, k ``[B, Hkv, K, D]``, v ``[B, Hkv, K, V]``.
    """
    shared = None
    if sizes.latent is not None:
        query, key, value, shared = _latents(parameters, sizes.latent, query, key, value)
    q = linear(query, parameters[f"q_{by}.weight"], parameters.get(f"q_{by}.bias"))
    k = linear(key, parameters[f"k_{by}.weight"], parameters.get(f"k_{by}.bias"))
    v = linear(value, parameters[f"v_{by}.weight"], parameters.get(f"v_{by}.bias"))
    k = split_heads(k, sizes.kv_heads)
    if shared is not None:
        k = torch.cat([shared[:, None].expand(-1, sizes.kv_heads, -1, -1), k], -1)
    return split_heads(q, sizes.heads), k, split_heads(v, sizes.kv_heads)


def _latents(
    parameters: Parameters, latent: Latent, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The latents that stand for query, key and value, and the part ``[B, K, shared]`` of every head's keys."""
    norm, shared = QKNorm.model_construct(eps=latent.eps), None

    def down(x: Tensor, role: str, rank: int) -> tuple[Tensor, Tensor]:
        whole = linear(x, parameters[f"{role}_down.weight"], parameters.get(f"{role}_down.bias"))
        return normed(whole[..., :rank], parameters[f"{role}_down_norm.weight"], norm), whole[..., rank:]

    if latent.query is not None:
        query, _ = down(query, "q", latent.query)
    if (rank := latent.key_value) is not None:
        own = None if value is key else down(value, "kv", rank)[0]
        key, shared = down(key, "kv", rank)
        value = key if own is None else own
    return query, key, value, shared if latent.shared else None


def project_jointly(joint: Joint, sizes: Sizes, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens ``[B, L, d_model]`` to queries, keys and values in one product, for heads of one width."""
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads
    batch, length, _ = x.shape
    together = linear(x, *joint).view(batch, length, sum(heads), sizes.head_dim).transpose(1, 2)
    q, k, v = together.split_with_sizes(heads, 1)
    return q, k, v


def project_out(parameters: Parameters, context: Tensor) -> Tensor:
    """Context ``[B, H, Q, V]`` to the output ``[B, Q, d_model]``."""
    return project_merged(parameters, merge_heads(context))


def project_merged(parameters: Parameters, merged: Tensor) -> Tensor:
    """Heads side by side ``[..., H·V]`` to the output ``[..., d_model]``."""
    return linear(merged, parameters["o_proj.weight"], parameters.get("o_proj.bias"))


def project_heads(parameters: Parameters, context: Tensor, heads: Sequence[int] | None, count: int) -> Tensor:
    """The share ``[B, Q, d_model]`` that some of ``count`` heads have in the output, without bias, from their context.

    Source: Elhage et al. 2021, the output as a sum over heads.
    """
    weight = parameters["o_proj.weight"]
    if heads is not None:
        weight = pick(weight.view(len(weight), count, -1), 1, heads).flatten(1)  # [d_model, len(heads)·V]
    return linear(merge_heads(context), weight)


def learned_of(spec: AttentionSpec, widths: Widths) -> dict[str, Learned]:
    """Every learned tensor that this spec needs beside the projections, by name, in the order of the computation."""
    return stage_tensors(spec, widths) | METHODS.of(spec.method).learned(widths)
