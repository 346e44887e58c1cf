"""Plain requests with random numbers, of given sizes."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from numpy.random import Generator

from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import Array
from attention_service.core.multihead import Sizes, learned_of, parameter_shapes
from attention_service.core.problem import Widths
from attention_service.core.tensors import TORCH_DTYPES, to_numpy, to_torch
from attention_service.modules.resident import Module

_POOL = np.random.default_rng(0).standard_normal(2**16, np.float32)
"""Random numbers, reused: the time does not depend on their values, unless they are zeros or not finite."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of one request."""

    batch: int
    queries: int
    new_keys: int
    past: int

    @property
    def keys(self) -> int:
        """All of them."""
        return self.past + self.new_keys


def module_inputs(rng: Generator, lengths: Lengths, sizes: Sizes, dtype: str) -> dict[str, Array]:
    """Draw the tensors of a request to a module, without those that default to others."""
    inputs = {"query": random_tensor(rng, (lengths.batch, lengths.queries, sizes.d_model), dtype)}
    if lengths.new_keys != lengths.queries or sizes.key_width != sizes.d_model:
        inputs["key"] = random_tensor(rng, (lengths.batch, lengths.new_keys, sizes.key_width), dtype)
    if sizes.value_width != sizes.key_width:
        inputs["value"] = random_tensor(rng, (lengths.batch, lengths.new_keys, sizes.value_width), dtype)
    return inputs | _past(rng, lengths, sizes.widths, dtype)


def raw_inputs(rng: Generator, lengths: Lengths, widths: Widths, dtype: str) -> dict[str, Array]:
    """Draw the tensors of a raw request, by head."""
    inputs = {
        "query": random_tensor(rng, (lengths.batch, widths.heads, lengths.queries, widths.head_dim), dtype),
        "key": random_tensor(rng, (lengths.batch, widths.kv_heads, lengths.new_keys, widths.key_dim), dtype),
        "value": random_tensor(rng, (lengths.batch, widths.kv_heads, lengths.new_keys, widths.value_dim), dtype),
    }
    return inputs | _past(rng, lengths, widths, dtype)


def learned_inputs(rng: Generator, spec: AttentionSpec, widths: Widths, dtype: str) -> dict[str, Array]:
    """Draw the learned tensors of a spec."""
    return {
        name: random_tensor(rng, tensor.shape, dtype, scale=0.02, shift=1.0)
        for name, tensor in learned_of(spec, widths).items()
    }


def _past(rng: Generator, lengths: Lengths, widths: Widths, dtype: str) -> dict[str, Array]:
    if not lengths.past:
        return {}
    return {
        "past_key": random_tensor(rng, (lengths.batch, widths.kv_heads, lengths.past, widths.key_dim), dtype),
        "past_value": random_tensor(rng, (lengths.batch, widths.kv_heads, lengths.past, widths.value_dim), dtype),
    }


def random_module(rng: Generator, config: ModuleConfig) -> Module:
    """Return a module with random parameters, whose version is a function of its config."""
    shapes = parameter_shapes(Sizes.of(config))
    dtype = config.dtype or "float32"
    parameters = {name: to_torch(random_tensor(rng, shape, dtype, scale=0.02)) for name, shape in shapes.items()}
    version = sha256(config.model_dump_json().encode()).hexdigest()[:32]  # by which requests to it are known again
    return Module.of("drawn", config, parameters, version=version)


def random_tensor(
    rng: Generator, shape: tuple[int, ...], dtype: str, *, scale: float = 1.0, shift: float = 0.0
) -> Array:
    """Draw a tensor of ``scale`` times normal numbers, plus ``shift``."""
    pool = _POOL[int(rng.integers(len(_POOL) // 2)) :] * np.float32(scale) + np.float32(shift)
    numbers = np.resize(pool, shape)
    return to_numpy(torch.from_numpy(numbers).to(TORCH_DTYPES[dtype]))
