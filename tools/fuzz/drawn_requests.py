"""Random whole requests: a situation (operation, spec, sizes), and several requests of it that differ in numbers.

Requests of one situation share their sizes and their spec, so that they share a plan and may run in one pass.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from tests.plain_attention import AXES, IfRequested

from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES
from attention_contract.validation import validate
from attention_service.core.attention import taps_of
from attention_service.core.multihead import Sizes, learned_of, parameter_shapes
from attention_service.core.problem import Widths

Options = Callable[[random.Random], dict[str, Any]]
NEAR: Final = (0, 0, 1, 2, 3, 4)
OFFSETS: Final = (0, 0, 1, -1, 2, -3, 5, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63))
OPERATIONS: Final = (
    ("forward",) * 18 + ("weights",) * 8 + ("gradients",) * 11 + ("effects", "attribution", "complexity")
)
DTYPE_NAMES: Final = ("float32",) * 5 + ("float64",) * 3 + ("bfloat16",) * 2 + ("float16",) * 2
STATISTICS: Final = ("entropy", "max_weight", "mean_distance", "first_key", "own_position", "effective_keys")
PAIRS: Final = ("scores", "capped_scores", "masked_scores", "weights")


def _small(rng: random.Random) -> int | None:
    return rng.choice([None, 0, 1, 2, 5, 2**31 - 1])


SCORES: Final[dict[str, Options]] = {
    "dot": lambda rng: {},
    "scaled_dot": lambda rng: {"scale": rng.choice([None, None, 0.5, -0.4, 0.0])},
    "bilinear": lambda rng: {},
    "additive": lambda rng: {"hidden": rng.choice([None, 1, 3])},
    "gaussian": lambda rng: {"sigma": rng.choice([0.8, 1.5, "learned"])},
    "cosine": lambda rng: {"scale": rng.choice([1.0, -3.0, "learned"])},
}
POSITIONS: Final[dict[str, Options]] = {
    "none": lambda rng: {},
    "sinusoidal": lambda rng: {"theta": rng.choice([9.0, 10_000.0])},
    "learned": lambda rng: {"length": rng.choice([9, 40])},
    "rope": lambda rng: {
        "theta": rng.choice([9.0, 10_000.0]),
        "dim": rng.choice([None, None, 2]),
        "style": rng.choice(["half", "half", "interleaved"]),
        "scaling": rng.choice(
            [None] * 5
            + [
                {"name": "linear", "factor": 2},
                {"name": "ntk", "factor": 3},
                {"name": "ntk", "factor": 3, "original_max_position_embeddings": 2},
                {"name": "llama3", "factor": 2, "original_max_position_embeddings": 8},
                {"name": "yarn", "factor": 2, "original_max_position_embeddings": 8},
                {"name": "longrope", "short_factor": [1.0], "long_factor": [2.0], "factor": 2,
                 "original_max_position_embeddings": 3},
            ]
        ),
    },
    "alibi": lambda rng: {"symmetric": rng.random() < 0.5},
    "relative_bias": lambda rng: {
        "num_buckets": rng.choice([4, 8]), "max_distance": rng.choice([5, 9]), "bidirectional": rng.random() < 0.6,
    },
}  # fmt: skip
NORMALIZERS: Final[dict[str, Options]] = {
    "softmax": lambda rng: {
        "temperature": rng.choice([1.0, 1.0, 0.5, 2.5]), "sinks": rng.random() < 0.15,
        "dtype": rng.choice(["float32"] * 6 + ["float64", "bfloat16", "float16"]),
    },
    "sigmoid": lambda rng: {"bias": rng.choice([None, 0.75]), "temperature": rng.choice([1.0, 0.5])},
    "sparsemax": lambda rng: {"temperature": rng.choice([1.0, 2.5])},
    "entmax15": lambda rng: {"temperature": rng.choice([1.0, 0.25])},
}  # fmt: skip
METHODS: Final[dict[str, Options]] = {
    "exact": lambda rng: {},
    "linear": lambda rng: {
        "rule": rng.choice(["sum", "sum", "sum", "gated", "delta", "gated_delta"]),
        "features": rng.choice([None, None, "elu", "relu", "identity", "l2"]),
    },
    "performer": lambda rng: {"features": rng.choice([None, 5])},
    "linformer": lambda rng: {"rank": rng.choice([1, 3]), "length": rng.choice([3, 16]), "shared": rng.random() < 0.5},
    "nystrom": lambda rng: {"landmarks": rng.choice([1, 2, 64])},
}


def _nested(rng: random.Random) -> dict[str, Any]:
    return {"of": [drawn_mask(rng, nested=False) for _ in range(rng.randint(1, 3))]}


MASKS: Final[dict[str, Options]] = {
    "causal": lambda rng: {"align": rng.choice(["top_left", "bottom_right"])},
    "sliding_window": lambda rng: {"left": _small(rng), "right": _small(rng)},
    "global_tokens": lambda rng: {"positions": rng.sample([0, 1, 3, 5, 2**31 - 1], rng.randint(1, 3))},
    "prefix_lm": lambda rng: {"length": rng.choice([0, 1, 3, 2**31 - 1])},
    "block": lambda rng: {"size": rng.choice([1, 2, 3, 2**31 - 1]), "neighbours": rng.choice([0, 1, 2**31 - 1])},
    "strided": lambda rng: {"stride": rng.choice([1, 2, 3]), "local": _small(rng)},
    "fixed": lambda rng: {"stride": rng.choice([2, 3]), "summary": rng.choice([1, 2])},
    "random_blocks": lambda rng: {
        "size": rng.choice([1, 2]),
        "count": rng.choice([1, 2, 64]),
        "seed": rng.randint(0, 9),
    },
    "documents": lambda rng: {"lengths": [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]},
    "any": _nested,
    "all": _nested,
}


def drawn_mask(rng: random.Random, *, nested: bool = True) -> dict[str, Any]:
    """One mask of the spec."""
    return _one(MASKS, rng, [name for name in MASKS if nested or name not in {"any", "all"}])


def drawn_spec(rng: random.Random) -> dict[str, Any]:
    """A spec of any registered entries; most have few options other than the defaults."""
    made: dict[str, Any] = {"masks": [drawn_mask(rng) for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3]))]}
    parts = (("score", SCORES, 0.5), ("position", POSITIONS, 0.6), ("normalizer", NORMALIZERS, 0.5))
    made |= {part: _one(entries, rng) for part, entries, share in parts if rng.random() < share}
    if rng.random() < 0.25:
        made["softcap"] = rng.choice([0.5, 3.0])
    if rng.random() < 0.12:
        made["qk_norm"] = {"eps": 0.1, "over": rng.choice(["head", "all_heads"]), "unit_offset": rng.random() < 0.5}
    made |= {name: True for name in ("add_bias_kv", "add_zero_attn") if rng.random() < 0.05}
    if rng.random() < 0.15:
        made["method"] = _one(METHODS, rng)
        made["masks"] = rng.choice([[], [], [{"name": "causal"}]])
        for name in ("normalizer", "softcap", "score", "position"):
            if rng.random() < 0.9:  # most methods refuse them
                made.pop(name, None)
    return made


def _one(entries: dict[str, Options], rng: random.Random, names: list[str] | None = None) -> dict[str, Any]:
    name = rng.choice(names or list(entries))
    return {"name": name, **entries[name](rng)}


@dataclass
class Situation:
    """All that the requests of one draw share."""

    rng: random.Random
    operation: str
    spec: AttentionSpec
    config: dict[str, Any] | None
    """The config of the module; None for raw attention."""
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    key_dim: int
    value_dim: int
    batch: int
    queries: int
    new_keys: int
    past: int
    layout: str
    batched: bool
    has: tuple[str, ...]
    kernel: str | None
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    """Those of the module."""
    shape: dict[str, Any] = field(default_factory=dict)
    """The parts of the request that stay: names and shapes."""

    @property
    def keys(self) -> int:
        """Lk."""
        return self.past + self.new_keys

    @property
    def numbers(self) -> np.random.Generator:
        """Fresh numbers, by the situation's own draws."""
        return np.random.default_rng(self.rng.getrandbits(32))


