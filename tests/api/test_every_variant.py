"""Every registered variant answers all four questions, of a module and of raw q, k and v, or says why it does not."""

import numpy as np
import pytest

from attention_client import AttentionError
from attention_contract import spec as contract
from attention_service.core.attention import taps_of
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Widths
from attention_service.core.registry import variants

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
FIELDS = {"score": "score", "position": "position", "normalizer": "normalizer", "method": "method"}
ENTRIES = [entry for entry in variants() if entry.kind != "kernel"]
BESIDE = {
    "sinks": {"normalizer": {"sinks": True}},
    "added-keys": {"add_bias_kv": True, "add_zero_attn": True},
    "all": {"score": {"name": "additive"}, "normalizer": {"sinks": True}, "add_bias_kv": True, "softcap": 2.0},
    "norm": {"qk_norm": {"over": "all_heads", "unit_offset": True}, "position": {"name": "rope"}},
}
"""Specs whose learned tensors belong to no single entry."""
MODULE = {"d_model": WIDTH, "num_heads": H, "num_kv_heads": HKV, "head_dim": D, "value_dim": V, "dtype": "float64"}


def spec_of(entry):
    part = {"name": entry.name} | OPTIONS.get(entry.name, {})
    return {"masks": [part]} if entry.kind == "mask" else {FIELDS[entry.kind]: part}


SPECS = {f"{entry.kind}.{entry.name}": spec_of(entry) for entry in ENTRIES} | BESIDE


@pytest.fixture(params=SPECS)
def named(request):
    return request.param, SPECS[request.param]


def taps(spec):
    return ["output", *taps_of(contract.AttentionSpec.model_validate(spec))]


@pytest.mark.sampled(named=8)  # costs are rehearsals, and each entry is rehearsed before each pass
def test_what_a_module_costs_is_told(client, named):
    name, spec = named
    made = client.modules.create(f"costs.{name}", MODULE | {"spec": spec}, seed=5)
    cost = client.complexity(made.name, LENGTH, memory_bytes=2**12)  # little, so that limits are found soon
    assert cost.parameter_count == made.parameter_count
    assert cost.costs[0].forward.dense.total > 0
    assert cost.costs[0].peak_bytes.request > 0
    assert cost.growth.time_order.startswith("O(")


def test_a_module_answers_the_other_questions(client, rng, named):
    name, spec = named
    made = client.modules.create(f"every.{name}", MODULE | {"spec": spec}, seed=5)
    x = rng.standard_normal((2, LENGTH, WIDTH))
    reply = client.forward(made.name, x, return_=taps(spec))
    assert reply.output.shape == x.shape
    assert all(np.isfinite(getattr(reply, tap)).all() for tap in taps(spec) if tap != "masked_scores")
    found = client.gradients(made.name, x, wrt=["query", "parameters", "context"])
    assert {info.name for info in client.modules.parameters(made.name).parameters} <= set(found.gradients)
    weigh(spec, lambda: client.weights(made.name, x, top_k=1))


@pytest.mark.slow
def test_raw_attention_answers_too(client, rng, named):
    _, spec = named
    q, k = (rng.standard_normal((2, heads, LENGTH, D)) for heads in (H, HKV))
    v = rng.standard_normal((2, HKV, LENGTH, V))
    needed = learned_of(contract.AttentionSpec.model_validate(spec), Widths(H, HKV, D, V))
    learned = {name: 1 + 0.1 * rng.standard_normal(each.shape) for name, each in needed.items()}
    request = {"spec": spec, "parameters": learned}
    reply = client.attention.forward(q, k, v, return_=taps(spec), **request)
    assert reply.output.shape == (2, H, LENGTH, V)
    found = client.attention.gradients(q, k, v, wrt=["query", "key", "value", *learned], check=True, **request)
    assert not {name: check for name, check in found.check.items() if not check.passed}
    weigh(spec, lambda: client.attention.weights(q, k, v, top_k=1, **request))


def weigh(spec, ask):
    """Look at the weights, which are implicit of ``linear``. A method that approximates has none, and says so."""
    if spec.get("method", {"name": "exact"})["name"] not in {"exact", "linear"}:
        with pytest.raises(AttentionError, match=r"exact") as refused:
            ask()
        assert refused.value.status == 422
        return
    reply = ask()
    assert reply.weights.shape[-2] == LENGTH <= reply.weights.shape[-1]
    assert reply.implicit or (reply.weights >= 0).all()


def test_every_variant_says_what_it_is(client):
    rows = client.server.variants().variants
    assert {(row.kind, row.name) for row in rows} == {(entry.kind, entry.name) for entry in variants()}
    for row in rows:
        assert all((row.summary, row.formula, row.cost.strip(), row.source)), row.name
