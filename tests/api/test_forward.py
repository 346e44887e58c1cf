"""Forward over HTTP: the numbers of PyTorch, the layouts of the contract, and what it refuses."""

import httpx
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention_contract.schemas.attention import ForwardReply, ForwardRequest, RawForwardRequest
from attention_contract.wire import JSON, SAFETENSORS, from_body, to_body
from tests.api.talk import post, refuse

Q = [[1, 0], [0, 1]]
K = [[1, 0], [0, 1], [1, 1]]
V = [[1, 2], [3, 4], [5, 6]]
DOT = {"score": {"name": "dot"}}


def test_the_attention_that_is_followed_by_hand(http):
    reply = post(
        http, "/v1/attention/forward", query=Q, key=K, value=V, spec=DOT, **{"return": ["scores", "weights", "output"]}
    )
    assert reply["scores"] == [[1, 0, 1], [0, 1, 1]]
    np.testing.assert_allclose(reply["weights"], [[0.4223, 0.1554, 0.4223], [0.1554, 0.4223, 0.4223]], atol=5e-5)
    # The published 3.5338 and 4.5338 come from weights rounded to four digits.
    np.testing.assert_allclose(reply["output"], [[3, 4], [3.5338, 4.5338]], atol=2e-4)
    assert reply["ran"]["dtype"] == "float32"