def drawn_situation(seed: str) -> Situation:
    """Draw a situation. Raises InvalidRequest for a spec or a config that the contract refuses."""
    rng = random.Random(seed)
    operation = rng.choice(OPERATIONS)
    spec_options = drawn_spec(rng)
    given_spec = validate(AttentionSpec, spec_options, by_name=False)
    module = rng.random() < 0.35
    kv_heads, group = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
    width = rng.choice([1, 2, 2, 2, 3, 4, 5])
    has = rng.choice([("key", "value"), ("key", "value"), ("key",), ("value",), ()])
    layout = "module" if module else rng.choice(["split", "split", "headless", "merged"])
    if layout == "headless":
        kv_heads = group = 1
    if "key" not in has and not module:
        group = 1
    value_dim = rng.choice([1, 2, 3]) if module or "value" in has else width
    two_widths = not module and "key" in has and "value" in has and rng.random() < 0.1
    key_dim = rng.choice([1, 3]) if two_widths else width
    if not module and "value" not in has:
        value_dim = key_dim
    config: dict[str, Any] | None = None
    dtype = rng.choice(DTYPE_NAMES)
    if module:
        config = {
            "d_model": rng.choice([3, 4]), "num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": width,
            "value_dim": value_dim, "bias": rng.choice([True, False, {"q_proj": True, "v_proj": True}]),
            "dtype": dtype, "spec": spec_options,
        }  # fmt: skip
        if has == ("key", "value"):
            config |= rng.choice([{}, {"key_width": 2, "value_width": 5}])
    queries = rng.choice([0, 1, 2, 3, 4, 4])
    return Situation(
        rng, operation, given_spec, config, dtype, kv_heads * group, kv_heads, width, key_dim, value_dim,
        batch=1 if layout == "headless" else rng.choice([0, 1, 2, 2, 3]) if rng.random() < 0.9 else 1,
        queries=queries,
        new_keys=rng.choice([0, 1, 3, 4, 6]) if "key" in has else queries,
        past=rng.choice([0, 0, 0, 1, 3]),
        layout=layout, batched=layout != "headless" and rng.random() < 0.7, has=has,
        kernel=_drawn_kernel(rng, given_spec),
    )  # fmt: skip


