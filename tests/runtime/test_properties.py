"""Drawn requests to a live server, held against the formula in plain loops of float64."""

from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.conftest import MASKS, attend_in_loops

from attention_contract.operations import OPERATIONS
from attention_contract.positions import NoPosition
from attention_contract.spec import AttentionSpec
from attention_contract.tensors import DTYPES
from attention_contract.wire import MEDIA_TYPES, from_body, to_body
from attention_service.core.problem import Problem

OPERATION = {operation.name: operation for operation in OPERATIONS}
PAIRS = ("scores", "capped_scores", "masked_scores", "weights")
TAPS = ("q", "k", "v", *PAIRS, "lse", "context", "output")
CONFIGS: dict[str, dict[str, Any]] = {
    "properties.plain": {"d_model": 4, "num_heads": 2, "dtype": "float64"},
    "properties.odd": {
        "d_model": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "value_dim": 3, "key_width": 5,
        "value_width": 2, "bias": {"q_proj": True, "o_proj": True}, "dtype": "float64",
        "spec": {"softcap": 0.7, "masks": [{"name": "sliding_window", "left": 2, "right": 1}]},
    },
    "properties.turned": {
        "d_model": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "dtype": "float64",
        "spec": {"position": {"name": "rope", "dim": 2, "theta": 50.0}, "qk_norm": {"eps": 0.1}},
    },
}  # fmt: skip
drawn = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def ask(server):
    """A function that sends a request to one of the operations, in a media type, and reads the reply."""
    with httpx.Client(base_url=server, timeout=60) as client:

        def send(operation: str, request: dict[str, Any], module: str | None = None, media_type: str = MEDIA_TYPES[1]):
            described = OPERATION[operation if module else f"raw_{operation}"]
            body = b"".join(to_body(described.request(**request), media_type, "request", "base64"))
            path = described.path.replace("{name}", module or "")
            answer = client.post(path, content=body, headers={"content-type": media_type, "accept": media_type})
            assert answer.status_code == 200, answer.text
            return from_body(described.reply, answer.content, media_type, "reply")

        yield send


@pytest.fixture(scope="module")
def modules(server):
    """The parameters of two modules that the server has, by name."""
    rng = np.random.default_rng(1)
    made = {}
    with httpx.Client(base_url=server, timeout=60) as client:
        for name, config in CONFIGS.items():
            info = client.post("/v1/modules", json={"name": name, "config": config}).json()
            listed = client.get(f"/v1/modules/{name}/parameters").json()["parameters"]
            made[name] = {one["name"]: rng.normal(size=one["shape"]) for one in listed}
            body = {"parameters": {key: value.tolist() for key, value in made[name].items()}}
            assert client.put(f"/v1/modules/{name}/parameters", json=body).status_code == 200, info
    return made


# ── the formula, once more ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Case:
    """One request and what the formula needs to know of it."""

    request: dict[str, Any]
    spec: AttentionSpec
    heads: int
    kv_heads: int
    past: int
    module: str | None = None
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    batched: bool = True
    headed: bool = True
    merged: bool = False


