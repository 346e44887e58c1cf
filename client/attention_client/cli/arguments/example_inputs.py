"""Random inputs for commands that can do without files: a few tokens, and numbers with one digit to read along."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from attention_client.cli.arguments.model_options import Fields
from attention_client.cli.invocation import send
from attention_client.client import Client
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.modules import ModuleConfig

MAX_DRAWN = 64
"""Learned tensors and inputs that a spec may need beside query, key and value."""
Draw = Callable[[tuple[int, ...]], NDArray[Any]]
"""Draw a tensor of a shape."""


class RandomInputs(BaseModel):
    """The sizes of random inputs."""

    keys: int | None = Field(default=None, ge=1)
    """Keys of one sequence; default: as many as queries."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Raw attention: key/value heads; default: as many as heads."""
    head_dim: int = Field(default=64, ge=1)
    """Raw attention: width of a head."""
    seed: int = 0
    """Seed of the random inputs."""


def for_module(config: ModuleConfig, draw: Draw, batch: int, queries: int, keys: int | None) -> Fields:
    """Draw a query ``[batch, queries, d_model]`` for a module, and key and value where they differ from it."""
    inputs: Fields = {"query": draw((batch, queries, config.d_model))}
    widths = config.key_width or config.d_model, config.value_width or config.d_model
    if keys is not None or widths != (config.d_model, config.d_model):
        key, value = ((batch, keys or queries, width) for width in widths)
        inputs["key"] = draw(key)
        inputs["value"] = inputs["key"] if key == value else draw(value)
    return inputs


def for_raw(
    draw: Draw, shape: tuple[int, int, int, int], keys: int | None = None, kv_heads: int | None = None
) -> Fields:
    """Draw q ``[B, H, Lq, D]`` of this shape, and k and v ``[B, Hkv, Lk, D]``."""
    batch, heads, queries, width = shape
    others = (batch, kv_heads or heads, keys or queries, width)
    return {"query": draw(shape), "key": draw(others), "value": draw(others)}


def one_digit(rng: np.random.Generator) -> Draw:
    """Return a function that draws numbers with one digit."""
    return lambda shape: rng.normal(size=shape).round(1).astype(np.float32)


def with_learned(client: Client, fields: Fields, rng: np.random.Generator) -> Fields:
    """Draw whatever else the spec of a raw attention needs: the service's refusals say names and shapes."""
    for _ in range(MAX_DRAWN):
        try:
            send(client, "forward", None, fields)
        except InvalidRequest as fault:
            group, _, name = (fault.param or "").partition(".")
            if group == "parameters" and name not in fields.get(group, {}) and "expected" in fault.facts:
                drawn = one_digit(rng)(tuple(fault.facts["expected"]))
                fields = fields | {group: {**fields.get(group, {}), name: drawn}}
            elif group in {"gate", "beta"} and group not in fields:
                shape = np.shape(fields["key"])[:-1]  # [B, Hkv, Lk]
                fields = fields | {group: (0.5 + rng.random(shape) / 2).round(1).astype(np.float32)}
            else:
                raise
        else:
            return fields
    return fields
