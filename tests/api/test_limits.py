"""What is said to fit is admitted, and what is larger refused: found by trying, on a server with little memory."""

import numpy as np
import pytest

from attention_client import Client
from attention_contract.errors import NeverFits, OverBudget
from tests.api.talk import post, refuse
from tests.conftest import live_server

WIDTH, HEADS = 32, 4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models"), memory_budget=3 * 2**20) as url, Client(url) as client:
        client.modules.create("m", {"d_model": WIDTH, "num_heads": HEADS}, seed=0)
        yield client


def admitted(ask, size):
    """What ran; None where it was refused for its size."""
    try:
        return ask(size).ran
    except (OverBudget, NeverFits):
        return None


def tried(ask, least, most):
    """The largest size that is admitted, by bisection over requests."""
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if admitted(ask, middle) else (least, middle)
    return least


def tokens(batch, length):
    return np.zeros((batch, length, WIDTH), np.float32)


def heads(batch, length):
    return np.zeros((batch, HEADS, length, WIDTH // HEADS), np.float32)


def question(client, name, kind, options):
    """How a length is asked for, and what is told of the longest."""
    ask = {
        "forward": lambda n: client.forward(name, tokens(2, n), **options),
        "weights": lambda n: client.forward(name, tokens(2, n), return_=["output", "weights"], **options),
        "gradients": lambda n: client.gradients(name, tokens(2, n), wrt=["query", "parameters"], **options),
    }[kind]
    returned = {"return_": ["output", "weights"]} if kind == "weights" else {}
    limits = client.complexity(name, {"batch": 2, "queries": 8}, **options, **returned).limits
    return ask, (limits.gradients if kind == "gradients" else limits.forward).longest


@pytest.mark.parametrize(
    ("kind", "kernel"), [("forward", None), ("forward", "blocked"), ("weights", None), ("gradients", None)]
)
@pytest.mark.slow
def test_the_longest_of_a_module_is_the_longest_that_is_admitted(small, kind, kernel):
    ask, limit = question(small, "m", kind, {"kernel": kernel} if kernel else {})
    assert limit.bound == "memory"
    assert tried(ask, 1, 4 * limit.size) == limit.size
    ran = admitted(ask, limit.size)
    assert (ran.kernel, ran.peak_bytes) == (limit.kernel, limit.peak_bytes)
    assert admitted(ask, int(limit.size * 1.02) + 1) is None


SPECS = {
    "turned": {"position": {"name": "rope"}, "qk_norm": {}, "masks": [{"name": "causal"}]},
    "additive": {"score": {"name": "additive"}, "normalizer": {"name": "entmax15"}},
    "linear": {"method": {"name": "linear", "rule": "gated_delta"}, "masks": [{"name": "causal"}]},
    "nystrom": {"method": {"name": "nystrom", "landmarks": 16}},
}


@pytest.mark.sampled(spec=1, kind=1)
@pytest.mark.parametrize(
    ("spec", "kind"),
    [("turned", "gradients"), ("additive", "forward"), ("linear", "gradients"), ("nystrom", "forward")],
)
def test_so_is_that_of_other_specs_and_of_methods(small, spec, kind):
    name = f"of-{spec}"
    small.modules.create(name, {"d_model": WIDTH, "num_heads": HEADS, "spec": SPECS[spec]}, seed=0)
    try:
        ask, limit = question(small, name, kind, {})
        assert limit.bound == "memory"
        ran = admitted(ask, limit.size)
        assert (ran.kernel, ran.peak_bytes) == (limit.kernel, limit.peak_bytes)
        assert admitted(ask, int(limit.size * 1.02) + 1) is None
    finally:
        small.modules.delete(name)


@pytest.mark.sampled(question=1)
@pytest.mark.parametrize("question", ["forward", "gradients"])
def test_the_largest_batch_of_raw_attention_is_the_largest_that_is_admitted(small, question):
    def ask(batch):
        x = heads(batch, 32)
        if question == "forward":
            return small.attention.forward(x, x, x)
        return small.attention.gradients(x, x, x, wrt=["query", "key", "value"])

    shape = {"queries": 32, "keys": 32}
    limits = small.attention.complexity(shape, num_heads=HEADS, head_dim=WIDTH // HEADS).limits
    limit = getattr(limits, question).largest_batch
    assert tried(ask, 1, 4 * limit.size) == limit.size
    assert admitted(ask, limit.size).kernel == limit.kernel


def test_weights_that_are_returned_count(small):
    def ask(length):
        return small.forward("m", tokens(1, length), return_=["output", "weights"])

    limit = small.complexity("m", 8, return_=["output", "weights"]).limits.forward.longest
    assert tried(ask, 1, 4 * limit.size) == limit.size


def test_what_is_free_is_what_the_modules_leave(small):
    memory = small.server.info().memory
    limits = small.complexity("m", 8).limits
    assert limits.free_bytes == memory.free_bytes == 3 * 2**20 - memory.resident_bytes
    assert small.complexity("m", 8, memory_bytes=2**40).limits.free_bytes == 2**40


# ── the rest of the answers, in JSON ─────────────────────────────────────────────────────────────────────────────────

RAW = {"shape": {"queries": 128}, "num_heads": 8, "head_dim": 64}
LITTLE = {"memory_bytes": 2**24}
"""So that limits are found soon."""


@pytest.mark.slow
def test_alternatives_stand_side_by_side(http):
    reply = post(
        http, "/v1/attention/complexity", **RAW, **LITTLE, sweep={"values": [128, 4096]},
        compare=[
            {"label": "window", "spec": {"masks": [{"name": "sliding_window", "left": 64, "right": 0}]}},
            {"num_kv_heads": 1}, {"hardware": "h100-sxm", "dtype": "bfloat16"},
        ],
    )  # fmt: skip
    labels = [one["label"] for one in reply["compared"]]
    assert labels == ["request", "window", "num_kv_heads 1", "bfloat16, h100-sxm"]
    assert reply["compared"][0]["costs"] == reply["costs"]
    window, grouped, elsewhere = reply["compared"][1:]
    assert grouped["costs"][0]["kv_cache_bytes"] * 8 == reply["costs"][0]["kv_cache_bytes"]
    assert elsewhere["device_name"] == "H100 SXM"
    assert elsewhere["costs"][0]["predicted"]["basis"] == "datasheet"
    assert window["costs"][1]["allowed_pairs"] < reply["costs"][1]["allowed_pairs"]
    found = [one for one in reply["crossovers"] if one["between"] == ["request", "window"] and one["of"] == "flops"]
    assert found[0]["cheaper"] == "window"
    assert 64 < found[0]["at"] < 4096


def test_a_module_can_be_supposed_wider(http):
    post(http, "/v1/modules", name="supposed", config={"d_model": 64, "num_heads": 4}, seed=0)
    body = {"shape": {"queries": 16}, "sweep": {"dimension": "d_model", "values": [64, 128, 256]}} | LITTLE
    reply = post(http, "/v1/modules/supposed/complexity", **body)
    assert [cost["parameter_bytes"] for cost in reply["costs"]] == [4 * (4 * d * d + 4 * d) for d in (64, 128, 256)]
    assert reply["projections_crossover"] == 128
    body["sweep"]["values"][2] = 255
    assert refuse(http, "/v1/modules/supposed/complexity", **body)["param"] == "sweep.values.2"


@pytest.mark.slow
def test_the_table_of_hardware_can_be_used_by_its_names(http):
    table = http.get("/v1/complexity/hardware").json()
    assert table["efficiency"]["best"]["flops"] == 1
    for one in table["hardware"][::5]:
        body = {"hardware": one["name"], "dtype": next(iter(one["tflops"])), "kernel": "materialized"}
        assert post(http, "/v1/attention/complexity", **RAW, **LITTLE, **body)["device_name"] == one["name"]
    limits = post(http, "/v1/attention/complexity", **RAW, **body)["limits"]
    assert limits["free_bytes"] == one["memory_bytes"] >= limits["forward"]["longest"]["peak_bytes"]
    assert "H100 SXM" in refuse(http, "/v1/attention/complexity", **RAW, hardware="Abacus")["detail"]
