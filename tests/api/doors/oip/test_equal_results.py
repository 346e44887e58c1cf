"""A result by the protocol is the native one, bit by bit, for every registered variant and every question."""

import json

import numpy as np
import pytest

from attention_client import AttentionError, Client
from attention_contract import spec as contract
from attention_contract.tensor_files import taken_apart
from attention_service.core.attention import taps_of
from attention_service.core.multihead import learned_of
from attention_service.core.problem import Widths
from tests.api.doors.oip.envelopes import binary, infer, refused
from tests.api.test_every_variant import HKV, LENGTH, MODULE, SPECS, WIDTH, D, H, V


@pytest.fixture(scope="module")
def client(door):
    with Client(door.url, api_key=door.key) as client:
        yield client


@pytest.fixture(params=SPECS)
def named(request):
    return request.param, SPECS[request.param]


def same(outputs, reply, names=None):
    """The outputs are the tensors of the native reply, all of them or those that are named."""
    _, tensors = taken_apart(reply)
    native = {each.name: each.array for each in tensors}
    assert set(outputs) == set(native if names is None else names)
    for name, array in outputs.items():
        assert (array.dtype, array.shape) == (native[name].dtype, native[name].shape), name
        assert array.tobytes() == native[name].tobytes(), name


def taps(spec):
    return ["output", *taps_of(contract.AttentionSpec.model_validate(spec))]


def method_of(spec):
    return spec.get("method", {"name": "exact"})["name"]


@pytest.mark.sampled(named=5)
def test_a_module_by_both_protocols(client, http, rng, named):
    name, spec = named
    model = f"same.{name}"
    client.modules.create(model, MODULE | {"spec": spec}, seed=5)
    x = rng.standard_normal((2, LENGTH, WIDTH))
    names = taps(spec)
    outputs, head = infer(http, model, {"query": x}, names)
    same(outputs, client.forward(model, x, return_=names))
    assert head["parameters"]["version"] == client.modules.get(model).version
    wanted = ["output", "gradients.query", "gradients.q_proj.weight"]
    outputs, _ = infer(http, f"{model}:gradients", {"query": x}, wanted)
    same(outputs, client.gradients(model, x, wrt=["query", "q_proj.weight"]))
    every = json.dumps(["query", "parameters", "context"])
    outputs, _ = infer(http, f"{model}:gradients", {"query": x, "upstream": x}, wrt=every)
    same(outputs, client.gradients(model, x, upstream=x, wrt=["query", "parameters", "context"]))
    weigh(
        http,
        f"{model}:weights",
        {"query": x},
        method_of(spec),
        lambda **options: client.weights(model, x, **options),
    )


@pytest.mark.slow
def test_raw_attention_by_both_protocols(client, http, rng, named):
    _, spec = named
    q, k = (rng.standard_normal((2, heads, LENGTH, D)).astype(np.float32) for heads in (H, HKV))
    v = rng.standard_normal((2, HKV, LENGTH, V)).astype(np.float32)
    needed = learned_of(contract.AttentionSpec.model_validate(spec), Widths(H, HKV, D, V))
    learned = {name: (1 + 0.1 * rng.standard_normal(each.shape)).astype(np.float32) for name, each in needed.items()}
    inputs = {"query": q, "key": k, "value": v} | {f"parameters.{name}": each for name, each in learned.items()}
    options, request = {"spec": json.dumps(spec)}, {"spec": spec, "parameters": learned}
    names = taps(spec)
    reply = client.attention.forward(q, k, v, return_=names, **request)
    for wants_binary in (True, None):
        outputs, _ = infer(http, "_attention", inputs, names, wants_binary, **options)
        same(outputs, reply)
    wanted = ["query", "key", "value", *learned]
    outputs, _ = infer(http, "_attention:gradients", inputs, [f"gradients.{name}" for name in wanted], **options)
    same(outputs, client.attention.gradients(q, k, v, wrt=wanted, **request), outputs)

    def native(**more):
        return client.attention.weights(q, k, v, **request, **more)

    weigh(http, "_attention:weights", inputs, method_of(spec), native, **options)


def weigh(http, model, inputs, method, native, **options):
    """Look at the weights by both; a method that approximates has none, and both say so. Those of linear are signed."""
    statistics = ["max_weight"] if method == "linear" else ["entropy", "locality"]
    names = [f"statistics.{name}" for name in statistics]
    if method not in {"exact", "linear"}:
        body, headers = binary(inputs, parameters=options)
        refusal = refused(http.post(f"/v2/models/{model}/infer", content=body, headers=headers), 400, "exact")
        with pytest.raises(AttentionError) as fault:
            native()
        assert refusal["error"] == fault.value.detail
        return
    outputs, _ = infer(http, model, inputs, top_k=2, **options)
    same(outputs, native(top_k=2))
    outputs, _ = infer(http, model, inputs, names, **options)
    same(outputs, native(statistics=statistics, return_weights=False), names)


def test_masks_edits_selections_and_options_mean_the_same(client, http, rng):
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    value = rng.standard_normal((2, 2, 5, 5)).astype(np.float32)
    edits = [{"tap": "weights"}, {"tap": "context", "heads": [1], "scale": 0.5}]
    select = {"heads": [1], "queries": [0, 4]}
    mask = rng.random((2, 2, 5, 5)) < 0.7
    lengths = np.array([4, 5])
    inputs = {"query": x, "mask": mask, "key_lengths": lengths, "edits.0.value": value}
    outputs, _ = infer(
        http,
        "demo",
        inputs,
        ["weights", "output"],
        edits=json.dumps(edits),
        select=json.dumps(select),
        kernel="materialized",
    )
    edits[0] |= {"value": value}
    reply = client.forward(
        "demo", x, mask=mask, key_lengths=lengths, edits=edits, select=select, return_=["weights", "output"],
        kernel="materialized",
    )  # fmt: skip
    same(outputs, reply)
    tokens = np.array([3, 1, 3, 1, 3])
    classes = np.array([True, False, True, False, False])
    inputs = {"query": x, "statistic_options.tokens": tokens, "statistic_options.classes.odd": classes}
    outputs, _ = infer(http, "demo:weights", inputs, ["statistics.induction", "statistics.classes.odd"])
    reply = client.weights(
        "demo", x, statistics=["induction", "classes"], return_weights=False,
        statistic_options={"tokens": tokens, "classes": {"odd": classes}},
    )  # fmt: skip
    same(outputs, reply, outputs)