def _drawn_kernel(rng: random.Random, spec: AttentionSpec) -> str | None:
    """Mostly none; seldom one that the spec rules out."""
    if rng.random() < 0.6 or spec.method.name != "exact":
        return None
    plain = spec.score.name in {"dot", "scaled_dot"} and spec.normalizer.name == "softmax" and spec.softcap is None
    return rng.choice(["materialized", "blocked", *["fused"] * (3 * plain + (rng.random() < 0.1))])


def settled(situation: Situation) -> Situation:
    """The situation with what all its requests have: which optional fields, and of which shapes."""
    s, rng = situation, situation.rng
    if not s.batched:
        s.batch = 1
    shape = s.shape
    exact = s.spec.method.name == "exact"
    if rng.random() < (0.35 if exact else 0.05):
        sizes = [rng.choice([1, size]) for size in (s.batch, s.heads, s.queries)]
        last = rng.choice([1, s.keys, s.keys, max(s.keys - 1, 0)])
        shape["mask"] = ([*sizes, last][-rng.randint(1, 4) :], rng.choice(["bool", "float"]))
    for name, share in (("key_mask", 0.2), ("key_lengths", 0.2), ("global_mask", 0.08)):
        shape |= {name: True} if rng.random() < share else {}
    shape["offsets"] = rng.choice([None, None, None, "one", "each"])
    near = s.spec.position.name == "learned" and rng.random() < 0.9  # other places have no vector
    shape["firsts"] = [[rng.choice(NEAR if near else OFFSETS) for _ in range(max(s.batch, 1))] for _ in range(2)]
    if s.spec.position.name != "none" and s.new_keys == s.queries and rng.random() < 0.3:
        shape["positions"] = True
    if s.operation != "effects" and rng.random() < 0.4:
        counts = {"heads": s.heads, "queries": s.queries}
        shape["select"] = {
            axis: rng.randint(1, 2 * size + 1) for axis, size in counts.items() if size and rng.random() < 0.6
        }
    if rng.random() < 0.15:
        shape["edits"] = [_drawn_edit(s) for _ in range(rng.choice([1, 1, 2]))]
    if s.operation in {"forward", "gradients"} and rng.random() < 0.06:
        shape["dropout"] = True
        shape.pop("select", None)  # the reply's mask is of the selected weights, and the formula needs all
    taps = [tap for tap in taps_of(s.spec) if rng.random() < 0.4] + ["output"] * (rng.random() < 0.9)
    shape["return"] = taps or ["output"]
    shape["average_heads"] = rng.random() < 0.15
    shape["top_k"] = rng.choice([0, 1, 2]) if s.keys else 0
    if s.config is not None:
        sizes_of = Sizes.of(validate(ModuleConfig, s.config, by_name=False))
        s.parameters = {name: _learned(s, name, each) for name, each in parameter_shapes(sizes_of).items()}
    elif s.operation != "complexity":
        widths = Widths(
            s.heads, s.kv_heads, s.head_dim, s.value_dim, None, None if s.key_dim == s.head_dim else s.key_dim
        )
        shape["parameters"] = {name: each.shape for name, each in learned_of(s.spec, widths).items()}
    if s.operation == "gradients":
        names = [*{"query", *s.has, *(("past_key", "past_value") if s.past else ())}]
        names += ["mask"] if "mask" in shape and shape["mask"][1] == "float" else []
        names += [*s.parameters, *shape.get("parameters", ())]
        names += [tap for tap in taps_of(s.spec) if tap != "lse" and rng.random() < 0.2]
        shape["wrt"] = sorted(rng.sample(sorted(names), rng.randint(1, min(len(names), 6))))
        shape["upstream"] = rng.random() < 0.8
    return s


