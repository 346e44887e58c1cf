"""What other interfaces of attention can say, said here over HTTP: the same numbers, from the libraries themselves."""

import itertools

import numpy as np
import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

TAPS = ("scores", "capped_scores", "masked_scores", "weights")
"""In the order of ONNX's qk_matmul_output_mode, 0 to 3."""
NEEDS = "needs the extra dev"


# ── ONNX's operator Attention, opsets 23 to 25 ───────────────────────────────────────────────────────────────────────


def by_onnx(inputs, opset=25, **attributes):
    """Y, present_key, present_value and qk_matmul_output of ONNX's own evaluator."""
    helper, reference = (pytest.importorskip(f"onnx.{name}", reason=NEEDS) for name in ("helper", "reference"))
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    listed = [name if name in inputs else "" for name in names]
    while not listed[-1]:
        listed.pop()
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
    node = helper.make_node("Attention", listed, ["Y", "present_key", "present_value", "qk"], **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, types[name], x.shape) for name, x in inputs.items()],
        [helper.make_tensor_value_info(name, types["Q"], None) for name in ("Y", "present_key", "present_value", "qk")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return reference.ReferenceEvaluator(model).run(None, inputs)


def as_request(inputs, attributes):
    """The same in the words of this service."""
    q = inputs["Q"]
    spec: dict = {"score": {"name": "scaled_dot", "scale": attributes.get("scale")}, "masks": []}
    if attributes.get("softcap"):
        spec["softcap"] = attributes["softcap"]
    if attributes.get("is_causal"):
        spec["masks"].append({"name": "causal"})
    window = {side: attributes.get(f"{side}_window_size", -1) for side in ("left", "right")}
    if max(window.values()) >= 0:
        limits = {side: size if size >= 0 else None for side, size in window.items()}
        spec["masks"].append({"name": "sliding_window", **limits})
    request = {"spec": spec, "mask": inputs.get("attn_mask")}
    request |= {name: inputs.get(name) for name in ("past_key", "past_value")}
    if "q_num_heads" in attributes:
        request |= {"num_heads": attributes["q_num_heads"], "num_kv_heads": attributes["kv_num_heads"]}
    if "nonpad_kv_seqlen" in inputs:  # a cache that the caller keeps: its last valid key is the last query's own
        request["key_lengths"] = inputs["nonpad_kv_seqlen"]
        request["offsets"] = inputs["nonpad_kv_seqlen"] - (q.shape[1] if q.ndim == 3 else q.shape[2])
    return {name: value for name, value in request.items() if value is not None}


B, H, HKV, LQ, LK, P, D, V = 2, 4, 2, 3, 5, 4, 6, 7
GENERATOR = np.random.default_rng(11)


def normal(*shape):
    return GENERATOR.standard_normal(shape)


def four_d(kv_heads=HKV):
    return {"Q": normal(B, H, LQ, D), "K": normal(B, kv_heads, LK, D), "V": normal(B, kv_heads, LK, V)}


def three_d(kv_heads=HKV):
    return {"Q": normal(B, LQ, H * D), "K": normal(B, LK, kv_heads * D), "V": normal(B, LK, kv_heads * V)}


PAST = {"past_key": normal(B, HKV, P, D), "past_value": normal(B, HKV, P, V)}
LENGTHS = {"nonpad_kv_seqlen": np.array([5, 3])}
SPLIT = {"q_num_heads": H, "kv_num_heads": HKV}
MASKS = {
    f"{kind} mask of rank {len(shape)}, {shape[-1]} keys": {
        "attn_mask": normal(*shape) if kind == "float" else normal(*shape) > -0.7
    }
    for kind in ("bool", "float")
    for shape in ((LQ, LK), (LQ, LK - 2), (H, LQ, LK), (B, 1, LQ, LK), (B, H, LQ, LK - 1))
}
CASES = {
    "4-D": (four_d(), {}),
    "3-D": (three_d(), SPLIT),
    "3-D, one head for all": (three_d(1), SPLIT | {"kv_num_heads": 1}),
    "as many key heads": (four_d(kv_heads=H), {}),
    "scale": (four_d(), {"scale": 0.25}),
    "softcap": (four_d(), {"softcap": 1.5}),
    "causal": (four_d(), {"is_causal": 1}),
    "past": (four_d() | PAST, {}),
    "causal, past": (four_d() | PAST, {"is_causal": 1}),
    "3-D, causal, past": (three_d() | PAST, {"is_causal": 1} | SPLIT),
    "cache with lengths": (four_d() | LENGTHS, {}),
    "causal, cache with lengths": (four_d() | LENGTHS, {"is_causal": 1}),
    "window, cache with lengths": (four_d() | LENGTHS, {"left_window_size": 1, "right_window_size": 0}),
    "windows": (four_d(), {"left_window_size": 1, "right_window_size": 2}),
    "left window": (four_d(), {"left_window_size": 0}),
    "right window, past": (four_d() | PAST, {"right_window_size": 1}),
    "causal, left window, past, softcap": (four_d() | PAST, {"is_causal": 1, "left_window_size": 2, "softcap": 2.0}),
} | {
    f"{name}{', causal' if causal else ''}": (four_d() | mask, {"is_causal": causal})
    for (name, mask), causal in itertools.product(MASKS.items(), (0, 1))
}  # fmt: skip


@pytest.mark.sampled(name=12)
@pytest.mark.parametrize("name", CASES)
def test_onnx_attention(name, client):
    inputs, attributes = CASES[name]
    request = as_request(inputs, attributes)
    reply = client.attention.forward(inputs["Q"], inputs["K"], inputs["V"], return_=["output", *TAPS], **request)
    scores = []
    for mode in range(4):
        # Its evaluator returns capped scores in the mode of the raw ones, too.
        given = {name: value for name, value in attributes.items() if mode or name != "softcap"}
        y, key, value, qk = by_onnx(inputs, qk_matmul_output_mode=mode, **given)
        scores.append(qk)
    np.testing.assert_allclose(reply.output, y, rtol=0, atol=1e-10)
    seen = np.isfinite(reply.masked_scores)
    if "past_key" in inputs:
        np.testing.assert_array_equal(reply.present_key, key)
        np.testing.assert_array_equal(reply.present_value, value)
    for tap, expected in zip(TAPS, scores, strict=True):
        # Of padding there is no score here, only a mask.
        where = seen if tap in {"scores", "capped_scores"} else np.True_
        found = np.where(where, getattr(reply, tap), 0)
        np.testing.assert_allclose(found, np.where(where, expected, 0), rtol=0, atol=1e-10, err_msg=tap)


# ── torch.nn.MultiheadAttention's added keys ─────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_added_keys_of_torch(client):
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(
        8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True, dtype=torch.float64
    )
    state = {name: x.detach() for name, x in theirs.state_dict().items()}
    names = [f"{role}_proj" for role in "qkv"]
    parameters = dict(zip([f"{n}.weight" for n in names], state["in_proj_weight"].chunk(3), strict=True))
    parameters |= dict(zip([f"{n}.bias" for n in names], state["in_proj_bias"].chunk(3), strict=True))
    parameters |= {"o_proj.weight": state["out_proj.weight"], "o_proj.bias": state["out_proj.bias"]}
    parameters |= {each: state[each].flatten() for each in ("bias_k", "bias_v")}
    name = "added"
    spec = {"masks": [{"name": "causal"}], "add_bias_kv": True, "add_zero_attn": True}
    made = client.modules.create(name, {"d_model": 8, "num_heads": 2, "spec": spec}, parameters=parameters)
    assert made.parameter_count == sum(p.numel() for p in theirs.parameters())
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    output, weights = theirs(x, x, x, key_padding_mask=hidden, attn_mask=causal, average_attn_weights=False)
    assert weights.shape == (2, 2, 5, 7)
    upstream = torch.randn_like(output)
    gradients = torch.autograd.grad(output, [x, *theirs.parameters()], upstream)
    request = {"key_mask": ~hidden}
    for kernel in client.server.variants().variants:
        if kernel.kind != "kernel":
            continue
        reply = client.forward(name, x, return_=["output", "weights"], kernel=kernel.name, **request)
        np.testing.assert_allclose(reply.output, output.detach(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(reply.weights, weights.detach(), rtol=0, atol=1e-12)
    found = client.gradients(name, x, upstream=upstream, wrt=["query", "parameters"], check=True, **request)
    assert all(check.passed for check in found.check.values())
    np.testing.assert_allclose(found.gradients["query"], gradients[0], rtol=0, atol=1e-12)
    by_name = dict(zip([n for n, _ in theirs.named_parameters()], gradients[1:], strict=True))
    for each in ("bias_k", "bias_v"):
        np.testing.assert_allclose(found.gradients[each], by_name[each].flatten(), rtol=0, atol=1e-12)
    cost = client.complexity(name, 5).costs[0]
    assert cost.pairs == 5 * 7
    assert cost.allowed_pairs == 15 + 10


# ── JAX's lengths and windows ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow  # JAX compiles for seconds; lengths and windows are held against plain loops in core
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_lengths_of_jax(causal, window, client):
    jax = pytest.importorskip("jax", reason=NEEDS)
    q, k, v = normal(B, LQ, H, D), normal(B, LK, HKV, D), normal(B, LK, HKV, D)
    queries, keys = np.array([3, 1], np.int32), np.array([2, 5], np.int32)
    expected = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, local_window_size=window, query_seq_lengths=queries, key_value_seq_lengths=keys
    )
    masks = [{"name": "causal"}] if causal else []
    masks += [{"name": "sliding_window", "left": window[0], "right": window[1]}] if window else []
    reply = client.attention.forward(
        *(x.transpose(0, 2, 1, 3) for x in (q, k, v)),
        spec={"masks": masks},
        key_lengths=keys,
        mask=(np.arange(LQ) < queries[:, None])[:, None, :, None],
    )
    # Its softmax runs in float32, whatever it is given.
    np.testing.assert_allclose(reply.output.transpose(0, 2, 1, 3), expected, rtol=0, atol=1e-6)


# ── gpt-oss's sinks ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_sinks_of_gpt_oss(client):
    class Layer(torch.nn.Module):
        num_key_value_groups = H // HKV
        sinks = torch.from_numpy(normal(H))

    q, k, v = (torch.from_numpy(normal(B, heads, LK, D)).requires_grad_() for heads in (H, HKV, HKV))
    causal = torch.full((LK, LK), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    layer = Layer()
    layer.sinks.requires_grad_()
    output, weights = eager_attention_forward(layer, q, k, v, causal, scaling=D**-0.5)
    upstream = torch.randn_like(output)
    expected = torch.autograd.grad(output, [q, k, v, layer.sinks], upstream)
    spec = {"masks": [{"name": "causal"}], "normalizer": {"sinks": True}}
    request = {"spec": spec, "parameters": {"sinks": layer.sinks}}
    reply = client.attention.forward(q, k, v, return_=["output", "weights"], **request)
    np.testing.assert_allclose(reply.output, output.detach().transpose(1, 2), rtol=0, atol=1e-10)
    np.testing.assert_allclose(reply.weights, weights.detach(), rtol=0, atol=1e-10)
    names = ["query", "key", "value", "sinks"]
    found = client.attention.gradients(q, k, v, wrt=names, upstream=upstream.transpose(1, 2), check=True, **request)
    assert all(check.passed for check in found.check.values())
    for name, gradient in zip(names, expected, strict=True):
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=0, atol=1e-10)
