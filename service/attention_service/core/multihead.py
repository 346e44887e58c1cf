"""Multi-head attention around the attention itself: projections in, heads split, heads merged, projection out.

Source: Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from attention_contract.schemas.modules import Biases, ModuleConfig

Parameters = Mapping[str, Tensor]


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
        )


def parameter_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by name, in the order of the computation."""
    weights = {
        "q_proj": (sizes.heads * sizes.head_dim, sizes.d_model),
        "k_proj": (sizes.kv_heads * sizes.head_dim, sizes.key_width),
        "v_proj": (sizes.kv_heads * sizes.value_dim, sizes.value_width),
        "o_proj": (sizes.d_model, sizes.heads * sizes.value_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        shapes[f"{name}.weight"] = shape
        if getattr(sizes.biases, name):
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def initial_parameters(sizes: Sizes, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Xavier-uniform weights (Glorot & Bengio 2010, eq. 16) and zero biases, the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(sizes).items():
        if len(shape) == 1:
            parameters[name] = torch.zeros(shape, dtype=dtype)
        else:
            bound = (6 / (shape[0] + shape[1])) ** 0.5
            # Drawn in float32 whatever the dtype, so that a module in bfloat16 is the float32 one, rounded.
            uniform = torch.rand(shape, generator=generator)
            parameters[name] = ((2 * uniform - 1) * bound).to(dtype)
    return parameters


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[B, L, heads·W]`` to ``[B, heads, L, W]``."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``[B, heads, L, W]`` to ``[B, L, heads·W]``."""
    return x.transpose(1, 2).flatten(2)


def project(
    parameters: Parameters, sizes: Sizes, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by head.

    query ``[B, Q, d_model]``, key ``[B, K, key_width]``, value ``[B, K, value_width]`` to
    q ``[B, H, Q, D]``, k ``[B, Hkv, K, D]``, v ``[B, Hkv, K, V]``.
    """
    q = linear(query, parameters["q_proj.weight"], parameters.get("q_proj.bias"))
    k = linear(key, parameters["k_proj.weight"], parameters.get("k_proj.bias"))
    v = linear(value, parameters["v_proj.weight"], parameters.get("v_proj.bias"))
    return split_heads(q, sizes.heads), split_heads(k, sizes.kv_heads), split_heads(v, sizes.kv_heads)


def project_out(parameters: Parameters, context: Tensor) -> Tensor:
    """Context ``[B, H, Q, V]`` to the output ``[B, Q, d_model]``."""
    return linear(merge_heads(context), parameters["o_proj.weight"], parameters.get("o_proj.bias"))
