"""Approximate methods over HTTP: raw and as modules, their states, errors, refusals and cost."""

import numpy as np
import pytest

from tests.api import talk

CAUSAL = [{"name": "causal"}]
METHODS = {
    "linear": {"masks": CAUSAL, "method": {"name": "linear"}},
    "performer": {"masks": CAUSAL, "method": {"name": "performer", "features": 32}},
    "linformer": {"method": {"name": "linformer", "rank": 4, "length": 64}},
    "nystrom": {"method": {"name": "nystrom", "landmarks": 6}},
}
RULES = ("sum", "gated_delta")


def post(http, path, body):
    return talk.post(http, path, **body)


def problem(http, path, body, status):
    found = talk.refuse(http, path, **body)
    assert found["status"] == status
    return found


def wire(array):
    """In float64, where nested lists would take float32."""
    return {"dtype": "float64", "shape": list(array.shape), "data": array.ravel().tolist()}


@pytest.fixture
def raw(rng):
    """Fields of a raw request with every tensor that the methods can be sent."""

    def fields(name, **more):
        spec = METHODS[name]
        parameters = {f"method.{each}_projection": rng.normal(size=(4, 64)).tolist() for each in ("key", "value")}
        found = {each: rng.normal(size=(2, 3, 20, 4)).tolist() for each in ("query", "key", "value")}
        return found | {"spec": spec, "parameters": parameters if name == "linformer" else {}} | more

    return fields


def rule(name, **more):
    return {"masks": CAUSAL, "method": {"name": "linear", "rule": name, **more}}


def created(http, name, spec, **config):
    body = {"name": name, "config": {"d_model": 12, "num_heads": 4, "num_kv_heads": 2, "spec": spec, **config}}
    answer = http.post("/v1/modules", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


@pytest.mark.parametrize("name", ["linear", "nystrom"])
def test_the_error_is_that_against_exact_attention(http, raw, name):
    fields = raw(name, report_error=True)
    reply = post(http, "/v1/attention/forward", fields)
    spec = {"masks": METHODS[name].get("masks", [])}
    exact = post(http, "/v1/attention/forward", fields | {"spec": spec, "parameters": {}, "report_error": False})
    difference = np.array(reply["output"]) - np.array(exact["output"])
    assert reply["error"]["max"] == pytest.approx(abs(difference).max(), rel=1e-4)
    assert reply["error"]["rms"] == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-4)
    plain = post(http, "/v1/attention/forward", fields | {"report_error": False})
    assert reply["ran"]["flops"] > plain["ran"]["flops"] + exact["ran"]["flops"] // 2
    assert reply["ran"]["peak_bytes"] > plain["ran"]["peak_bytes"]
    assert plain.get("error") is None
    assert (reply["error"].get("mean_kl") is None) == (name == "nystrom")


@pytest.mark.parametrize(("queries", "real"), [(0, 3), (3, 0)])
def test_without_anything_to_compare_there_is_no_divergence(http, queries, real):
    body = {"query": {"dtype": "float32", "shape": [queries, 4], "data": [0.0] * 4 * queries}, "report_error": True}
    body |= {"key": [[1.0] * 4] * 3, "spec": METHODS["linear"], "key_lengths": real}
    assert post(http, "/v1/attention/forward", body)["error"] == {"max": 0.0, "rms": 0.0, "mean_kl": "NaN"}


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", RULES)
def test_a_modules_sequence_in_parts_is_the_whole(http, rng, name):
    module = f"met-{name}"
    created(http, module, rule(name), dtype="float64")
    path = f"/v1/modules/{module}/forward"
    x = rng.normal(size=(2, 11, 12))

    whole = post(http, path, {"query": wire(x), "return_state": True})
    first = post(http, path, {"query": wire(x[:, :4]), "return_state": True})
    state = {
        f"initial_{each}": first[f"final_{each}"] for each in ("state", "normalizer") if first.get(f"final_{each}")
    }
    rest = post(http, path, {"query": wire(x[:, 4:]), **state})
    assert ("initial_normalizer" in state) == (name == "sum")
    assert np.shape(first["final_state"]) == (2, 2, 3, 3)
    np.testing.assert_allclose(np.concatenate([first["output"], rest["output"]], 1), whole["output"], atol=1e-10)
    np.testing.assert_allclose(rest["final_state"], whole["final_state"], atol=1e-10)
    learned = [each["name"] for each in http.get(f"/v1/modules/{module}/parameters").json()["parameters"]]
    gates = [each for each in learned if each.startswith("method.")]
    expected = ["gate", "beta"] if name == "gated_delta" else []
    assert gates == [f"method.{each}.{part}" for each in expected for part in ("weight", "bias")]
    fields = {"query": wire(x[:, 4:]), **state, "wrt": ["query", "parameters", *state], "check": True}
    checks = post(http, f"/v1/modules/{module}/gradients", fields)["check"]
    assert all(check["passed"] for check in checks.values())
    assert set(state) | set(gates) <= set(checks)


def test_states_of_half_types_come_in_float32(http, raw):
    fields = raw("linear", return_state=True, encoding="base64")
    half = {each: {"dtype": "float16", "shape": [2, 3, 20, 4], "data": np.ravel(fields[each]).tolist()}
            for each in ("query", "key", "value")}  # fmt: skip
    reply = post(http, "/v1/attention/forward", fields | half)
    assert reply["output"]["dtype"] == "float16"
    assert reply["final_state"]["dtype"] == reply["final_normalizer"]["dtype"] == "float32"


