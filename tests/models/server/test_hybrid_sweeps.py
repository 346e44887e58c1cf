"""Sweeps of edits over layers without a softmax, over real HTTP: every layer whose tap can be edited is swept."""

import httpx
import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tools.models_walk.model_types import built

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TOKENS = [5, 3, 7, 8, 6, 4, 9]
HYBRIDS = ["qwen3_5", "falcon_h1", "jamba", "mamba2", "mamba"]
HEADS = {"tap": "context", "over": ["layers", "heads"], "set": 0}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in HYBRIDS:
        built(name).save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    with live_server(root) as address:
        yield address


def ask(address, model, question, **fields):
    body = {"tokens": TOKENS, **fields}
    return httpx.post(f"{address}/v1/models/{model}/{question}", json=body, timeout=120)


def listed(address, model):
    httpx.post(f"{address}/v1/models", json={"checkpoint": model}, timeout=120).raise_for_status()
    return httpx.get(f"{address}/v1/models/{model}").json()["layers"]


def log_p(address, model, token, edits):
    reply = ask(address, model, "forward", edits=edits, **{"return": ["logits"]}).raise_for_status().json()
    logits = np.asarray(reply["logits"][-1], float)
    return logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@pytest.mark.sampled(model=2)
@pytest.mark.parametrize("model", HYBRIDS)
def test_a_sweep_over_layers_has_each_layer_whose_tap_can_be_edited_with_the_effect_of_a_run(address, model):
    layers = listed(address, model)
    able = [each["layer"] for each in layers if "context" in each["edits"]]
    sweep = {"tap": "context", "over": ["layers"], "set": 0}
    reply = ask(address, model, "effects", sweep=sweep).raise_for_status().json()
    assert reply["swept"]["layers"] == able
    [token] = reply["token"]
    plain = log_p(address, model, token, {})
    found = [log_p(address, model, token, {str(key): [{"tap": "context", "set": 0}]}) - plain for key in able]
    np.testing.assert_allclose(reply["effects"]["value"], found, atol=1e-4)
    assert np.abs(reply["effects"]["value"]).min() > 0


@pytest.mark.sampled(model=2)
@pytest.mark.parametrize("model", HYBRIDS)
def test_a_named_layer_without_a_softmax_is_swept_head_by_head(address, model):
    mixing = [each for each in listed(address, model) if each["kind"] != "attention"]
    layer = mixing[0]["layer"]
    reply = ask(address, model, "effects", sweep=HEADS, layers=[layer]).raise_for_status().json()
    assert reply["swept"] == {"layers": [layer], "heads": [*range(mixing[0]["heads"])]}
    [token] = reply["token"]
    edits = {str(layer): [{"tap": "context", "heads": [1], "set": 0}]}
    expected = log_p(address, model, token, edits) - log_p(address, model, token, {})
    np.testing.assert_allclose(reply["effects"]["value"][0][1], expected, atol=1e-4)


@pytest.mark.sampled(model=2)
@pytest.mark.parametrize("model", HYBRIDS)
def test_a_tap_that_a_layer_has_not_is_refused_by_its_name(address, model):
    layer = next(each["layer"] for each in listed(address, model) if each["kind"] != "attention")
    reply = ask(address, model, "effects", sweep=HEADS | {"tap": "scores", "set": 0}, layers=[layer])
    assert reply.status_code == 422
    assert reply.json()["param"] == "sweep.tap"
    assert f"layer {layer}: it mixes tokens by a running state, which has no scores" in reply.json()["detail"]


def test_the_effects_on_top_of_an_edit_of_a_linear_layer(address):
    edits = {"0": [{"tap": "context", "heads": [0], "set": 0}]}
    layers = listed(address, "qwen3_5")
    attends = next(each["layer"] for each in layers if each["kind"] == "attention")
    sweep = HEADS | {"heads": [1]}
    reply = ask(address, "qwen3_5", "effects", sweep=sweep, layers=[attends], edits=edits).raise_for_status().json()
    [token] = reply["token"]
    before = log_p(address, "qwen3_5", token, edits)
    after = log_p(address, "qwen3_5", token, edits | {str(attends): [{"tap": "context", "heads": [1], "set": 0}]})
    np.testing.assert_allclose(reply["baseline"], before, atol=1e-4)
    np.testing.assert_allclose(reply["effects"]["value"][0][0], after - before, atol=1e-4)


def test_channels_are_swept_where_their_layer_is_named(address):
    """A sweep over heads of all layers leaves out those whose channels stand for heads, and a refusal says so."""
    layers = listed(address, "jamba")
    attends = [each["layer"] for each in layers if each["kind"] == "attention"]
    reply = ask(address, "jamba", "effects", sweep=HEADS).raise_for_status().json()
    assert reply["swept"]["layers"] == attends
    refused = ask(address, "mamba", "effects", sweep=HEADS)
    assert (refused.status_code, refused.json()["param"]) == (422, "layers")
    assert "name layers" in refused.json()["detail"]
