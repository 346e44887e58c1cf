"""Views of edits, effects, circuits, gradients, attribution and rollout, in a browser: their numbers are the API's."""

import json
import re
from urllib.parse import quote

import numpy as np
import pytest

from attention_client import Client
from tests.web.conftest import RECORDING, facts, live, numbers


def test_a_head_is_knocked_out_and_brought_back(visit, recorded):
    page = visit.open("#/edit?layer=1&head=3")
    untouched = page.get_by_text("Nothing is changed yet")
    untouched.wait_for()
    assert page.get_by_text("no effect").count() == 0
    assert page.locator(".heatmap").count() == 1
    page.get_by_role("button", name="Knock out L1H3").click()
    change = page.locator("dd").first
    change.wait_for()
    context = recorded.weights(1).astype(np.float64) @ recorded.read(1, "v").astype(np.float64)
    expected = np.linalg.norm(context[3]) / np.linalg.norm(context)
    assert float(change.inner_text()) == pytest.approx(expected, rel=2e-3)
    page.get_by_role("button", name="Undo").click()
    untouched.wait_for()
    page.get_by_role("button", name="Hide token 2 cat").click()
    change.wait_for()
    page.get_by_text("The change of the model's logits is not known here").wait_for()  # no checkpoint of MiniLM
    visit.picture("edit")


def test_a_cell_is_knocked_out_by_keyboard(visit):
    page = visit.open("#/edit?layer=1&head=3")
    edited = page.get_by_role("img", name=re.compile("Heat map of L"))
    edited.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("renormalize"))
    page.locator("code", has_text="weights of L1H3 from the to [CLS] = 0").wait_for()


def test_the_effects_of_knocking_out_are_those_of_the_api(visit, recorded):
    page = visit.open("#/effects?layer=1")
    ablate = {"tap": "context", "over": ["heads"], "set": 0}
    reply = visit.http.post("/v1/attention/effects", json=live(recorded, 1) | {"sweep": ablate}).json()
    page.locator("tbody tr").nth(11).wait_for()
    shown = [
        float(text)
        for text in page.locator("table", has_text="head").first.locator("td:nth-child(2)").all_inner_texts()
    ]
    assert shown == pytest.approx(reply["effects"]["relative"], rel=1e-3)
    best = int(np.argmax(shown))
    assert facts(page)["matters most"] == f"L1H{best}"
    page.get_by_role("button", name=f"Edit without L1H{best}").click()
    page.locator("dd", has_text=re.compile("[1-9]")).first.wait_for()
    assert float(facts(page)["change of the whole output"]) == pytest.approx(max(shown), rel=2e-3)


def test_effects_of_keys_add_to_the_edits_at_hand(visit, recorded):
    hide = {"tap": "weights", "keys": [2], "set": 0, "renormalize": True}
    page = visit.open(f"#/effects?layer=1&over=keys&measure=norm&edits={quote(json.dumps([hide]))}")
    swept = {"tap": "weights", "over": ["heads", "keys"], "set": 0, "renormalize": True}
    body = live(recorded, 1) | {"sweep": swept, "edits": [hide]}
    reply = visit.http.post("/v1/attention/effects", json=body).json()
    np.testing.assert_allclose(numbers(page), reply["effects"]["norm"], rtol=1e-3, atol=1e-5)


def test_effects_of_all_layers_stand_side_by_side(visit, recorded):
    page = visit.open("#/effects?over=layers")
    page.locator(".stage canvas").wait_for()
    visit.picture("effects")
    shown = numbers(page)
    for layer in (0, 5):
        context = np.matmul(recorded.weights(layer).astype(float), recorded.read(layer, "v").astype(float))
        expected = np.linalg.norm(context, axis=(1, 2)) / np.linalg.norm(context)
        np.testing.assert_allclose(shown[layer], expected, rtol=5e-3)
    canvas = page.locator(".stage canvas")
    canvas.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/edit.*context"))
    page.get_by_role("button", name="Undo").click()
    page.wait_for_url(re.compile("#/effects"))