def split(case: Case, name: str, heads: int) -> np.ndarray:
    """``[B, heads, L, W]`` of an input, as the request holds it."""
    x = np.asarray(case.request[name], np.float64)
    if case.module is None and not case.merged and not name.startswith("past"):
        return x if case.batched else (x[None] if case.headed else x[None, None])
    x = x if case.batched else x[None]
    if name.startswith("past"):
        return x if case.headed else x[:, None] if x.ndim == 3 else x
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def project(case: Case, name: str, x: np.ndarray, heads: int) -> np.ndarray:
    y = x @ case.parameters[f"{name}.weight"].T + case.parameters.get(f"{name}.bias", 0.0)
    return y.reshape(*y.shape[:2], heads, y.shape[2] // heads).transpose(0, 2, 1, 3)


def placed(case: Case, batch: int, queries: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Where queries and new keys stand, ``[batch, length]``."""
    if case.request.get("positions") is not None:
        at = np.asarray(case.request["positions"]).reshape(batch, queries)
        return at, at
    offsets = case.past if case.request.get("offsets") is None else np.asarray(case.request["offsets"])
    at = np.arange(queries) + np.broadcast_to(offsets, (batch,))[:, None]
    return at, np.broadcast_to(case.past + np.arange(new), (batch, new))


def rotated(x: np.ndarray, at: np.ndarray, rope: Any) -> np.ndarray:
    dim, y = rope.dim or x.shape[-1], x.copy()
    for c in range(dim // 2):
        a, b = (c, c + dim // 2) if rope.style == "half" else (2 * c, 2 * c + 1)
        turn = np.exp(1j * at * rope.theta ** (-2 * c / dim))[:, None] * (x[..., a] + 1j * x[..., b])
        y[..., a], y[..., b] = turn.real, turn.imag
    return y


def normed(case: Case, name: str, x: np.ndarray) -> np.ndarray:
    root = np.sqrt((x**2).mean(-1, keepdims=True) + case.spec.qk_norm.eps)
    return x / root * case.parameters[f"{name}_norm.weight"]


def prepared(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values as heads see them: projected, normed, rotated, behind their past."""
    r, h, hkv = case.request, case.heads, case.kv_heads
    key = "key" if r.get("key") is not None else "query"
    value = "value" if r.get("value") is not None else key
    if case.module is None:
        q, k, v = split(case, "query", h), split(case, key, hkv), split(case, value, hkv)
    else:
        x, y, z = (r[name] if case.batched else r[name][None] for name in ("query", key, value))
        projected = (("q_proj", x, h), ("k_proj", y, hkv), ("v_proj", z, hkv))
        q, k, v = (project(case, name, x, heads) for name, x, heads in projected)
    if case.spec.qk_norm is not None:
        q, k = normed(case, "q", q), normed(case, "k", k)
    if case.spec.position.name == "rope":
        at_queries, at_keys = placed(case, q.shape[0], q.shape[2], k.shape[2])
        q, k = rotated(q, at_queries, case.spec.position), rotated(k, at_keys, case.spec.position)
    if r.get("past_key") is not None:
        k = np.concatenate([split(case, "past_key", hkv), k], axis=2)
        v = np.concatenate([split(case, "past_value", hkv), v], axis=2)
    return q, k, v


def formula(case: Case) -> dict[str, np.ndarray]:
    """Every tap, batched and with heads."""
    r, (q, k, v) = case.request, prepared(case)
    batch, keys = q.shape[0], k.shape[2]
    taps = {"q": q, "k": k, "v": v, "present_key": k, "present_value": v}
    real = np.ones((batch, keys), bool)
    if r.get("key_mask") is not None:
        real &= np.asarray(r["key_mask"]).reshape(batch, keys)
    if r.get("key_lengths") is not None:
        real &= np.arange(keys) < np.asarray(r["key_lengths"]).reshape(batch, 1)
    k, v = np.where(real[:, None, :, None], k, 0), np.where(real[:, None, :, None], v, 0)
    problem = Problem(
        *(torch.from_numpy(np.array(x)) for x in (q, k, v)),
        spec=case.spec.model_copy(update={"position": NoPosition(), "qk_norm": None}),
        mask=None if r.get("mask") is None else torch.from_numpy(np.array(r["mask"])),
        key_mask=torch.from_numpy(real),
        offsets=None if r.get("offsets") is None else torch.from_numpy(np.array(r["offsets"])),
        past=case.past,
    )
    taps |= {name: x.numpy() for name, x in attend_in_loops(problem).items()}
    context = taps["context"]
    heads, queries, width = context.shape[1:]
    merged = context.transpose(0, 2, 1, 3).reshape(batch, queries, heads * width)
    if case.module is not None:
        merged = merged @ case.parameters["o_proj.weight"].T + case.parameters.get("o_proj.bias", 0.0)
    taps["output"] = merged if case.module is not None or case.merged else context
    return taps


def as_replied(case: Case, tap: str, x: np.ndarray) -> np.ndarray:
    """A tap narrowed and laid out as the reply has it."""
    select = case.request.get("select") or {}
    heads, queries = select.get("heads"), select.get("queries")
    has_heads = tap != "output" or (case.module is None and not case.merged)
    if tap not in {"output", "present_key", "present_value"}:
        if heads is not None:
            group = case.heads // case.kv_heads
            x = x[:, [head // group for head in heads] if tap in {"k", "v"} else heads]
        if queries is not None and tap not in {"k", "v"}:
            x = x[:, :, queries]
        if tap == "weights" and case.request.get("average_heads"):
            x, has_heads = x.mean(axis=1), False
    if has_heads and not case.headed:
        x = x[:, 0]
    return x if case.batched else x[0]


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────

specs = st.fixed_dictionaries(
    {"masks": st.sampled_from([*MASKS.values()])},
    optional={
        "score": st.sampled_from([{"name": "dot"}, {"name": "scaled_dot", "scale": -0.4}, {"name": "scaled_dot"}]),
        "softcap": st.sampled_from([0.5, 3.0]),
        "normalizer": st.sampled_from([0.3, 2.0]).map(lambda t: {"name": "softmax", "temperature": t}),
        "position": st.sampled_from(
            [{"name": "rope", "dim": 2, "theta": 9.0}, {"name": "rope", "dim": 2, "style": "interleaved"}]
        ),
    },
)


@st.composite
def cases(draw: st.DrawFn, *, empty: bool = True) -> Case:
    least = 0 if empty else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    module = draw(st.none() | st.sampled_from(sorted(CONFIGS)))
    layout = "module" if module else draw(st.sampled_from(["split", "split", "headless", "merged"]))
    batched = layout != "headless" and draw(st.booleans())
    batch = draw(st.integers(least, 3)) if batched else 1
    queries, new = draw(st.integers(least, 4)), draw(st.integers(least, 4))
    past = draw(st.none() | st.integers(0, 3))
    has_key, has_value = draw(st.sampled_from([(True, True), (True, True), (True, False), (False, True)]))
    kv_heads, group, width, v_width = (draw(st.integers(1, 3)) for _ in range(4))
    spec = draw(specs)
    config = CONFIGS.get(module or "", {})
    if module:
        heads, kv_heads = config["num_heads"], config.get("num_kv_heads", config["num_heads"])
        width = config.get("head_dim", config["d_model"] // heads)
        v_width, spec = config.get("value_dim", width), config.get("spec", {})
        has_key, has_value = (True, True) if "key_width" in config else (has_key, has_value)
    else:
        kv_heads, group = (1, 1) if layout == "headless" else (kv_heads, 1 if not has_key else group)
        heads, v_width = kv_heads * group, v_width if has_value else width
    new = queries if not has_key else new

    def numbers(*shape: int) -> np.ndarray:
        return rng.normal(size=shape)

    def tensor(name: str, count: int, length: int, wide: int) -> np.ndarray:
        if module:
            shape = (batch, length, config.get(name, config["d_model"]))
        else:
            shape = (batch, length, count * wide) if layout == "merged" else (batch, count, length, wide)
        return stripped(numbers(*shape), heads_axis=layout == "headless")

    def stripped(x: np.ndarray, *, heads_axis: bool) -> np.ndarray:
        x = x[:, 0] if heads_axis else x
        return x if batched else np.asarray(x[0])

    request: dict[str, Any] = {"query": tensor("query_width", heads, queries, width)}
    if has_key:
        request["key"] = tensor("key_width", kv_heads, new, width)
    if has_value:
        request["value"] = tensor("value_width", kv_heads, new, v_width)
    if past is not None:
        for name, wide in (("past_key", width), ("past_value", v_width)):
            request[name] = stripped(numbers(batch, kv_heads, past, wide), heads_axis=layout == "headless")
    keys = new + (past or 0)
    if layout == "merged":
        request |= {"num_heads": heads, "num_kv_heads": kv_heads}
    kind = draw(st.sampled_from(["none", "none", "bool", "float"]))
    if kind != "none":
        rank = draw(st.integers(1, 4))
        shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries)] + [draw(st.integers(0, keys))]
        mask = numbers(*shape[-rank:])
        request["mask"] = mask > -0.5 if kind == "bool" else np.where(mask > 1.2, -np.inf, mask)
    if draw(st.integers(0, 2)) == 0:
        request["key_mask"] = stripped(numbers(batch, keys) > -0.7, heads_axis=False)
    if draw(st.integers(0, 2)) == 0:
        request["key_lengths"] = stripped(rng.integers(0, keys + 1, size=batch), heads_axis=False)
    offset = draw(st.sampled_from(["none", "one", "each"]))
    if offset != "none":
        each = rng.integers(-3, 6, size=batch)
        request["offsets"] = np.array(draw(st.integers(-3, 6))) if offset == "one" else stripped(each, heads_axis=False)
    if not module and width == 1 and spec.get("position", {}).get("name") == "rope":
        spec = spec | {"position": {"name": "none"}}
    if module is None:
        request["spec"] = spec
    if spec.get("position", {"name": "none"})["name"] != "none" and new == queries and draw(st.booleans()):
        request["positions"] = stripped(rng.integers(-3, 9, size=(batch, queries)), heads_axis=False)
    if draw(st.booleans()):
        sizes = {"heads": heads, "queries": queries}
        request["select"] = {
            axis: draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3))
            for axis, size in sizes.items()
            if size and draw(st.booleans())
        }
    request |= {"average_heads": draw(st.booleans()), "encoding": "base64"}
    case = Case(request, AttentionSpec.model_validate(spec), heads, kv_heads, past or 0, module)
    return replace(case, batched=batched, headed=layout != "headless", merged=layout == "merged")


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────────


def close(actual: np.ndarray, expected: np.ndarray, what: str, tolerance: float = 1e-9) -> None:
    assert actual is not None, what
    assert actual.shape == expected.shape, what
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=what)


