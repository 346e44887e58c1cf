"""Every registered variant answers all four questions, of a module and of raw q, k and v, or says why it does not."""

import numpy as np
import pytest
import torch

from attention_client import AttentionError, Client
from attention_contract import spec as contract
from attention_service.core.arrays import to_torch
from attention_service.core.attention import taps_of
from attention_service.core.learned import learned_of
from attention_service.core.registry import variants
from attention_service.core.types import Widths

H, HKV, D, V, WIDTH, LENGTH = 4, 2, 4, 3, 16, 6
OPTIONS = {
    "prefix_lm": {"length": 2},
    "block": {"size": 2},
    "strided": {"stride": 2},
    "fixed": {"stride": 2},
    "random_blocks": {"size": 2, "count": 1},
    "documents": {"lengths": [2, 3]},
    "global_tokens": {"positions": [1]},
    "any": {"of": [{"name": "causal"}, {"name": "global_tokens", "positions": [3]}]},
    "all": {"of": [{"name": "causal"}, {"name": "sliding_window", "left": 1}]},
    "sliding_window": {"left": 2, "right": 1},
    "learned": {"length": 32},
    "gaussian": {"sigma": "learned"},
    "cosine": {"scale": "learned"},
    "linformer": {"rank": 3, "length": 32},
    "nystrom": {"landmarks": 3},
}
HALF = {torch.float16: (1e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}
"""Relative and absolute tolerances: PyTorch's for its own attention, a rounding of the largest output for bfloat16."""
FIELDS = {"score": "score", "position": "position", "normalizer": "normalizer", "method": "method"}
ENTRIES = [entry for entry in variants() if entry.kind != "kernel"]
MODULE = {"d_model": WIDTH, "num_heads": H, "num_kv_heads": HKV, "head_dim": D, "value_dim": V, "dtype": "float64"}


@pytest.fixture(scope="module")
def client(server):
    with Client(server) as client:
        yield client


@pytest.fixture(params=ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def entry(request):
    return request.param


@pytest.fixture
def spec(entry):
    part = {"name": entry.name} | OPTIONS.get(entry.name, {})
    return {"masks": [part]} if entry.kind == "mask" else {FIELDS[entry.kind]: part}


def taps(spec):
    return ["output", *taps_of(contract.AttentionSpec.model_validate(spec))]


def test_a_module_answers_all_four_questions(client, rng, entry, spec):
    name = f"every.{entry.kind}.{entry.name}"
    made = client.create_module(name, MODULE | {"spec": spec}, seed=5)
    x = rng.standard_normal((2, LENGTH, WIDTH))
    reply = client.forward(name, x, return_=taps(spec))
    assert reply.output.shape == x.shape
    assert all(np.isfinite(getattr(reply, tap)).all() for tap in taps(spec) if tap != "masked_scores")
    found = client.gradients(name, x, wrt=["query", "parameters", "context"], check=True)
    assert {info.name for info in client.list_parameters(name).parameters} <= set(found.gradients)
    assert not {name: check for name, check in found.check.items() if not check.passed}
    cost = client.complexity(name, LENGTH)
    assert cost.parameter_count == made.parameter_count
    assert cost.costs[0].forward.dense.total > 0
    assert cost.costs[0].peak_bytes.request > 0
    assert cost.growth.time_order.startswith("O(")
    weigh(client, entry, lambda: client.weights(name, x, top_k=1))


def test_raw_attention_answers_all_four_questions(client, rng, entry, spec):
    q, k = (rng.standard_normal((2, heads, LENGTH, D)) for heads in (H, HKV))
    v = rng.standard_normal((2, HKV, LENGTH, V))
    needed = learned_of(contract.AttentionSpec.model_validate(spec), Widths(H, HKV, D, V))
    learned = {name: 1 + 0.1 * rng.standard_normal(each.shape) for name, each in needed.items()}
    request = {"spec": spec, "parameters": learned}
    reply = client.attend(q, k, v, return_=taps(spec), **request)
    assert reply.output.shape == (2, H, LENGTH, V)
    found = client.raw_gradients(q, k, v, wrt=["query", "key", "value", *learned], check=True, **request)
    assert not {name: check for name, check in found.check.items() if not check.passed}
    cost = client.raw_complexity(LENGTH, num_heads=H, num_kv_heads=HKV, head_dim=D, value_dim=V, spec=spec)
    assert cost.parameter_count == sum(x.size for x in learned.values())
    weigh(client, entry, lambda: client.raw_weights(q, k, v, top_k=1, **request))
    for dtype, tolerances in HALF.items():
        rounded = [to_torch(x).to(dtype) for x in (q, k, v)]
        half = client.attend(*rounded, **request)
        exact = {name: to_torch(x).to(dtype).double() for name, x in learned.items()}
        expected = client.attend(*(x.double() for x in rounded), spec=spec, parameters=exact)
        # The sum of an input and its encoding is rounded once more.
        rtol, atol = (each * (3 if entry.name in {"sinusoidal", "learned"} else 1) for each in tolerances)
        np.testing.assert_allclose(half.output.astype(float), expected.output, rtol=rtol, atol=atol)
    single = client.attend(*(x.astype(np.float32) for x in (q, k, v)), **request)
    np.testing.assert_allclose(single.output, reply.output, rtol=0, atol=1e-5)


def weigh(client, entry, ask):
    """What a query looks at; a method that approximates has no weights, and says what it has."""
    if entry.kind == "method" and entry.name != "exact":
        with pytest.raises(AttentionError, match=r"exact") as refused:
            ask()
        assert refused.value.status == 422
        return
    weights = ask().weights
    assert weights.shape[-2:] == (LENGTH, LENGTH)
    assert (weights >= 0).all()


def test_every_variant_says_what_it_is(client):
    rows = client.list_variants().variants
    assert {(row.kind, row.name) for row in rows} == {(entry.kind, entry.name) for entry in variants()}
    for row in rows:
        assert all((row.summary, row.formula, row.cost.strip(), row.source)), row.name
