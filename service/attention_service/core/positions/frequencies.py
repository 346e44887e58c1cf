"""Rotation frequencies of the pairs of a head's dimensions, scaled for sequences longer than those of the training.

All numbers are float64, so that place times frequency stays an exact angle for large places.
"""

from math import ceil, floor, log, pi, sqrt

import torch
from torch import Tensor

from attention_contract import positions as options
from attention_service.core.tensors import constant


def frequencies(rope: options.Rope, dim: int, reach: Tensor) -> tuple[Tensor, float]:
    """Return the angle per place of each pair, ``[dim/2]`` or ``[1 or B, 1, dim/2]``, and a factor for rotated vectors.

    reach ``[1 or B, 1]`` is the number of places of each sequence. Of any scaling that does not depend on it
    (``outgrown_length``) it tells the device alone.
    """
    pairs = dim // 2  # θ^(−2c/dim), by one operation
    plain = torch.logspace(0, 2 / dim - 1 if pairs else 0, pairs, rope.theta, dtype=torch.float64, device=reach.device)
    match rope.scaling:
        case None:
            return plain, 1.0
        case options.LinearScaling(factor=factor):
            return plain / factor, 1.0
        case options.NtkScaling():
            return _ntk(rope.scaling, rope.theta, dim, reach), 1.0
        case options.Llama3Scaling():
            return _llama3(rope.scaling, plain), 1.0
        case options.YarnScaling(factor=factor, attention_factor=given):
            return _yarn(rope.scaling, rope.theta, plain), 0.1 * log(factor) + 1 if given is None else given
        case options.LongRopeScaling(factor=factor, original_max_position_embeddings=length, attention_factor=given):
            return _long(rope.scaling, plain, reach), sqrt(1 + log(factor) / log(length)) if given is None else given


def outgrown_length(position: object) -> int | None:
    """Return the length beyond which a sequence's angles follow its length; None where they never do."""
    scaling = position.scaling if isinstance(position, options.Rope) else None
    if isinstance(scaling, options.NtkScaling | options.LongRopeScaling):
        return scaling.original_max_position_embeddings
    return None


def exponents(dim: int, device: torch.device) -> Tensor:
    """Return 2c/dim for each pair c. Source: Su et al. 2021, eq. 15."""
    return torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim


def _ntk(scaling: options.NtkScaling, theta: float, dim: int, reach: Tensor) -> Tensor:
    """Scale theta. Source: Peng et al. 2023, definition 1; dynamic: section 3.3."""
    length = scaling.original_max_position_embeddings
    if length is None:
        stretch = torch.full((1, 1), scaling.factor, dtype=torch.float64, device=reach.device)
    else:
        stretch = scaling.factor * reach.clamp(min=length) / length - (scaling.factor - 1)
    base = theta * stretch.double() ** (dim / (dim - 2))  # [1 or B, 1]
    return (base ** -exponents(dim, reach.device))[:, None]


def _llama3(scaling: options.Llama3Scaling, plain: Tensor) -> Tensor:
    """Scale by the rotations of a pair within the original length, as Llama 3.1."""
    turns = plain * (scaling.original_max_position_embeddings / (2 * pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (stays + (1 - stays) / scaling.factor)


def _yarn(scaling: options.YarnScaling, theta: float, plain: Tensor) -> Tensor:
    """Interpolate by wavelength. Source: Peng et al. 2023, section 3.2; bounds as in the authors' code."""
    pairs = len(plain)

    def pair_that_turns(times: float) -> float:
        return pairs * log(scaling.original_max_position_embeddings / (times * 2 * pi)) / log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # a step rather than 0/0
    divided = ((torch.arange(pairs, dtype=torch.float64, device=plain.device) - first) / (last - first)).clamp(0, 1)
    return plain * (divided / scaling.factor + 1 - divided)


def _long(scaling: options.LongRopeScaling, plain: Tensor, reach: Tensor) -> Tensor:
    """Choose the long factors beyond the original length. Source: Ding et al. 2024, section 3."""
    short, long = (
        plain / constant(factors, plain.device, plain.dtype) for factors in (scaling.short_factor, scaling.long_factor)
    )
    return torch.where(reach > scaling.original_max_position_embeddings, long, short)[:, None]  # [1 or B, 1, dim/2]