@drawn
@given(case=cases(), media_type=st.sampled_from(MEDIA_TYPES))
def test_every_tap_is_the_formula(ask, modules, case, media_type):
    case.parameters = modules.get(case.module, {})
    expected = formula(case)
    reply = ask("forward", case.request | {"return_": list(TAPS)}, case.module, media_type)
    for tap in TAPS:
        close(getattr(reply, tap), as_replied(case, tap, expected[tap]), tap)
    if "past_key" in case.request:
        for tap in ("present_key", "present_value"):
            close(getattr(reply, tap), as_replied(case, tap, expected[tap]), tap)
    for kernel in ("materialized",) if case.spec.softcap else ("fused", "materialized"):
        alone = ask("forward", case.request | {"kernel": kernel}, case.module, media_type)
        assert alone.ran.kernel == kernel
        close(alone.output, as_replied(case, "output", expected["output"]), kernel)


@settings(drawn, max_examples=40)
@given(case=cases(empty=False), data=st.data())
def test_gradients_are_the_slopes_of_the_formula(ask, modules, case, data):
    case.parameters = modules.get(case.module, {})
    r = case.request
    taps = formula(case)
    rng = np.random.default_rng(0)
    batched_upstream = rng.normal(size=taps["output"].shape)
    plain = replace(case, request={})
    floating = ["mask"] if r.get("mask") is not None and r["mask"].dtype != bool else []
    inputs = [name for name in ("query", "key", "value", "past_key", "past_value") if name in r]
    inputs += floating
    names = [*inputs, *case.parameters]
    wrt = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    reply = ask("gradients", r | {"wrt": wrt, "upstream": as_replied(plain, "output", batched_upstream)}, case.module)

    def loss(name: str, value: np.ndarray) -> float:
        if name in inputs:
            found = formula(replace(case, request=r | {name: value}))
        else:
            found = formula(replace(case, parameters=case.parameters | {name: value}))
        return float((found["output"] * batched_upstream).sum())

    for name in wrt:
        whole = r[name] if name in inputs else case.parameters[name]
        gradient = reply.gradients[name]
        assert gradient.shape == whole.shape, name
        for place in rng.permutation(whole.size)[:3]:
            if not np.isfinite(whole.flat[place]):
                assert gradient.flat[place] == 0, name
                continue
            ends = []
            for step in (1e-5, -1e-5):
                moved = np.array(whole)
                moved.flat[place] += step
                ends.append(loss(name, moved))
            slope = (ends[0] - ends[1]) / 2e-5
            assert gradient.flat[place] == pytest.approx(slope, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 4e-2), ("float32", 1e-5)])
@settings(drawn, max_examples=12)
@given(case=cases())
def test_every_dtype_comes_back_as_it_came(ask, modules, media_type, dtype, tolerance, case):
    """A module computes in its own dtype, raw attention in that of its inputs; both answer in that of the query."""
    case.parameters = modules.get(case.module, {})
    floats = ("query", "key", "value", "past_key", "past_value")
    narrow = {name: case.request[name].astype(DTYPES[dtype]) for name in floats if name in case.request}
    case = replace(case, request=case.request | narrow)
    expected = formula(case)
    reply = ask("forward", case.request | {"return_": ["output", "lse", "k"]}, case.module, media_type)
    assert reply.ran.dtype == ("float64" if case.module else dtype)
    scale = 1 + max(np.abs(expected[tap][np.isfinite(expected[tap])]).max(initial=0) for tap in ("output", "lse", "k"))
    for tap in ("output", "lse", "k"):
        value = getattr(reply, tap)
        close(value.astype(np.float64), as_replied(case, tap, expected[tap]), tap, tolerance * scale)
        if media_type == MEDIA_TYPES[1]:
            assert value.dtype == DTYPES[dtype], tap