def _learned(s: Situation, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = s.numbers.normal(size=shape)
    x = np.abs(x) + 0.5 if name == "score.sigma" else x
    return x.astype(DTYPES[s.dtype])


def _drawn_edit(s: Situation) -> dict[str, Any]:
    rng = s.rng
    tap = rng.choice(["q", "k", "v", *PAIRS, "context", "output"])
    sizes = {"heads": s.kv_heads if tap in {"k", "v"} else s.heads, "queries": s.queries, "keys": s.keys}
    edit: dict[str, Any] = {"tap": tap}
    for axis in AXES.get(tap, ("heads", "queries", "keys")):
        if sizes[axis] and rng.random() < 0.6:
            edit[axis] = rng.choices(range(sizes[axis]), k=rng.randint(1, sizes[axis] + 1))
    edit |= rng.choice([{"set": 0.0}, {"set": 1.5}, {"scale": -0.5}, {"scale": 0.0}, {"value": 1}, {"add": 1}])
    if "value" in edit:
        edit |= {axis: sorted({*edit[axis]}) for axis in ("heads", "queries", "keys") if axis in edit}
    if tap == "weights" and rng.random() < 0.3:
        edit["renormalize"] = True
    return edit


def drawn_request(s: Situation) -> dict[str, Any]:
    """One request of the situation, by the names of the wire."""
    numbers, shape, rng = s.numbers, s.shape, s.rng
    if s.operation == "complexity":
        return _complexity(s)

    def normal(*sizes: int) -> np.ndarray:
        return numbers.normal(size=sizes).astype(DTYPES[s.dtype])

    def tensor(name: str, heads: int, length: int, width: int) -> np.ndarray:
        if s.config is not None:
            x = normal(s.batch, length, s.config.get(f"{name}_width", s.config["d_model"]))
        elif s.layout == "merged":
            x = normal(s.batch, length, heads * width)
        else:
            x = normal(s.batch, heads, length, width)
        x = x[:, 0] if s.layout == "headless" else x
        return x if s.batched else x[0]

    def row(x: np.ndarray) -> np.ndarray:
        return x if s.batched else x[0]

    request: dict[str, Any] = {"query": tensor("query", s.heads, s.queries, s.head_dim)}
    if "key" in s.has:
        request["key"] = tensor("key", s.kv_heads, s.new_keys, s.key_dim)
    if "value" in s.has:
        request["value"] = tensor("value", s.kv_heads, s.new_keys, s.value_dim)
    if s.past:
        widths = {"past_key": s.key_dim, "past_value": s.value_dim}
        for name, width in widths.items():
            x = normal(s.batch, s.kv_heads, s.past, width)
            x = x[:, 0] if s.layout == "headless" else x
            request[name] = x if s.batched else x[0]
    if "mask" in shape:
        sizes, kind = shape["mask"]
        mask = numbers.normal(size=sizes)
        request["mask"] = mask > -0.5 if kind == "bool" else np.where(mask > 1.2, -np.inf, mask).astype(DTYPES[s.dtype])
    if "key_mask" in shape:
        request["key_mask"] = row(numbers.random((s.batch, s.keys)) > 0.25)
    if "key_lengths" in shape:
        request["key_lengths"] = np.asarray(row(numbers.integers(0, s.keys + 1, size=s.batch)))
    if "global_mask" in shape:
        request["global_mask"] = row(numbers.random((s.batch, s.keys)) > 0.7)
    if shape["offsets"]:
        drawn = rng.choice(shape["firsts"])
        request["offsets"] = np.asarray(drawn[0] if shape["offsets"] == "one" else row(np.array(drawn[: s.batch])))
    if "positions" in shape:
        places = numbers.integers(0 if s.spec.position.name == "learned" else -3, 9, size=(s.batch, s.queries))
        if rng.random() < 0.2 and places.size:
            places.flat[0] = rng.choice(OFFSETS)
        request["positions"] = row(places)
    if "select" in shape:
        counts = {"heads": s.heads, "queries": s.queries}
        request["select"] = {axis: rng.choices(range(counts[axis]), k=count) for axis, count in shape["select"].items()}
    if "edits" in shape:
        request["edits"] = [
            each | {name: normal() for name in ("value", "add") if name in each} for each in shape["edits"]
        ]
    if s.config is None:
        request["spec"] = s.spec.model_dump(mode="json")
        request["parameters"] = {name: _learned(s, name, each) for name, each in shape["parameters"].items()}
        if s.layout == "merged":
            request |= {"num_heads": s.heads, "num_kv_heads": s.kv_heads}
    request |= {"kernel": s.kernel} if s.kernel else {}
    return request | _of_operation(s, normal)


def _of_operation(s: Situation, normal: Callable[..., np.ndarray]) -> dict[str, Any]:
    shape, rng = s.shape, s.rng
    taps = {"return": shape["return"], "average_heads": shape["average_heads"]}
    if "dropout" in shape:
        taps["dropout"] = {"p": 0.4, "seed": rng.randint(0, 9), "return_mask": True}
    match s.operation:
        case "forward":
            return taps
        case "weights":
            statistics = {"statistics": list(STATISTICS)}
            return statistics | {"top_k": shape["top_k"], "average_heads": shape["average_heads"]}
        case "gradients":
            upstream = {"upstream": normal(*_output_shape(s))} if shape["upstream"] else {}
            return taps | {"wrt": shape["wrt"]} | upstream
        case "effects":
            return {"sweep": {"tap": rng.choice(["weights", "scores", "v", "context"]), "set": 0.0, "over": ["heads"]}}
    return {"methods": ["gradient_attention", "norm", "head_importance"]}


def _output_shape(s: Situation) -> tuple[int, ...]:
    if s.config is not None:
        sizes: tuple[int, ...] = (s.batch, s.queries, s.config["d_model"])
    elif s.layout == "merged":
        sizes = (s.batch, s.queries, s.heads * s.value_dim)
    else:
        sizes = (s.batch, s.heads, s.queries, s.value_dim)
        sizes = (s.batch, s.queries, s.value_dim) if s.layout == "headless" else sizes
    return sizes if s.batched else sizes[1:]


def _complexity(s: Situation) -> dict[str, Any]:
    shape = {"batch": max(s.batch, 1), "queries": max(s.queries, 1), "keys": max(s.new_keys, 1), "past": s.past}
    if s.config is not None:
        return {"shape": shape}
    model = {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim, "value_dim": s.value_dim}
    return {"shape": shape, "spec": s.spec.model_dump(mode="json"), "dtype": s.dtype, **model}


def bound_as_sent(s: Situation, request: dict[str, Any]) -> IfRequested:
    """The request as the formula reads it."""
    floats = ("query", "key", "value", "past_key", "past_value")
    given = {name: request[name] for name in floats if name in request} | s.parameters | request.get("parameters", {})
    if "mask" in request and request["mask"].dtype != np.bool_:
        given["mask"] = request["mask"]
    tensors = {name: torch.from_numpy(np.array(x, np.float64)).requires_grad_() for name, x in given.items()}
    return IfRequested(
        request, s.spec, s.heads, s.kv_heads, s.config is not None, s.batched, s.layout != "headless",
        s.layout == "merged", s.past, tensors,
    )  # fmt: skip