LAYOUTS = {
    "batched": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), {}),
    "unbatched": ((4, 5, 8), (2, 7, 8), (2, 7, 6), {}),
    "merged": ((2, 5, 32), (2, 7, 16), (2, 7, 12), {"num_heads": 4, "num_kv_heads": 2}),
    "merged_unbatched": ((5, 32), (7, 16), (7, 12), {"num_heads": 4, "num_kv_heads": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("media_type", [JSON, SAFETENSORS])
def test_every_layout_gives_the_numbers_of_pytorch_and_is_kept(http, rng, layout, media_type):
    q_shape, k_shape, v_shape, heads = LAYOUTS[layout]
    q, k, v = (rng.normal(size=shape) for shape in (q_shape, k_shape, v_shape))
    request = RawForwardRequest(query=q, key=k, value=v, return_=["output", "weights", "lse", "q", "k"], **heads)
    body = b"".join(to_body(request, media_type, "request", "base64"))
    answer = http.post(
        "/v1/attention/forward", content=body, headers={"content-type": media_type, "accept": media_type}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == media_type
    reply = from_body(ForwardReply, answer.content, media_type, "reply")

    split = [
        torch.from_numpy(x).unflatten(-1, (n, -1)).transpose(-3, -2) if heads else torch.from_numpy(x)
        for x, n in ((q, 4), (k, 2), (v, 2))
    ]
    expected = sdpa(*split, enable_gqa=True)
    if heads:
        expected = expected.transpose(-3, -2).flatten(-2)
    np.testing.assert_allclose(reply.output, expected, atol=1e-12 if media_type == SAFETENSORS else 1e-6)
    assert reply.weights.shape == (*q_shape[: len(q_shape) - (2 if heads else 3)], 4, 5, 7)
    np.testing.assert_allclose(reply.weights.sum(-1), 1, atol=1e-6)
    assert reply.k.shape[-3:] == (2, 7, 8)


@pytest.fixture(scope="module")
def module(server):
    config = {"d_model": 12, "num_heads": 3, "num_kv_heads": 1, "head_dim": 4, "value_dim": 5, "key_width": 7}
    config |= {"value_width": 9, "dtype": "float64"}
    answer = httpx.post(f"{server}/v1/modules", json={"name": "fwd", "config": config, "seed": 3})
    assert answer.status_code == 201, answer.text
    return "fwd"


def test_a_module_is_its_projections_around_attention(http, module, rng):
    names = [row["name"] for row in http.get(f"/v1/modules/{module}/parameters").json()["parameters"]]
    p = {
        name: torch.tensor(http.get(f"/v1/modules/{module}/parameters/{name}").json()["value"]).double()
        for name in names
    }
    assert p["v_proj.weight"].shape == (5, 9)
    query, key, value = (torch.from_numpy(rng.normal(size=(2, n, w))) for n, w in ((4, 12), (6, 7), (6, 9)))
    linear = torch.nn.functional.linear
    q = linear(query, p["q_proj.weight"], p["q_proj.bias"]).unflatten(-1, (3, 4)).transpose(1, 2)
    k = linear(key, p["k_proj.weight"], p["k_proj.bias"]).unflatten(-1, (1, 4)).transpose(1, 2)
    v = linear(value, p["v_proj.weight"], p["v_proj.bias"]).unflatten(-1, (1, 5)).transpose(1, 2)
    expected = linear(sdpa(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2), p["o_proj.weight"], p["o_proj.bias"])
    request = ForwardRequest(query=query.numpy(), key=key.numpy(), value=value.numpy(), return_=["output", "v"])
    body = b"".join(to_body(request, SAFETENSORS, "request"))
    answer = http.post(f"/v1/modules/{module}/forward", content=body, headers={"content-type": SAFETENSORS})
    reply = from_body(ForwardReply, answer.content, answer.headers["content-type"], "reply")
    assert reply.output.dtype == np.float64
    # The parameters came as JSON numbers, which carry all digits of a float64.
    np.testing.assert_allclose(reply.output, expected, atol=1e-12)
    np.testing.assert_allclose(reply.v, v, atol=1e-12)


def test_decoding_with_a_past_gives_the_whole_sequence(http, rng):
    config = {"d_model": 8, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}
    assert http.post("/v1/modules", json={"name": "dec", "config": config}).status_code == 201
    x = rng.normal(size=(1, 6, 8)).astype(np.float32).tolist()
    whole = post(http, "/v1/modules/dec/forward", query=x, **{"return": ["output", "k", "v"]})
    key = [[head[:4] for head in whole["k"][0]]]
    value = [[head[:4] for head in whole["v"][0]]]
    rest = post(http, "/v1/modules/dec/forward", query=[x[0][4:]], past_key=key, past_value=value)
    np.testing.assert_allclose(rest["output"], np.array(whole["output"])[:, 4:], atol=1e-6)
    np.testing.assert_allclose(rest["present_key"], whole["k"], atol=1e-6)


def test_taps_do_not_change_the_output_and_selection_narrows_them(http, rng):
    q = rng.normal(size=(2, 4, 9, 8)).tolist()
    plain = post(http, "/v1/attention/forward", query=q)
    taps = ["q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context", "lse", "output"]
    every = post(http, "/v1/attention/forward", query=q, **{"return": taps})
    some = post(http, "/v1/attention/forward", query=q, select={"heads": [3, 1], "queries": [0, 8]}, **{"return": taps})
    assert plain["output"] == every["output"] == some["output"]
    assert plain["ran"]["kernel"] == every["ran"]["kernel"] == "fused"
    for tap in ("scores", "weights", "context", "q"):
        np.testing.assert_allclose(some[tap], np.array(every[tap])[:, [3, 1]][:, :, [0, 8]], atol=1e-6)
    np.testing.assert_allclose(some["k"], np.array(every["k"])[:, [3, 1]], atol=1e-6)
    averaged = post(http, "/v1/attention/forward", query=q, average_heads=True, **{"return": ["weights"]})
    np.testing.assert_allclose(averaged["weights"], np.array(every["weights"]).mean(1), atol=1e-6)
    assert "output" not in averaged


def test_a_query_that_may_look_nowhere_gets_zeros(http):
    reply = post(http, "/v1/attention/forward", query=Q, key=K, value=V, mask=[[False] * 3, [True] * 3],
                 **{"return": ["output", "weights", "lse", "masked_scores"]})  # fmt: skip
    assert reply["output"][0] == [0, 0]
    assert reply["weights"][0] == [0, 0, 0]
    assert reply["lse"][0] == "-Infinity"
    assert reply["masked_scores"][0] == ["-Infinity"] * 3


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 422, "invalid_request", "query"),
        ({"query": [[1, 2], [3]]}, 422, "invalid_tensor", "query"),
        ({"query": [1.0]}, 422, "shape_mismatch", "query"),
        ({"query": Q, "key": [[1, 0, 0]]}, 422, "shape_mismatch", "key"),
        ({"query": Q, "key": K, "value": Q}, 422, "shape_mismatch", "value"),
        ({"query": Q, "mask": [[True, True, True, True]]}, 422, "shape_mismatch", "mask"),
        ({"query": Q, "key_mask": [True]}, 422, "shape_mismatch", "key_mask"),
        ({"query": [[Q]], "key_lengths": [7]}, 422, "invalid_request", "key_lengths"),
        ({"query": Q, "past_key": [[1, 0]]}, 422, "invalid_request", "past_value"),
        ({"query": Q, "positions": [[0, 1]]}, 422, "invalid_request", "positions"),
        ({"query": Q, "return": ["wieghts"]}, 422, "invalid_request", "return.0"),
        ({"query": Q, "select": {"heads": [1]}}, 422, "invalid_request", "select.heads"),
        ({"query": Q, "select": {"queries": [2]}}, 422, "invalid_request", "select.queries"),
        ({"query": Q, "edits": [{"tap": "weights", "heads": [4], "set": 0}]}, 422, "invalid_request", "edits.0.heads"),
        ({"query": Q, "edits": [{"tap": "q", "keys": [0], "set": 0}]}, 422, "invalid_request", "edits.0.keys"),
        ({"query": Q, "edits": [{"tap": "q"}]}, 422, "invalid_request", "edits.0"),
        ({"query": Q, "kernel": "fused", "spec": {"softcap": 5}}, 422, "kernel_unsuitable", "kernel"),
        ({"query": Q, "version": "x"}, 422, "invalid_request", "version"),
        ({"query": Q, "parameters": {"score.weight": [1]}}, 422, "invalid_request", "parameters.score.weight"),
        ({"query": Q, "num_heads": 3}, 422, "shape_mismatch", "query"),
        ({"query": Q, "num_kv_heads": 1}, 422, "invalid_request", "num_kv_heads"),
        ({"query": Q, "spec": {"score": {"name": "rope"}}}, 422, "invalid_request", "spec.score"),
        (
            {"query": {"dtype": "float32", "shape": [1, 2], "data": [1, 2]},
             "key": {"dtype": "float64", "shape": [1, 2], "data": [1, 2]}},
            422, "invalid_tensor", "key",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_named(http, body, status, code, param):
    problem = refuse(http, "/v1/attention/forward", **body)
    assert (problem["status"], problem["code"], problem.get("param")) == (status, code, param)


def test_a_number_too_large_for_the_module_is_refused_and_harms_nobody(http):
    config = {"d_model": 2, "num_heads": 1, "dtype": "float16"}
    assert http.post("/v1/modules", json={"name": "half", "config": config}).status_code == 201
    problem = refuse(http, "/v1/modules/half/forward", query=[[1e6, 0]])
    assert (problem["status"], problem["param"]) == (422, "query")
    assert len(post(http, "/v1/modules/half/forward", query=[[1.0, 0]])["output"]) == 1
