"""An adapter on the page: offered beside its base, asked like any model, and compared with it head by head."""

import json
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import attention_service
from tests.conftest import live_server
from tests.web.conftest import PHONE, numbers

pytest.importorskip("transformers")
TEXT = "Kate met Tamiro in the park. Then Tam"
VARIANT = "tiny:random-lora"


def save_adapter(folder: Path) -> None:
    """Write a LoRA of the queries of layer 1 of `tiny`, with random numbers."""
    config = json.loads((Path(attention_service.__file__).parent / "tiny_model/config.json").read_text("utf-8"))
    width = config["hidden_size"]
    random = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format("A"): torch.randn(4, width, generator=random),
        name.format("B"): torch.randn(width, 4, generator=random) / 10,
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    entries = {"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(entries | {"lora_alpha": 8}), "utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny` resident, and an adapter of it."""
    folder = tmp_path_factory.mktemp("models")
    save_adapter(folder / "random-lora")
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def divergence(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence of heads ``[H, Lq, Lk]``, in nats, its mean over the queries."""
    mean = (one + other) / 2
    terms = [
        np.where(each > 0, each * np.log(np.where(each > 0, each, 1) / np.where(mean > 0, mean, 1)), 0)
        for each in (one, other)
    ]
    return (sum(terms) / 2).sum(-1).mean(-1)


def test_an_adapter_opens_beside_its_base_with_the_change_of_every_head(visit):
    page = visit.open()
    page.get_by_label("Attention of").select_option(f"model:{VARIANT}")
    page.get_by_text("base + adapter random-lora on cpu").wait_for()
    page.get_by_role("link", name="Compare").click()
    page.get_by_role("heading", name="Changes by the adapter random-lora").wait_for()
    fields = {"text": TEXT, "compare": "base"}
    layers = visit.http.post(f"/v1/models/{VARIANT}/weights", json=fields).json()["layers"]
    expected = np.array([divergence(np.array(each["weights"]), np.array(each["base"]["weights"])) for each in layers])
    np.testing.assert_allclose(numbers(page), expected, rtol=2e-3, atol=1e-6)
    assert expected[0].max() == 0 < expected[1].min()  # layer 1 is the first that the adapter changes
    prediction = visit.http.post(f"/v1/models/{VARIANT}/forward", json=fields | {"top_k": 5}).json()["predictions"][0]
    page.locator("dd", has_text=re.compile(f"^{prediction['divergence']:.3f}$")).wait_for()
    rows = page.locator("table", has_text="Likeliest tokens of both").locator("tbody tr")
    shown = [[float(cell.replace("−", "-")) for cell in row.locator("td").all_inner_texts()] for row in rows.all()]
    pairs = [[each["base_probability"], each["probability"]] for each in prediction["top"]]
    np.testing.assert_allclose(shown, pairs, rtol=1e-2)
    visit.picture("adapter")
    changes = page.locator(".heatmap canvas").first
    changes.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**head=1&layer=2**")
    page.locator("figcaption", has_text=f"L2H1: {VARIANT}").wait_for()
    page.locator("figcaption", has_text="L2H1: tiny: Kate").wait_for()
    difference = np.array(layers[2]["weights"][1]) - np.array(layers[2]["base"]["weights"][1])
    np.testing.assert_allclose(numbers(page, 3), difference, rtol=2e-3, atol=1e-6)
    assert visit.violations() == []
    page.get_by_label("Compare with").select_option("same")
    page.locator("figcaption", has_text=re.compile("^L2H2$")).wait_for()
    assert page.get_by_role("heading", name="Changes by the adapter").count() == 0


@PHONE
def test_an_adapter_beside_its_base_fits_a_phone(visit):
    page = visit.open(f"#/compare?source=model:{VARIANT}&layer=1")
    page.locator("table caption", has_text="Likeliest tokens of both").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_adapter_is_explained_and_ended_alone(visit):
    page = visit.open(f"#/gradient?source=model:{VARIANT}")
    reply = visit.http.post(f"/v1/models/{VARIANT}/gradients", json={"text": TEXT}).json()
    page.locator(".facts dd", has_text=f"−{abs(reply['value']):.3f}").wait_for()
    page = visit.open("#/model")
    row = page.locator("tr", has=page.get_by_role("rowheader", name=VARIANT, exact=True))
    row.get_by_text("with tiny").wait_for()
    page.get_by_role("button", name=f"End {VARIANT}").click()
    page.get_by_role("button", name=f"Really end {VARIANT}?").click()
    page.locator(".answer", has_text=f"Ended {VARIANT}.").wait_for()
    assert visit.http.get("/v1/models/tiny").json()["state"] == "resident"
    visit.http.delete("/v1/models/tiny").raise_for_status()
    page.get_by_role("button", name=f"Load {VARIANT}").click()
    page.locator(".answer", has_text=f"Loaded {VARIANT}.").wait_for()