def test_effects_and_attributions_are_those_of_the_chosen_sequence(visit):
    made = visit.http.post("/v1/modules", json={"name": "page-two", "config": {"d_model": 4, "num_heads": 2}})
    assert made.is_success
    body = {"query": np.random.default_rng(0).normal(size=(2, 3, 4)).round(2).tolist()}
    chosen = f"source=module:page-two&sequence=1&input={quote(json.dumps(body['query']))}"
    swept = {"tap": "context", "over": ["heads", "queries"], "set": 0}
    answered = visit.http.post("/v1/modules/page-two/effects", json=body | {"sweep": swept}).json()
    page = visit.open(f"#/effects?{chosen}&over=queries&measure=max")
    np.testing.assert_allclose(numbers(page), answered["effects"]["max"][1], rtol=1e-3, atol=1e-6)
    fields = body | {"methods": ["norm"]}
    answered = visit.http.post("/v1/modules/page-two/attribution", json=fields).json()
    page = visit.open(f"#/gradient?{chosen}&attribution=norm&head=1")
    np.testing.assert_allclose(numbers(page, 1), answered["norm"][1][1], rtol=1e-3, atol=1e-6)
    visit.http.delete("/v1/modules/page-two")


def test_circuits_are_those_of_the_api(visit):
    for name, heads in (("page-early", 8), ("page-late", 4)):
        config = {"d_model": 64, "num_heads": heads}
        made = visit.http.post("/v1/modules", json={"name": name, "config": config, "seed": heads})
        assert made.is_success
    reply = visit.http.post("/v1/modules/page-early/circuits", json={"with": "page-late"}).json()
    page = visit.open("#/circuits?circuits=page-early&with=page-late")
    np.testing.assert_allclose(numbers(page), reply["qk"]["singular_values"], rtol=1e-3)
    np.testing.assert_allclose(numbers(page, 1), reply["ov"]["singular_values"], rtol=1e-3)
    for at, kind in enumerate("qkv", 2):
        np.testing.assert_allclose(numbers(page, at), reply["composition"][kind], rtol=1e-3)
    table = page.locator("table", has_text="Circuits by head")
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    shown = np.array([[float(cell.replace("−", "-")) for cell in row] for row in rows])
    ranks = ("norm", "effective_rank", "stable_rank")
    expected = [reply[part][name] for part in ("qk", "ov") for name in ranks] + [reply["ov"]["copying"]]
    np.testing.assert_allclose(shown, np.transpose(expected), rtol=1e-3, atol=1e-5)
    spectra = page.locator("table", has_text="Spectra of the parameters").locator("tbody td:nth-child(3)")
    np.testing.assert_allclose(
        [float(text) for text in spectra.all_inner_texts()],
        [each["norm"] for each in reply["spectra"]],
        rtol=1e-3,
        atol=1e-9,
    )
    assert visit.violations() == []
    visit.open("#/circuits?circuits=page-early&with=page-late")
    visit.picture("circuits")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("page-early", "page-late"):
        visit.http.delete(f"/v1/modules/{name}")