STATE = [[[[0.0] * 4] * 4] * 3] * 2
REFUSED = {
    "kernel": ("linear", {"kernel": "fused"}),
    "mask": ("linear", {"mask": [[True] * 20] * 20}),
    "dropout": ("nystrom", {"dropout": {"p": 0.1}}),
    "offsets": ("linear", {"offsets": [0, 1]}),
    "return.1": ("performer", {"return": ["output", "weights"]}),
    "edits.0.tap": ("performer", {"edits": [{"tap": "weights", "set": 0}]}),
    "gate": ("linear", {"gate": [[[0.5] * 20] * 3] * 2}),
    "initial_state": ("nystrom", {"initial_state": STATE}),
    "initial_normalizer": ("linear", {"initial_state": STATE}),
    "return_state": ("performer", {"return_state": True}),
    "report_error": ("linear", {"report_error": True, "edits": [{"tap": "v", "set": 0}]}),
    "spec.softcap": ("linformer", {"spec": METHODS["linformer"] | {"softcap": 2.0}}),
    "spec.masks": ("nystrom", {"spec": METHODS["nystrom"] | {"masks": CAUSAL}}),
    "spec.normalizer": ("performer", {"spec": METHODS["performer"] | {"normalizer": {"name": "sigmoid"}}}),
    "spec.score": ("linear", {"spec": METHODS["linear"] | {"score": {"name": "dot"}}}),
    "spec.method.normalize": ("linear", {"spec": {"method": {"name": "linear", "rule": "delta", "normalize": True}}}),
    "key": ("linformer", {"spec": {"method": {"name": "linformer", "rank": 4, "length": 8}}}),
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_a_method_cannot_honour_is_refused_and_named(http, raw, param):
    name, more = REFUSED[param]
    fields = raw(name, **more)
    if param == "key":
        fields["parameters"] = {each: np.array(x)[:, :8].tolist() for each, x in fields["parameters"].items()}
    found = problem(http, "/v1/attention/forward", fields, 422)
    assert found["param"] == param
    assert found["detail"].startswith(param)


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("gate", {}),
        ("gate", {"gate": [[[0.0] * 20] * 3] * 2}),
        ("gate", {"gate": [[[1.5] * 20] * 3] * 2}),
        ("gate", {"gate": [[[0.5] * 19] * 3] * 2}),
        ("past_key", {"gate": [[[0.5] * 20] * 3] * 2, "past_key": STATE, "past_value": STATE}),
        ("spec.masks", {"gate": [[[0.5] * 20] * 3] * 2, "spec": {"method": {"name": "linear", "rule": "gated"}}}),
    ],
)
def test_a_rule_gets_what_it_reads(http, raw, param, more):
    fields = raw("linear", spec=rule("gated")) | more
    assert problem(http, "/v1/attention/forward", fields, 422)["param"] == param


def test_exact_attention_reads_no_state(http, raw):
    for name, value in (("initial_state", STATE), ("return_state", True), ("report_error", True)):
        fields = raw("linear", spec={}, **{name: value})
        assert problem(http, "/v1/attention/forward", fields, 422)["param"] == name
    fields = raw("linear", wrt=["query"], report_error=True)
    assert problem(http, "/v1/attention/gradients", fields, 422)["param"] == "report_error"


def test_there_are_no_weights_to_look_at(http, raw):
    found = problem(http, "/v1/attention/weights", raw("nystrom"), 422)
    assert "report_error" in found["detail"]
    assert problem(http, "/v1/attention/gradients", raw("nystrom", wrt=["weights"]), 422)["param"] == "wrt.0"


@pytest.mark.parametrize(
    ("param", "config"),
    [
        ("config.spec.softcap", {"spec": METHODS["linear"] | {"softcap": 2.0}}),
        ("config.spec.masks", {"spec": {"method": {"name": "linear", "rule": "delta"}}}),
        ("config.key_width", {"spec": rule("gated"), "key_width": 7}),
    ],
)
def test_a_module_that_could_never_run_is_not_made(http, param, config):
    body = {"name": "met-never", "config": {"d_model": 4, "num_heads": 2, **config}}
    assert problem(http, "/v1/modules", body, 422)["param"] == param


@pytest.mark.long
@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", ["linear", "linformer"])
def test_complexity_is_linear_and_compares_with_exact(http, name):
    spec = METHODS[name] if name != "linformer" else {"method": {"name": "linformer", "rank": 64, "length": 2**17}}
    body = {"shape": {"queries": 1024}, "num_heads": 4, "head_dim": 32, "spec": spec}
    body |= {"sweep": {"dimension": "length", "values": [2**14, 2**16]}, "memory_bytes": 2**30}
    reply = post(http, "/v1/attention/complexity", body)
    assert reply["growth"]["flops_exponent"] < 1.05
    cost = reply["costs"][-1]
    assert cost["kernel"] == name
    assert cost["peak_bytes"]["request"] < cost["peak_bytes"]["materialized"] / 20
    assert reply["growth"]["time_order"].startswith("O(n")
    found = problem(http, "/v1/attention/complexity", body | {"kernel": "fused"}, 422)
    assert found["param"] == "kernel"
