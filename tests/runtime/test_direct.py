"""The direct pass against float64 PyTorch and against the general way; and when it leaves a request to that."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest, Select
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.device import Device
from attention_service.runtime.operations import forward
from attention_service.runtime.operations.compute import TORCH_DTYPES
from attention_service.runtime.operations.direct import _loaded, _most, direct

CPU = torch.device("cpu")
CLOSE = {"float32": 2e-5, "float64": 1e-12}
CAUSAL = AttentionSpec(masks=[Causal()])


def module(rng, spec=None, *, biased=True, **config):
    """A module with random parameters, also its biases; laid out as a resident one."""
    widths = {"d_model": 8, "num_heads": 2} | config
    whole = complete(ModuleConfig(**widths, bias=biased, spec=spec or AttentionSpec()))
    dtype = TORCH_DTYPES[whole.dtype]
    parameters = initial_parameters(Sizes.of(whole), 0, dtype)
    for name, value in parameters.items():
        if name.endswith("bias"):
            parameters[name] = torch.from_numpy(rng.standard_normal(value.shape)).to(dtype)
    return Module.of("m", whole, parameters).on(CPU)


def both(module, request, kernel="fused"):
    """By the direct way, None where it declines, and by the general one."""
    bound = bind(module, request)
    swift = direct(bound, request, kernel, CPU)
    general = forward.run(bound, request, Select(), kernel, CPU)["output"]
    mine = None if swift is None else swift.run(bound)
    return None if mine is None else mine["output"], general


def expected(module, request):
    """In float64, by PyTorch, from the formula."""
    sizes, p = module.sizes, {name: value.double() for name, value in module.parameters.items()}
    query = torch.from_numpy(request.query).double()
    key = query if request.key is None else torch.from_numpy(request.key).double()
    value = key if request.value is None else torch.from_numpy(request.value).double()

    def split(x, role, heads):
        x = linear(x, p[f"{role}_proj.weight"], p.get(f"{role}_proj.bias"))
        return x.unflatten(-1, (heads, -1)).transpose(-2, -3)

    q, k, v = split(query, "q", sizes.heads), split(key, "k", sizes.kv_heads), split(value, "v", sizes.kv_heads)
    k, v = (x.repeat_interleave(sizes.heads // sizes.kv_heads, -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    spec = module.config.spec
    scale = getattr(spec.score, "scale", 1.0) or sizes.head_dim**-0.5
    scores = scores * (1.0 if spec.score.name == "dot" else scale) / spec.normalizer.temperature
    if spec.masks:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    context = scores.softmax(-1) @ v
    merged = context.transpose(-2, -3).flatten(-2)
    return linear(merged, p["o_proj.weight"], p.get("o_proj.bias")).numpy()


def drawn(rng, dtype):
    """Random sizes, and the inputs of one request."""
    heads = int(rng.choice([1, 2, 4, 6]))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    head_dim, d_model = int(rng.integers(1, 20)), int(rng.integers(1, 40))
    config = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    config |= {"d_model": d_model, "biased": bool(rng.random() < 0.5), "dtype": dtype}
    lead = (int(rng.integers(1, 4)),) if rng.random() < 0.7 else ()
    queries = int(rng.integers(1, 40))
    shapes = {"query": (*lead, queries, d_model)}
    spec = {"score": [{"name": "scaled_dot"}, {"name": "dot"}, {"name": "scaled_dot", "scale": 0.3}][rng.integers(3)]}
    spec |= {"normalizer": {"name": "softmax", "temperature": float(rng.choice([1.0, 2.5]))}}
    if rng.random() < 0.5:
        config |= {"key_width": int(rng.integers(1, 40)), "value_width": int(rng.integers(1, 40))}
        keys = int(rng.integers(1, 40))
        shapes |= {"key": (*lead, keys, config["key_width"]), "value": (*lead, keys, config["value_width"])}
    elif rng.random() < 0.5:
        shapes["key"] = (*lead, int(rng.integers(1, 40)), d_model)
    if rng.random() < 0.5:
        spec["masks"] = [{"name": "causal", "align": "top_left"}]
    given = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return AttentionSpec(**spec), config, ForwardRequest(**given)


@pytest.mark.parametrize("seed", range(60))
def test_it_gives_the_numbers_of_the_formula_and_of_the_general_way(seed):
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float32", "float64"]))
    spec, config, request = drawn(rng, dtype)
    here = module(rng, spec, **config)
    found, general = both(here, request)
    assert found is not None
    assert (found.dtype, found.shape) == (general.dtype, general.shape)
    np.testing.assert_allclose(found, expected(here, request), rtol=CLOSE[dtype], atol=CLOSE[dtype])
    np.testing.assert_allclose(found, general, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def drawn_raw(rng, dtype):
    """A request of raw attention of random sizes and layout."""
    heads, width = int(rng.choice([1, 2, 6])), int(rng.integers(1, 20))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    queries = int(rng.integers(1, 40))
    keys = int(rng.integers(1, 40)) if rng.random() < 0.5 else queries
    lead = [(int(rng.integers(1, 4)),), ()][rng.integers(2)]
    by_head = bool(lead) or rng.random() < 0.5
    if not by_head:
        heads = kv_heads = 1

    def shape(heads, length):
        return (*lead, *((heads,) if by_head else ()), length, width)

    shapes = {"query": shape(heads, queries), "key": shape(kv_heads, keys), "value": shape(kv_heads, keys)}
    if rng.random() < 0.3 or not keys:
        del shapes["value"]
    if rng.random() < 0.2 and heads == kv_heads:
        shapes = {"query": shapes["query"]}
    spec = {"score": [{"name": "scaled_dot"}, {"name": "dot"}, {"name": "scaled_dot", "scale": 0.3}][rng.integers(3)]}
    spec |= {"normalizer": {"name": "softmax", "temperature": float(rng.choice([1.0, 2.5]))}}
    if rng.random() < 0.5:
        spec["masks"] = [{"name": "causal", "align": "top_left"}]
    given = {name: rng.standard_normal(each).astype(dtype) for name, each in shapes.items()}
    return RawForwardRequest(spec=spec, **given)


def expected_raw(request):
    """In float64, from the formula."""
    q, k = request.query, request.query if request.key is None else request.key
    q, k, v = (torch.from_numpy(x).double() for x in (q, k, k if request.value is None else request.value))
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = getattr(request.spec.score, "scale", 1.0) or q.shape[-1] ** -0.5
    scale = (1.0 if request.spec.score.name == "dot" else scale) / request.spec.normalizer.temperature
    scores = q @ k.transpose(-1, -2) * scale
    if request.spec.masks:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).numpy()


@pytest.mark.parametrize("seed", range(60))
def test_raw_attention_is_the_formula_s(seed):
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float32", "float64"]))
    request = drawn_raw(rng, dtype)
    found, general = both(None, request)
    assert found is not None
    assert (found.dtype, found.shape) == (general.dtype, general.shape)
    for other in (expected_raw(request), general):
        np.testing.assert_allclose(found, other, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_raw_attention_whose_heads_lie_side_by_side_is_left_to_the_general_way(rng):
    request = RawForwardRequest(query=X, num_heads=2)
    assert direct(bind(None, request), request, "fused", CPU) is None


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf, 1.0])
def test_raw_numbers_that_could_harm_others_are_left_to_the_general_way(rng, where, number):
    inputs = {name: rng.standard_normal((1, 2, 5, 8)).astype(np.float32) for name in ("query", "key", "value")}
    inputs[where][0, 0, 3, 2] = number
    found, general = both(None, RawForwardRequest(**inputs, spec=CAUSAL))
    assert (found is not None) is (number == 1.0 or where == "query")
    assert np.isfinite(general[0, 0, :3]).all()


def test_the_joint_projection_is_taken_where_one_tensor_has_all_roles(rng, monkeypatch):
    taken = []
    real = forward.direct.__globals__["project_jointly"]
    monkeypatch.setitem(forward.direct.__globals__, "project_jointly", lambda *x: taken.append(1) or real(*x))
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    here = module(rng, CAUSAL, num_kv_heads=1)
    found, _ = both(here, ForwardRequest(query=x))
    assert taken == [1]
    apart, _ = both(here, ForwardRequest(query=x, key=x.copy()))
    assert taken == [1]
    np.testing.assert_allclose(found, apart, rtol=1e-5, atol=1e-6)


X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
MORE = {
    "weights": {"return": ["output", "weights"]},
    "no output": {"return": ["weights"]},
    "a mask": {"mask": np.ones((5, 5), bool)},
    "lengths": {"key_lengths": np.array([3, 5])},
    "offsets": {"offsets": np.array(1)},
    "an edit": {"edits": [{"tap": "weights", "set": 0.0}]},
    "dropout": {"dropout": {"p": 0.5, "seed": 1}},
    "no queries": {"query": X[:, :0], "key": X},
    "no keys": {"key": X[:, :0]},
    "half precision": {"query": X.astype(np.float16)},
    "an answer in float64": {"query": X.astype(np.float64)},
}
SPECS = {
    "softcap": {"softcap": 5.0},
    "sigmoid": {"normalizer": {"name": "sigmoid"}},
    "sparsemax": {"normalizer": {"name": "sparsemax"}},
    "cosine": {"score": {"name": "cosine"}},
    "bilinear": {"score": {"name": "bilinear"}},
    "rope": {"position": {"name": "rope"}},
    "alibi": {"position": {"name": "alibi"}},
    "window": {"masks": [{"name": "sliding_window", "left": 2}]},
    "both": {"masks": [{"name": "causal"}, {"name": "sliding_window", "left": 2}]},
    "extra": {"add_zero_attn": True},
    "norm": {"qk_norm": {}},
    "linear": {"method": {"name": "linear"}},
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_requests_for_more_are_left_to_the_general_way(rng, more):
    request = ForwardRequest(**{"query": X} | more)
    assert direct(bind(module(rng), request), request, "fused", CPU) is None


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_other_specs_are_left_to_the_general_way(rng, spec):
    request = ForwardRequest(query=X)
    here = module(rng, AttentionSpec(**spec))
    assert direct(bind(here, request), request, "fused", CPU) is None


@pytest.mark.parametrize("softmax", [{"sinks": True}, {"dtype": "float64"}, {"dtype": "float16"}], ids=str)
def test_a_softmax_that_the_fused_kernel_has_not_is_left_to_the_general_way(rng, softmax):
    device = Device(CPU, "test", 2**34, Roofline(Rates(1e11, 1e10, 1e-5)))
    for options, taken in (({}, True), (softmax, False)):
        spec = AttentionSpec(normalizer={"name": "softmax"} | options)
        outline = forward.outline_of(module(rng, spec), ForwardRequest(query=X), device, 2**40)
        assert (outline.direct is not None) is taken


def test_other_kernels_devices_and_dtypes_are_left_to_the_general_way(rng):
    request = ForwardRequest(query=X)
    bound = bind(module(rng), request)
    assert direct(bound, request, "fused", CPU) is not None
    assert direct(bound, request, "materialized", CPU) is None
    assert direct(bound, request, "fused", torch.device("cuda")) is None
    for config in ({"dtype": "float16"}, {"dtype": "bfloat16"}, {"head_dim": 4, "value_dim": 3}):
        bound = bind(module(rng, **config), request)
        assert direct(bound, request, "fused", CPU) is None


@pytest.mark.parametrize(("queries", "keys", "taken"), [(5, 5, True), (3, 5, False), (5, 3, False)])
def test_causal_from_the_end_is_plainly_causal_where_there_are_as_many_queries_as_keys(rng, queries, keys, taken):
    here = module(rng, AttentionSpec(masks=[Causal(align="bottom_right")]))
    found, general = both(here, ForwardRequest(query=X[:, :queries], key=X[:, :keys].copy()))
    assert (found is not None) is taken
    if taken:
        np.testing.assert_allclose(found, general, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, "most", "root", 1.0])
def test_numbers_that_could_harm_others_are_left_to_the_general_way(rng, dtype, where, number):
    most = float(np.finfo(dtype).max)
    number = {"most": most, "root": 4 * most**0.5}.get(number, number)
    inputs = {name: rng.standard_normal((2, 5, 8)).astype(dtype) for name in ("query", "key", "value")}
    inputs[where][0, 3, 2] = number
    here = module(rng, CAUSAL, dtype=dtype)
    found, general = both(here, ForwardRequest(**inputs))
    assert (found is not None) is (number == 1.0 or where == "query")
    if found is not None:
        np.testing.assert_allclose(found, general, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert np.isfinite(general[1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("biased", [True, False])
def test_up_to_the_bound_all_keys_and_values_are_finite(rng, dtype, size, biased):
    weights = {f"{role}_proj.weight": torch.from_numpy(rng.standard_normal((8, 8))).to(dtype) * size for role in "kv"}
    biases = {f"{role}_proj.bias": torch.full((8,), 0.02 * torch.finfo(dtype).max, dtype=dtype) for role in "kv"}
    parameters = weights | (biases if biased else {})
    most = _most(parameters, dtype)
    assert most > 0
    for role in "kv":
        weight = parameters[f"{role}_proj.weight"]
        worst = weight[weight.double().norm(dim=1).argmax()].double()
        x = (worst / worst.norm() * math.sqrt(most) * (1 - 1e-6)).to(dtype)  # it points where the product is greatest
        assert _loaded(x.numpy(), x.numpy().dtype, most) is not None
        assert linear(x, weight, parameters.get(f"{role}_proj.bias")).isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"])
def test_parameters_that_are_no_numbers_are_left_to_the_general_way(rng, name, number):
    here = module(rng)
    here.parameters[name][..., 3] = number
    assert _most(here.parameters, torch.float32) < 0
    found, _ = both(here, ForwardRequest(query=X))
    assert found is None


@pytest.mark.parametrize("size", [0, 1, 100, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sent", ["float32", "float64"])
def test_arrays_are_loaded_as_far_as_their_squares_are_bounded(rng, size, sent, dtype):
    x = rng.standard_normal(size).astype(sent)
    squares = float((x.astype(np.float64) ** 2).sum())
    for most in (squares * 1.001 + 1e-9, math.inf):
        np.testing.assert_array_equal(_loaded(x, np.dtype(dtype), most).numpy(), x.astype(dtype))
    assert size == 0 or _loaded(x, np.dtype(dtype), squares * 0.999) is None
    largest = math.inf if sent == "float32" and dtype == "float64" else np.finfo(sent).max
    for number in (largest, math.inf, math.nan)[: 3 * size]:
        x[-1] = number
        assert _loaded(x, np.dtype(dtype), float(np.finfo(dtype).max)) is None


@pytest.mark.parametrize("sent", [np.float64, np.float32])
def test_numbers_without_a_dtype_of_their_own_are_converted(rng, sent):
    x = rng.standard_normal((2, 5, 8)).astype(sent)
    here = module(rng)
    found, general = both(here, ForwardRequest(query=X, key=x))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, general, rtol=1e-5, atol=1e-6)
    if sent is np.float64:
        x[0, 0, 0] = 1e300
        bound = bind(here, ForwardRequest(query=X, key=x))
        assert direct(bound, ForwardRequest(query=X, key=x), "fused", CPU).run(bound) is None