def test_gradients_are_those_of_the_api(visit):
    page = visit.open("#/gradient?source=raw:&loss=sum")
    body = {"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1], [1, 1]], "value": [[1, 2], [3, 4], [5, 6]]}
    reply = visit.http.post("/v1/attention/gradients", json=body | {"wrt": ["weights"], "return": ["weights"]})
    answered = reply.json()
    product = np.array(answered["gradients"]["weights"]) * np.array(answered["weights"])
    page.locator("dd").first.wait_for()
    assert float(facts(page)["Σ w · ∂L/∂w of this head"]) == pytest.approx(product.sum(), rel=1e-3)
    visit.open("#/gradient?layer=1&head=3&loss=token%3A8")
    visit.page.locator(".heatmap canvas").nth(1).wait_for()
    visit.picture("gradient")


@pytest.mark.parametrize("method", ["gradient_attention", "integrated", "relevance", "norm", "norm_of_sum"])
def test_attributions_are_those_of_the_api(visit, recorded, method):
    fields = {"methods": ["head_importance", method.removesuffix("_of_sum")]}
    answered = visit.http.post("/v1/attention/attribution", json=live(recorded, 1) | fields).json()
    page = visit.open(f"#/gradient?layer=1&head=3&loss=sum&attribution={method}")
    expected = np.array(answered[method])
    np.testing.assert_allclose(numbers(page, 1), expected[3] if expected.ndim == 3 else expected, rtol=2e-3, atol=1e-5)
    table = page.locator("table", has_text="Importance of the heads").locator("td:nth-child(2)")
    importance = [float(text) for text in table.all_inner_texts()]
    assert importance == pytest.approx(answered["head_importance"], rel=1e-3)
    assert facts(page)["most important head"] == f"L1H{np.argmax(importance)}"


def test_rows_of_the_first_gradient_differ(visit, recorded):
    """L is one token's output at first: the sum of all of it would give every query the same row."""
    page = visit.open("#/gradient?layer=1&head=3")
    output = np.zeros((12, 13, 32))
    output[:, 12] = 1
    body = live(recorded, 1) | {"upstream": output.tolist(), "wrt": ["weights"]}
    reply = visit.http.post("/v1/attention/gradients", json=body).json()
    shown = numbers(page)
    np.testing.assert_allclose(shown, reply["gradients"]["weights"][3], rtol=1e-3, atol=1e-6)
    assert np.ptp(shown, axis=0).max() > 0


def test_a_readout_s_attributions_add_up(visit):
    page = visit.open("#/gradient?source=raw:&attribution=integrated&loss=readout")
    assert "readout" in page.get_by_role("alert").inner_text()
    readout = {"weight": [[1, -1], [0.5, 2]], "targets": [0, 1]}
    page.get_by_label(re.compile("^Readout")).fill(json.dumps(readout))
    page.get_by_label(re.compile("^Readout")).blur()
    page.locator("dd").first.wait_for()
    body = {"query": [[1, 0], [0, 1]], "key": [[1, 0], [0, 1], [1, 1]], "value": [[1, 2], [3, 4], [5, 6]]}
    fields = body | {"methods": ["integrated"], "readout": readout}
    answered = visit.http.post("/v1/attention/attribution", json=fields).json()
    np.testing.assert_allclose(numbers(page), answered["integrated"], rtol=1e-3, atol=1e-6)
    gap = float(facts(page)["gap of completeness"].replace("−", "-"))
    assert gap == pytest.approx(answered["completeness"]["gap"], rel=1e-3)


@pytest.mark.parametrize("stored", [True, False])
def test_the_similarity_of_heads_is_that_of_the_api(visit, stored):
    with Client(visit.url) as client:
        made = client.recordings.create(RECORDING)
        pairs = client.recordings.similarity(made.id).values
    source = f"source=stored:{made.id}&" if stored else ""
    page = visit.open(f"#/compare?{source}layer=1&head=3&b_layer=2&b_head=5")
    page.get_by_role("heading", name="Similarity of the heads").wait_for()
    page.locator(".stage canvas").nth(3).wait_for()
    np.testing.assert_allclose(numbers(page, 3), pairs[12:24, 24:36], rtol=1e-3, atol=1e-5)
    shown = float(facts(page)["Jensen-Shannon divergence, nats"])
    assert shown == pytest.approx(pairs[15, 29], abs=1e-4)
    if not stored:
        page = visit.open("#/compare?layer=1&head=3&b_layer=2&b_head=5")
        visit.picture("similarity", page.locator(".stage canvas").nth(3))
    page.get_by_label("Heads of all layers").check()
    page.get_by_role("img", name="72 heads by 72 other heads").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("b_head=1&b_layer=0.*head=0&layer=0"))


def test_rollout_is_the_product_of_the_layers(visit, recorded):
    page = visit.open("#/rollout?query=8&upto=3")
    rolled = np.eye(13)
    for layer in range(3):
        mean = recorded.weights(layer).astype(np.float64).mean(0)
        rolled = (mean / mean.sum(-1, keepdims=True) / 2 + np.eye(13) / 2) @ rolled
    np.testing.assert_allclose(numbers(page), rolled, rtol=1e-3)
    visit.open("#/rollout?query=8")
    visit.picture("rollout")


@pytest.mark.parametrize("options", [{"method": "rollout", "discard": 0.5}, {"method": "flow", "combine": "max"}])
def test_rollout_and_flow_of_a_stored_recording_are_the_server_s(visit, options):
    with Client(visit.url) as client:
        stored = client.recordings.create(RECORDING)
        traced = client.recordings.rollout(stored.id, layers=["layers.0", "layers.1"], residual=0.25, **options)
    chosen = "&".join(f"{name}={each}" for name, each in options.items())
    page = visit.open(f"#/rollout?source=stored:{stored.id}&upto=2&residual=0.25&{chosen}")
    np.testing.assert_allclose(numbers(page), traced.values, rtol=1e-3, atol=1e-6)
    assert page.locator(".command summary").inner_text().endswith("/rollout")
    page.get_by_label("Leave out the smallest").fill("0.8")
    page.wait_for_url("**discard=0.8**")


def test_relevance_accumulates_over_the_layers(visit, recorded):
    page = visit.open("#/rollout?method=relevance&upto=3")
    accumulated = np.eye(13)
    for layer in range(3):
        body = live(recorded, layer) | {"methods": ["relevance"]}
        reply = visit.http.post("/v1/attention/attribution", json=body).json()
        accumulated += np.array(reply["relevance"]) @ accumulated
    np.testing.assert_allclose(numbers(page), accumulated, rtol=1e-3, atol=1e-5)
