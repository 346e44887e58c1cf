"""Complexity over HTTP: exact counts, masked counts, and the agreement with what runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.api.talk import post, refuse

LITTLE = 2**24
"""Free bytes, few, so that limits are found soon."""


def test_a_modules_counts_are_those_of_pytorch(http):
    post(http, "/v1/modules", name="cost", config={"d_model": 64, "num_heads": 4}, seed=0)
    reply = post(http, "/v1/modules/cost/complexity", shape={"batch": 2, "queries": 32}, memory_bytes=LITTLE)
    with torch.device("meta"):
        attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        x = torch.empty(2, 32, 64)
    with FlopCounterMode(display=False) as counter:
        attention(x, x, x, need_weights=False)
    cost = reply["costs"][0]
    assert cost["forward"]["dense"]["matmul"] == counter.get_total_flops()
    assert reply["parameter_count"] == sum(p.numel() for p in attention.parameters())
    assert cost["kv_cache_bytes_per_token"] == 2 * 64 * 4
    assert cost["peak_bytes"]["materialized"] > cost["peak_bytes"]["fused"] > 0


def test_what_runs_says_the_flops_that_were_counted(http, rng):
    x = rng.normal(size=(16, 64)).tolist()
    post(http, "/v1/modules", name="cost", config={"d_model": 64, "num_heads": 4}, seed=0)
    ran = post(http, "/v1/modules/cost/forward", query=x)["ran"]
    cost = post(http, "/v1/modules/cost/complexity", shape={"queries": 16}, memory_bytes=LITTLE)["costs"][0]
    assert ran["flops"] == cost["forward"]["dense"]["total"]
    assert ran["kernel"] == cost["kernel"]
    assert ran["predicted_ms"] > 0
    assert ran["compute_ms"] > 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"shape": {"queries": 0}}, "shape.queries"),
        ({"shape": {"queries": 4}, "sweep": {"dimension": "length", "values": [4, 0]}}, "sweep.values.1"),
        ({"shape": {"queries": 4}, "kernel": "fused", "spec": {"softcap": 2}}, "kernel"),
        ({"shape": {"queries": 4}, "num_kv_heads": 3}, "num_kv_heads"),
        (
            {"shape": {"queries": 10**9}, "spec": {"masks": [{"name": "random_blocks", "size": 2**20, "count": 1}]}},
            "shape.queries",
        ),
    ],
)
def test_what_cannot_be_is_refused(http, body, param):
    assert refuse(http, "/v1/attention/complexity", num_heads=4, head_dim=8, **body).get("param") == param
