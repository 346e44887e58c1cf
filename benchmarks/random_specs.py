"""Specs drawn at random from the registries, so that a new entry is drawn without a line here.

Only entries whose options depend on the length of the sequence, or that differ in cost by an option, are told what to
take.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator

from attention_contract.spec import AttentionSpec
from attention_service.core.kernels import KERNELS
from attention_service.core.masks import MASKS
from attention_service.core.methods import METHODS, Approximation
from attention_service.core.normalizers import NORMALIZERS
from attention_service.core.positions import POSITIONS
from attention_service.core.scores import SCORES
from benchmarks.plain_requests import Lengths

Options = dict[str, Any]

SHORTEST, LONGEST = 8, 8192
"""Tokens of a sequence."""


def between(rng: Generator, low: int, high: int) -> int:
    """A whole number whose logarithm is uniform."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def approximations() -> list[str]:
    """The methods that no kernel computes."""
    return [entry.name for entry in METHODS if isinstance(entry.make, type) and issubclass(entry.make, Approximation)]


def draw_spec(rng: Generator, kernel: str, lengths: Lengths, *, usual: bool = False) -> AttentionSpec:
    """Three in five specs are plain, or causal and no more: what most requests ask for. ``usual``: all are.

    Where the kernel is for windows, half of those that are usual have one.
    """
    method = kernel if kernel in approximations() else None
    spec: Options = {}
    plain = usual or rng.random() < 0.6
    if usual and method is None and KERNELS[kernel].make().holds == "tiles" and rng.random() < 0.5:
        spec["masks"] = [{"name": "sliding_window", "left": between(rng, 16, 1024) - 1, "right": 0}]
    elif rng.random() < 0.3:
        spec["masks"] = [{"name": "causal", "align": "bottom_right"}]
    elif method is None and not plain and rng.random() < 0.5:
        spec["masks"] = [_option(rng, MASKS, MASK_OPTIONS, lengths)]
        if rng.random() < 0.3:
            spec["masks"].append({"name": "causal"})
    if method is not None:
        spec["method"] = named(rng, method, METHOD_OPTIONS, lengths)
    if not plain:
        for part, registry, options, chance in (
            ("normalizer", NORMALIZERS, {}, 0.35 if method is None else 0.0),
            ("score", SCORES, SCORE_OPTIONS, 0.35 if method is None else 0.1),
            ("position", POSITIONS, POSITION_OPTIONS, 0.4),
        ):
            if rng.random() < chance:
                spec[part] = _option(rng, registry, options, lengths)
        if rng.random() < 0.15:
            spec["qk_norm"] = {"over": str(rng.choice(["head", "all_heads"]))}
        if method is None and rng.random() < 0.1:
            spec["softcap"] = 30.0
        if method is None and rng.random() < 0.1:
            spec.setdefault("normalizer", {"name": "softmax"})["temperature"] = 1.5
        if method is None and rng.random() < 0.05:
            spec["add_zero_attn"] = True
    return AttentionSpec.model_validate(spec)


MASK_OPTIONS: dict[str, Callable[[Generator, Lengths], Options]] = {
    "sliding_window": lambda rng, n: {"left": between(rng, 1, n.keys), "right": between(rng, 1, n.keys)},
    "global_tokens": lambda rng, n: {"positions": list(range(between(rng, 1, min(n.keys, 8))))},
    "prefix_lm": lambda rng, n: {"length": between(rng, 1, n.keys)},
    "block": lambda rng, n: {"size": between(rng, 1, n.keys)},
    "strided": lambda rng, n: {"stride": between(rng, 1, n.keys)},
    "fixed": lambda rng, n: {"stride": between(rng, 1, n.keys)},
    "random_blocks": lambda rng, n: {"size": between(rng, 16, max(16, n.keys)), "count": between(rng, 1, 4)},
    "documents": lambda rng, n: {"lengths": [between(rng, 1, n.keys) for _ in range(between(rng, 1, 8))]},
    "any": lambda rng, n: {
        "of": [
            {"name": "sliding_window", "left": between(rng, 1, n.keys), "right": between(rng, 1, n.keys)},
            {"name": "global_tokens", "positions": [0, 1]},
        ]
    },
    "all": lambda rng, n: {"of": [{"name": "causal"}, {"name": "sliding_window", "left": between(rng, 1, n.keys)}]},
}
SCORE_OPTIONS: dict[str, Callable[[Generator, Lengths], Options]] = {
    "additive": lambda rng, n: {"hidden": int(rng.choice([8, 16, 32]))},
}
POSITION_OPTIONS: dict[str, Callable[[Generator, Lengths], Options]] = {
    "learned": lambda rng, n: {"length": 2 * LONGEST},
    "rope": lambda rng, n: {"style": str(rng.choice(["half", "interleaved"]))},
}
METHOD_OPTIONS: dict[str, Callable[[Generator, Lengths], Options]] = {
    "linear": lambda rng, n: {"features": str(rng.choice(["elu", "relu"]))},
    "performer": lambda rng, n: {"features": between(rng, 16, 256)},
    "linformer": lambda rng, n: {"rank": between(rng, 8, 256), "length": max(n.keys, 1)},
    "nystrom": lambda rng, n: {"landmarks": between(rng, 8, 128)},
}


def _option(rng: Generator, registry: Any, options: dict[str, Callable[..., Options]], lengths: Lengths) -> Options:
    return named(rng, str(rng.choice([entry.name for entry in registry])), options, lengths)


def named(rng: Generator, name: str, options: dict[str, Callable[..., Options]], lengths: Lengths) -> Options:
    """An entry of a registry, with the options that depend on the lengths."""
    return {"name": name, **(options[name](rng, lengths) if name in options else {})}
