"""Kept passes over HTTP: the numbers of ``gradients`` without computing the forward pass again."""

from contextlib import ExitStack

import numpy as np
import pytest

from attention_client import Client
from attention_contract.errors import InvalidRequest, PassNotFound, ShapeMismatch
from attention_service.api.access.api_keys import create_key
from tests.conftest import live_server

CAUSAL = {"masks": [{"name": "causal"}]}
CONFIG = {"d_model": 8, "num_heads": 2, "num_kv_heads": 1, "dtype": "float64", "spec": CAUSAL}


@pytest.fixture(scope="module")
def client(client):
    client.modules.create("passes", CONFIG, seed=1, durable=False)
    return client


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-12, err_msg=name)


def test_a_module_has_the_output_of_forward_and_the_numbers_of_gradients(client, rng):
    x, upstream = rng.normal(size=(2, 2, 5, 8))
    own = {"q_proj.weight": rng.normal(size=(8, 8)), "o_proj.bias": rng.normal(size=8)}
    for inputs in (
        {},
        {"parameters": own},
        {"dropout": {"p": 0.3, "seed": 5}},
        {"key": x[:, :4], "key_lengths": [2, 4]},
    ):
        wrt = ["query", "parameters"] + ["key"] * ("key" in inputs)
        kept = client.passes.create("passes", x, wrt=wrt, **inputs)
        np.testing.assert_allclose(kept.output, client.forward("passes", x, **inputs).output, rtol=0, atol=1e-12)
        reply = client.passes.backward(kept.id, upstream=upstream)
        again = client.gradients("passes", x, upstream=upstream, wrt=wrt, **inputs)
        equal(reply.gradients, again.gradients)
        assert kept.ran.flops + reply.ran.flops == again.ran.flops
        assert (kept.ran.kernel, reply.ran.kernel) == (again.ran.kernel, again.ran.kernel)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 4), {"spec": {"normalizer": {"name": "sparsemax"}}}),
        ((2, 3, 5, 4), {"spec": CAUSAL, "mask": -np.eye(5)}),
        ((2, 5, 4), {"num_heads": 2, "spec": {"softcap": 2.0}}),
        ((1, 2, 5, 4), {"spec": CAUSAL | {"method": {"name": "linear"}}}),
    ],
)
def test_raw_attention_keeps_its_layout(client, rng, shape, options):
    q, k, v, upstream = rng.normal(size=(4, *shape))
    wrt = ["query", "key", "value"] + ["mask"] * ("mask" in options)
    kept = client.passes.create_raw(q, k, v, wrt=wrt, **options)
    assert kept.output.shape == shape
    reply = client.passes.backward(kept.id, upstream=upstream)
    equal(reply.gradients, client.attention.gradients(q, k, v, wrt=wrt, upstream=upstream, **options).gradients)


def test_the_default_loss_is_the_sum_of_the_output(client, rng):
    x = rng.normal(size=(3, 8)).astype(np.float32)
    kept = client.passes.create("passes", x)
    equal(client.passes.backward(kept.id).gradients, client.gradients("passes", x, wrt=["query"]).gradients)


def test_a_backward_pass_uses_the_pass_up_but_a_wrong_one_does_not(client, rng):
    x = rng.normal(size=(3, 8))
    kept = client.passes.create("passes", x)
    with pytest.raises(ShapeMismatch, match=r"upstream: expected the output's shape \[3, 8\]; got shape \[3, 7\]"):
        client.passes.backward(kept.id, upstream=np.ones((3, 7)))
    client.passes.backward(kept.id, upstream=x)
    for name in (kept.id, "0" * 32):
        with pytest.raises(PassNotFound, match="send gradients with the inputs"):
            client.passes.backward(name, upstream=x)


def test_what_a_kept_pass_cannot_do_is_refused_by_name(client, rng):
    x = rng.normal(size=(3, 8))
    for wrt, param in ((["query", "weights"], "wrt.1"), (["upstream"], "wrt.0"), (["nothing"], "wrt.0")):
        with pytest.raises(InvalidRequest) as refusal:
            client.passes.create("passes", x, wrt=wrt)
        assert refusal.value.param == param
    with pytest.raises(InvalidRequest) as refusal:
        client.passes.create("passes", x, dropout={"p": 0.1, "return_mask": True})
    assert refusal.value.param == "dropout.return_mask"


def test_the_pass_of_a_module_that_changed_is_gone(client, rng):
    x = rng.normal(size=(3, 8))
    client.modules.create("passes-changed", CONFIG, seed=1, durable=False)
    first = client.passes.create("passes-changed", x)
    parameters = {each.name: np.ones(each.shape) for each in client.modules.parameters("passes-changed").parameters}
    client.modules.replace_parameters("passes-changed", parameters)
    second = client.passes.create("passes-changed", x)
    client.modules.delete("passes-changed")
    for kept in (first, second):
        with pytest.raises(PassNotFound):
            client.passes.backward(kept.id)


@pytest.mark.slow
def test_passes_without_memory_are_not_kept_and_old_ones_are_dropped_for_new_ones(tmp_path, rng):
    x = rng.normal(size=(1, 1, 256, 64)).astype(np.float32)
    with live_server(tmp_path, memory_budget=2**23) as url, Client(url) as client:
        large = rng.normal(size=(1, 2, 1024, 64)).astype(np.float32)
        assert client.passes.create_raw(large).id is None
        assert client.attention.gradients(large, wrt=["query"]).gradients["query"].shape == large.shape
        ids = [client.passes.create_raw(x).id for _ in range(8)]
        assert None not in ids
        with pytest.raises(PassNotFound):
            client.passes.backward(ids[0])
        client.passes.backward(ids[-1])


@pytest.mark.slow
def test_nobody_pushes_out_the_passes_of_a_caller_who_holds_less(tmp_path, rng):
    x = rng.normal(size=(1, 1, 256, 64)).astype(np.float32)
    keys = [create_key(tmp_path, name, ["infer"]) for name in ("few", "many")]
    with live_server(tmp_path, require_keys=True, memory_budget=2**23) as url, ExitStack() as stack:
        few, many = (stack.enter_context(Client(url, api_key=key)) for key in keys)
        mine = few.passes.create_raw(x).id
        others = [many.passes.create_raw(x).id for _ in range(8)]
        with pytest.raises(PassNotFound):
            many.passes.backward(others[0])
        assert few.passes.backward(mine).gradients
