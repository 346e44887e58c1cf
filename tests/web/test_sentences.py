"""A typed sentence and a whole model on the page: its attention at once, its loading, and what cannot be."""

import base64
import re
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from threading import Event

import httpx
import numpy as np
import pytest
from PIL import Image

from attention_client import Client
from tests.conftest import eventually, live_server
from tests.web.conftest import Visit, numbers

tiny_models = pytest.importorskip("tests.client.tiny_models")
small_encoders = pytest.importorskip("tests.models.inputs.images.small_encoders")
small_prompts = pytest.importorskip("tests.models.inputs.images.small_prompts")
small_classifiers = pytest.importorskip("tests.models.answers.small_classifiers")
TEXT = "Kate met Tamiro in the park. Then Tam"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with `tiny` resident, and a GPT-2 with random parameters to load."""
    import torch
    from transformers import (
        BartForConditionalGeneration,
        BertModel,
        GPT2LMHeadModel,
        ViTConfig,
        ViTForImageClassification,
        ViTImageProcessorPil,
    )

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    gpt2 = GPT2LMHeadModel(tiny_models.CONFIGS["gpt2"]())
    gpt2.save_pretrained(folder / "small")
    tiny_models.tokenizer().save_pretrained(folder / "small")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(**sizes, image_size=64, patch_size=16, initializer_range=0.3)
    ViTForImageClassification(config).save_pretrained(folder / "seer")
    ViTImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder / "seer")
    small_prompts.save(folder / "reader", "llava")
    BartForConditionalGeneration(tiny_models.CONFIGS["bart"]()).save_pretrained(folder / "pair")
    tiny_models.tokenizer().save_pretrained(folder / "pair")
    BertModel(tiny_models.CONFIGS["bert"]()).save_pretrained(folder / "embedder")
    tiny_models.tokenizer().save_pretrained(folder / "embedder")
    for name, head in (("moods", "ForSequenceClassification"), ("names", "ForTokenClassification")):
        small_classifiers.sharp("bert", head).save_pretrained(folder / name)
        small_classifiers.words().save_pretrained(folder / name)
    for part in (small_encoders.eager("clip_vision_model"), small_encoders.processor("clip_vision_model")):
        part.save_pretrained(folder / "headless")
    with live_server(folder) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        yield url


def weights(visit: Visit, text: str, model: str = "tiny") -> list[np.ndarray]:
    answered = visit.http.post(f"/v1/models/{model}/weights", json={"text": text}).json()
    return [np.array(layer["weights"]) for layer in answered["layers"]]


def type_sentence(page, text: str) -> None:
    page.get_by_label("Type a sentence").fill(text)
    page.get_by_label("Type a sentence").press("Enter")


@pytest.mark.parametrize("visit", [{}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"])
def test_the_page_opens_with_the_attention_of_a_sentence(visit):
    page = visit.open()
    page.wait_for_selector(".multiples li")
    opened = page.evaluate("performance.now()")
    assert page.locator(".multiples li").count() == 16
    assert "Tour of five findings" in page.locator("header").inner_text()
    assert page.get_by_label("Type a sentence").input_value() == TEXT
    np.testing.assert_allclose(numbers(page), weights(visit, TEXT)[0][0], atol=6e-4)
    began = time.perf_counter()
    type_sentence(page, "the cat sat on the mat")
    page.locator(".linked svg > text", has_text="·mat").first.wait_for()
    following = time.perf_counter() - began
    print(f"opened in {opened:.0f} ms, the next sentence in {1e3 * following:.0f} ms")
    assert opened < 10_000  # measured: 350 ms; tests share their machine
    assert following < 10  # measured: 260 ms
    tokens = page.locator(".linked svg > text").all_text_contents()[:7]
    assert tokens == ["<|begin|>", "the", "·cat", "·sat", "·on", "·the", "·mat"]
    assert "text=the+cat+sat" in page.url
    assert visit.violations() == []
    visit.picture("sentence" if page.evaluate("document.documentElement.dataset.theme") == "light" else "sentence-dark")
    page.get_by_role("button", name="Undo").click()
    page.get_by_text("14 of at most 512 tokens").wait_for()


@pytest.mark.parametrize(
    "visit", [{"viewport": {"width": 390, "height": 844}, "has_touch": True}], indirect=True, ids=["phone"]
)
def test_a_sentence_fits_on_a_phone(visit):
    page = visit.open()
    page.locator(".multiples li").nth(6).click()
    page.get_by_role("heading", name="L1H2").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    visit.picture("sentence-phone", page.locator(".large h3"))


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True, ids=["still"])
def test_the_token_or_cell_under_the_pointer_tells_its_weights(visit):
    page = visit.open()
    page.get_by_role("link", name="Open L1H0").hover()
    page.get_by_role("heading", name="L1H0").wait_for()  # beside the small ones, while the pointer rests on it
    page.get_by_role("link", name="Open L0H0").click()
    page.wait_for_url("**head=0&layer=0**")
    first = weights(visit, TEXT)[0][0]
    lines = page.locator(".linked svg")
    token = lines.locator("> text", has_text="·met").first
    readout = page.locator(".linked > .readout")
    page.get_by_role("heading", name="L0H0").hover()  # away from the small ones first
    token.hover()
    readout.filter(has_text=f"·met looks at Kate {first[2, 1]:.2f}").wait_for()
    assert lines.locator("path").count() == (first[2] >= 0.01).sum()
    lines.locator("> text", has_text="·met").nth(1).hover()
    readout.filter(has_text=re.compile(r"^·met looks at ·met: ")).wait_for()
    page.get_by_role("heading", name="L0H0").hover()
    readout.filter(has_text="Point at").wait_for()
    canvas = page.locator(".linked canvas")
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    readout.filter(has_text=f"·met looks at Kate: {first[2, 1]:.3g}").wait_for()


def test_a_chosen_model_is_loaded_with_its_progress_and_can_be_cancelled(visit, started_as_served):
    visit.http.delete("/v1/models/small")  # another test may have loaded it
    eventually(lambda: visit.http.get("/v1/models/small").json()["state"] == "idle")
    page = visit.open()
    page.get_by_label("Attention of").select_option("model:small")
    page.get_by_role("progressbar", name="Loading small").wait_for(timeout=20_000)
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("alert").filter(has_text="Cancelled").wait_for()
    eventually(lambda: visit.http.get("/v1/models/small").json()["state"] == "idle")
    page.get_by_label("Attention of").select_option("model:tiny")
    page.wait_for_selector(".multiples li")
    page.get_by_label("Attention of").select_option("model:small")
    type_sentence(page, "the cat sat")
    page.locator(".linked svg > text", has_text="sat").first.wait_for(timeout=120_000)
    np.testing.assert_allclose(numbers(page), weights(visit, "the cat sat", "small")[0][0], atol=6e-4)


def test_a_model_that_is_not_there_is_named_and_another_can_be_chosen(visit):
    page = visit.open("#/overview?source=model:nobody")
    assert "nobody" in page.get_by_role("alert").inner_text()
    visit.refused(1)
    page.get_by_label("Attention of").select_option("model:tiny")
    page.wait_for_selector(".multiples li")


def test_a_text_that_is_too_long_is_refused_before_it_is_sent(visit):
    page = visit.open()
    page.get_by_text("14 of at most 512 tokens").wait_for()
    page.get_by_label("Type a sentence").fill("the cat " * 700)
    page.locator(".over", has_text=re.compile(r"^14\d\d of at most 512 tokens")).wait_for()
    page.get_by_label("Type a sentence").press("Enter")
    page.get_by_role("alert").filter(has_text="the model has positions for 512").wait_for()
    visit.refused(1)
    type_sentence(page, "the cat")
    page.get_by_text("3 of at most 512 tokens").wait_for()


def test_a_text_with_too_many_weights_is_pooled_by_the_server(visit):
    """Of 16 heads with 512 tokens the page reads the largest weights of squares and the statistics, in three passes,
    and in a fourth the head that stands beside the others."""
    text = "the cat sat on the mat. " * 73
    page = visit.open()
    requests = []
    page.on("request", lambda each: each.url.endswith("/weights") and requests.append(each.post_data_json))
    type_sentence(page, text)
    page.get_by_text("512 of at most 512 tokens").wait_for(timeout=30_000)
    page.locator(".empty", has_text="Reading the weights…").wait_for(state="detached")
    page.locator(".linked canvas").wait_for()
    assert len(requests) == 4, [sorted(each) for each in requests]
    assert requests[-1]["select"] == {"heads": [0]}
    options = {"statistics": ["entropy", "induction"], "return_weights": False}
    layers = visit.http.post("/v1/models/tiny/weights", json={"text": text.strip()} | options).json()["layers"]
    rows = [row.locator("td").all_inner_texts() for row in page.locator("main table").first.locator("tbody tr").all()]
    shown = np.array([[float(row[0]), float(row[11])] for row in rows])
    expected = [np.transpose([each["statistics"][name] for name in options["statistics"]]) for each in layers]
    np.testing.assert_allclose(shown, np.concatenate(expected), atol=6e-4)
    page.get_by_role("link", name="Open L1H0").click()
    page.locator(".large").get_by_role("link", name="Open").click()
    page.locator(".stage canvas").focus()
    page.keyboard.press("ArrowDown")
    page.locator(".readout b", has_text=re.compile(r"\d")).wait_for()
    exact = visit.http.post("/v1/models/tiny/weights", json={"text": text.strip(), "layers": [1]}).json()["layers"][0]
    assert float(page.locator(".readout b").inner_text()) == pytest.approx(exact["weights"][0][1][0], rel=1e-3)
    page.keyboard.press("q")  # the bars are of the largest weights, and the table begins with some
    bars = page.locator("svg.drawing", has_text=", the 64 largest of 512").locator("> text")
    bars.first.wait_for()
    assert bars.count() == 1 + 2 * 64
    rows = page.locator("table", has_text="masked score").locator("tbody tr")
    assert rows.count() == 128
    page.get_by_role("button", name="Show all 512 rows").click()
    assert rows.count() == 512


def test_each_link_of_the_tour_shows_its_finding_at_once(visit):
    page = visit.open("#/tour?source=model:tiny")
    links = page.locator(".tour a")
    titles = links.all_inner_texts()
    assert len(titles) == 5
    assert visit.violations() == []
    statistics = ("previous token", "own position", "", "first key", "")
    for at, (title, statistic) in enumerate(zip(titles, statistics, strict=True)):
        visit.open("#/tour?source=model:tiny&layer=3&head=1&text=the+cat")
        links.nth(at).click()
        page.wait_for_url(lambda url: "#/tour" not in url and "the+cat" not in url)
        if statistic:
            value = page.locator("dl.facts > div", has_text=statistic).first.locator("dd")
            value.wait_for()
            assert float(value.inner_text()) > 0.5, title
        elif "Induction" in title:
            first = page.locator(".multiples li").first
            first.filter(has_text="L1H0").wait_for()
            assert float(first.locator("b").inner_text()) > 0.3
        else:
            page.get_by_role("button", name="Knock out L1H0", pressed=True).wait_for()
            likeliest = page.locator("svg", has_text="the likeliest is taken").locator("text").nth(1)
            knocked = likeliest.text_content()
            page.get_by_role("button", name="Knock out L1H0").click()
            page.wait_for_url(lambda url: "knocked" not in url)
            page.wait_for_function(
                "(before) => [...document.querySelectorAll('svg')].some((e) => "
                "e.textContent.includes('likeliest is taken') && e.querySelectorAll('text')[1].textContent !== before)",
                arg=knocked,
            )
            assert likeliest.text_content() == "ir"


def test_two_sentences_are_compared_side_by_side(visit):
    page = visit.open("#/compare?source=model:tiny&layer=1&head=2")
    page.get_by_label("Its sentence").fill("the cat sat")
    page.get_by_label("Its sentence").press("Enter")
    page.locator("figcaption", has_text="“the cat sat”").wait_for()
    assert page.locator("figcaption").first.inner_text() == f"L1H2: “{TEXT}”"
    page.get_by_text("The texts have 14 and 4 tokens").wait_for()
    np.testing.assert_allclose(numbers(page, 1), weights(visit, "the cat sat")[1][2], rtol=1e-3, atol=1e-5)
    assert visit.violations() == []


def test_an_imported_layer_leads_to_a_sentence(visit):
    made = visit.http.post("/v1/modules/import", json={"checkpoint": "small", "layer": 1}).json()
    page = visit.open("#/model")
    page.get_by_role("button", name=f"Look at {made['name']}").click()
    page.wait_for_url("**source=model%3Asmall**")
    page.get_by_label("Type a sentence").wait_for()
    page.locator(".multiples li").first.wait_for(timeout=120_000)
    page.get_by_role("heading", name="L1H0").wait_for()
    visit.http.delete(f"/v1/modules/{made['name']}")


def test_models_are_loaded_and_ended_from_the_list(visit):
    page = visit.open("#/model")
    if visit.http.get("/v1/models/small").json()["state"] == "resident":
        visit.http.delete("/v1/models/small")
        page = visit.open("#/model")
    page.get_by_role("button", name="Load small").click()
    page.locator(".answer", has_text="Loaded small.").wait_for(timeout=120_000)
    page.get_by_role("button", name="End small").click()
    page.get_by_role("button", name="Really end small?").click()
    page.locator(".answer", has_text="Ended small.").wait_for()
    assert visit.http.get("/v1/models/small").json()["state"] == "idle"
    page.get_by_text("More models").click()
    page.get_by_text("its operator allows it by ATTENTION_HUB=true (--hub).").wait_for()
    assert visit.violations() == []


def test_the_list_shows_how_many_requests_a_model_has(visit):
    """A model's process has at most 32; the others wait."""
    page = visit.open("#/model")
    state = page.locator("tr", has=page.get_by_role("rowheader", name="tiny", exact=True)).locator("td").first
    seen = Event()

    def generate() -> None:
        while not seen.is_set():
            body = {"model": "tiny", "prompt": "the cat", "max_tokens": 100}
            visit.http.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(34) as callers:
        found = [callers.submit(generate) for _ in range(34)]
        try:
            state.filter(has_text="resident, 32 running, 2 waiting").wait_for()
        finally:
            seen.set()
    assert [each.result() for each in found] == [None] * 34
    state.filter(has_text=re.compile(r"^resident$")).wait_for()


def test_a_head_is_knocked_out_up_to_the_logits(visit):
    page = visit.open("#/edit?source=model:tiny&layer=1&head=0")
    page.get_by_role("button", name="Knock out L1H0").click()
    page.get_by_label("Prediction of").wait_for()
    row = page.locator("table", has_text="Likeliest tokens").locator("tbody tr").first
    shown = [row.locator("th").inner_text(), *row.locator("td").all_inner_texts()]
    knocked = [{"tap": "context", "heads": [0], "set": 0}]
    fields = {"text": TEXT, "edits": {"1": knocked}, "compare": "unedited"}
    top = visit.http.post("/v1/models/tiny/forward", json=fields).json()["predictions"][0]["top"][0]
    assert shown[0] == top["token"]
    expected = [top["unedited_probability"], top["probability"], top["unedited_logit"]]
    expected.append(top["logit"] - top["unedited_logit"])
    assert [float(each.replace("−", "-")) for each in shown[1:]] == pytest.approx(expected, rel=2e-3, abs=1e-5)
    visit.picture("logits", page.get_by_role("heading", name="Prediction"))
    assert visit.violations() == []


def test_the_first_gradient_is_that_of_the_next_token_s_probability(visit):
    page = visit.open("#/gradient?source=model:tiny&layer=1&head=2")
    fields = {"text": TEXT, "layers": [1], "wrt": ["weights"]}
    reply = visit.http.post("/v1/models/tiny/gradients", json=fields).json()
    slopes = np.array(reply["layers"][0]["gradients"]["weights"][2])
    depends = np.array(
        [layer["heads"] for layer in visit.http.post("/v1/models/tiny/gradients", json={"text": TEXT}).json()["layers"]]
    )
    np.testing.assert_allclose(numbers(page), depends, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(numbers(page, 1), slopes, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(numbers(page, 2), slopes * weights(visit, TEXT)[1][2], rtol=1e-3, atol=1e-7)
    rows = page.locator("table", has_text="Importance of the heads").locator("td:nth-child(2)").all_inner_texts()
    np.testing.assert_allclose(list(map(float, rows)), np.abs(reply["layers"][0]["heads"]), rtol=1e-3)
    assert page.locator(".facts dd").first.inner_text() == f"−{abs(reply['value']):.3f}"
    assert page.locator(".facts dt").first.inner_text() == "log p(ir)"


def test_a_text_is_continued_token_by_token_with_what_each_head_looked_at(visit):
    page = visit.open("#/decode?source=model:tiny&heat=0.8&seed=3&length=6")
    page.get_by_role("button", name="Knock out L0H0").click()
    page.wait_for_url("**knocked=0.0**")
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("group", name="Save").wait_for()
    edits = {"0": [{"tap": "context", "heads": [0], "set": 0}]}
    fields = {"model": "tiny", "prompt": TEXT, "max_tokens": 6, "temperature": 0.8, "seed": 3}
    fields |= {"attention": {"edits": edits, "top_k": 16, "statistics": []}}
    (choice,) = visit.http.post("/v1/completions", json=fields).json()["choices"]
    came = choice["attention"]
    shown = page.locator(".generated button")
    assert shown.all_inner_texts() == [re.sub("^ ", "·", each["token"]) for each in came]
    shown.nth(1).click()
    keys = came[1]["layers"][1]["top_keys"]
    label = page.get_by_role("button", name=re.compile(r"^L1H2: ")).get_attribute("aria-label")
    assert label.endswith(f" {keys['weights'][2][0]:.2f}")
    page.get_by_role("button", name=re.compile(r"^L1H2: ")).click()
    page.wait_for_url("**head=2&**layer=1**")
    marked = page.locator(".generated > *").nth(keys["keys"][2][0])
    assert float(marked.get_attribute("title")) == pytest.approx(keys["weights"][2][0], rel=1e-2)
    logits = visit.http.post(
        "/v1/models/tiny/forward", json={"text": TEXT, "edits": edits, "return": ["logits"]}
    ).json()
    heated = np.exp((np.ravel(logits["logits"]) - np.max(logits["logits"])) / 0.8)
    bars = page.locator("svg", has_text="probability at temperature 0.8").locator("text").all_text_contents()
    assert max(heated / heated.sum()) == pytest.approx(float(bars[2]), rel=1e-3)
    assert visit.violations() == []
    plain = visit.open("#/decode?source=model:tiny")
    plain.get_by_role("button", name="Generate").click()
    plain.get_by_role("group", name="Save").wait_for()
    assert "".join(plain.locator(".generated button").all_inner_texts()).startswith("iro·and")
    visit.picture("generation")


def test_a_generated_token_tells_what_it_depends_on_and_outlives_a_reload(visit):
    page = visit.open("#/decode?source=model:tiny&length=4&knocked=0.0&layer=1")
    requests = []
    page.on("request", lambda each: each.url.endswith("/v1/completions") and requests.append(each))
    page.get_by_role("button", name="Generate").click()
    page.wait_for_url("**came=4**", timeout=30_000)
    came = page.locator(".generated button")
    texts = came.all_inner_texts()
    came.nth(1).click()
    page.wait_for_url("**token=1**")
    knocked = {"0": [{"tap": "context", "heads": [0], "set": 0}]}
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 2, "temperature": 0, "attention": {"edits": knocked}}
    (choice,) = visit.http.post("/v1/completions", json=body).json()["choices"]
    first, second = (each["id"] for each in choice["attention"])
    ids = visit.http.post("/v1/models/tiny/forward", json={"text": TEXT}).json()["labels"]["ids"] + [first]
    show = page.locator("label", has_text=re.compile("^Of .* show")).locator("select")
    show.select_option("depends")
    gradients = {"tokens": ids, "edits": knocked, "of": {"token": second}}
    reply = visit.http.post("/v1/models/tiny/gradients", json=gradients).json()
    page.locator(".facts dd", has_text=f"−{abs(reply['value']):.3f}").wait_for(timeout=30_000)
    spans = page.locator(".dependence span").all()
    found = [float(each.get_attribute("title").replace("−", "-")) for each in spans]
    np.testing.assert_allclose(found, reply["tokens"], rtol=2e-3, atol=1e-6)
    show.select_option("heads")
    rows = page.locator("table", has_text="The heads of L1").locator("tbody tr")
    rows.first.wait_for(timeout=30_000)
    for head in range(4):
        edits = knocked | {"1": [{"tap": "context", "heads": [head], "set": 0}]}
        forward = {"tokens": ids, "edits": edits, "return": ["logits"]}
        logits = np.ravel(visit.http.post("/v1/models/tiny/forward", json=forward).json()["logits"])
        expected = logits[second] - np.log(np.exp(logits).sum())
        cells = rows.nth(head).locator("td").all_inner_texts()
        assert float(cells[0].replace("−", "-")) == pytest.approx(expected, abs=2e-3)
        assert float(cells[2].replace("−", "-")) == pytest.approx(reply["value"] - expected, rel=2e-3, abs=1e-4)
    assert visit.violations() == []
    page.reload()
    came.nth(3).wait_for()
    assert came.all_inner_texts() == texts
    rows.first.wait_for(timeout=30_000)
    assert len(requests) == 1  # what this tab has is not computed again
    page.evaluate("sessionStorage.clear()")
    page.reload()
    page.wait_for_url("**came=4**")
    came.nth(3).wait_for(timeout=30_000)
    assert came.all_inner_texts() == texts
    assert len(requests) == 2


def test_a_generation_can_be_stopped_and_a_text_that_is_too_long_is_refused(visit):
    page = visit.open("#/decode?source=model:tiny&length=480&heat=2&seed=1")  # goes on for a second and more
    page.get_by_text("14 tokens; at most 512 with those that come").wait_for()
    page.get_by_role("button", name="Generate").click()
    page.locator(".generated button").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Generate").wait_for()
    assert 1 <= page.locator(".generated button").count() < 480
    page.get_by_role("textbox", name="Text").fill("the cat " * 700)
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("alert").filter(has_text="512").first.wait_for()
    visit.refused(2)


def test_what_an_encoder_read_is_distinguished_from_what_its_decoder_writes(visit):
    visit.http.post("/v1/models", json={"checkpoint": "pair"}, timeout=180).raise_for_status()
    page = visit.open("#/overview?source=model:pair&text=the+cat+sat&target=the+dog")
    page.locator("dd", has_text="3, and 3 of the decoder").wait_for()
    page.get_by_text("3 of at most 32 tokens").wait_for()
    page = visit.open("#/decode?source=model:pair&text=the+cat+sat&length=3")
    page.locator("label", has_text=re.compile("^Layer")).locator("select").select_option(label="cross.1")
    page.get_by_role("button", name="Generate").click()
    page.wait_for_url("**came=**")  # as many as come before an end
    fields = {"model": "pair", "prompt": "the cat sat", "max_tokens": 3, "temperature": 0, "attention": {"top_k": 16}}
    came = visit.http.post("/v1/completions", json=fields).json()["choices"][0]["attention"]
    top = {each["layer"]: each["top_keys"] for each in came[-1]["layers"]}
    read = page.locator("[aria-label='What the encoder read'] span")
    assert read.all_inner_texts() == ["the", "cat", "sat"]
    shown = [float(each.get_attribute("title")) for each in read.all()]
    expected = dict(zip(top["cross.1"]["keys"][0], top["cross.1"]["weights"][0], strict=True))
    np.testing.assert_allclose(shown, [expected[place] for place in range(3)], rtol=1e-2)
    table = page.locator("table", has_text="The strongest key of each head").locator("tbody th")
    assert table.all_inner_texts() == list(top)
    assert page.get_by_text("what it depends on").count() == 0  # no request names the decoder's tokens
    assert visit.violations() == []


def test_what_is_refused_for_now_is_sent_again(visit):
    page = visit.open()
    page.wait_for_selector(".multiples li")
    tries, ended = [], {"title": "Ended", "detail": "it starts again", "status": 503, "code": "model_ended"}

    def refuse(route):
        tries.append(route)
        route.fulfill(status=503, json=ended, headers={"Retry-After": "0.1"})

    page.route("**/v1/models/tiny/weights", refuse)
    type_sentence(page, "the cat sat")
    page.get_by_role("alert").filter(has_text="it starts again. The page tries again by itself.").wait_for()
    page.get_by_role("button", name="Try again").wait_for()
    assert len(tries) == 4
    page.get_by_role("button", name="Look").click()  # the same sentence
    page.get_by_role("button", name="Try again").wait_for(state="detached")
    page.unroute("**/v1/models/tiny/weights")
    page.locator(".linked svg > text", has_text="·sat").first.wait_for()
    assert page.get_by_role("alert").count() == 0
    assert all("status of 503" in line for line in visit.faults)
    visit.faults.clear()


def test_a_page_that_was_away_lists_its_models_again(visit):
    page = visit.open()
    page.wait_for_selector(".multiples li")
    hide = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    listed = visit.http.get("/v1/models").json()
    listed["data"].append(listed["data"][0] | {"id": "of another tab"})
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    page.evaluate(hide, True)
    page.evaluate(hide, False)
    page.locator("option", has_text="of another tab").first.wait_for(state="attached")
    page.route("**/health/ready", lambda route: route.abort())
    page.evaluate(hide, False)
    page.locator(".health[data-state='no answer']").wait_for()
    assert all("ERR_FAILED" in line for line in visit.faults)
    visit.faults.clear()


def test_patches_lie_over_the_pixels_that_they_show(visit, tmp_path):
    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[15:30, 60:90] = 255
    Image.fromarray(pixels).save(tmp_path / "square.png")
    page = visit.open("#/overview?source=model:seer")
    assert "Choose an image" in page.locator(".waits").inner_text()
    assert page.get_by_role("alert").count() == 0  # nothing went wrong yet
    page.set_input_files("input[type=file]", tmp_path / "square.png")
    page.locator(".patches canvas").wait_for(timeout=120_000)
    page.get_by_role("link", name="Open L1H2").click()
    with Client(visit.url, timeout=60) as client:
        reply = client.models.weights("seer", images=[tmp_path / "square.png"])
    labels, weights = reply.labels_of(), reply.layers[1].weights[2]
    white = labels.patches.index((0, 1, 2))
    assert labels.rectangles[white] == pytest.approx((60, 15, 90, 30))
    canvas, readout = page.locator(".patches canvas"), page.locator(".patches .readout")
    readout.filter(has_text=f"{weights[0, 1:].sum():.3g} of the weights of CLS").wait_for()
    box = canvas.bounding_box()
    for column, row in ((61, 16), (89, 29)):  # corners of the white patch
        canvas.hover(position={"x": box["width"] * column / 120, "y": box["height"] * row / 60})
        readout.filter(has_text="CLS looks at [1,2]: ").wait_for()
    shown = readout.inner_text().split(": ")[1].replace("−", "-")
    assert float(shown) == pytest.approx(weights[0, white], rel=1e-3)
    canvas.click(position={"x": box["width"] * 75 / 120, "y": box["height"] * 22 / 60})
    readout.filter(has_text="[1,2] looks at [1,2]: ").wait_for()
    assert visit.violations() == []
    visit.picture("image", compared=False)  # of a model whose weights nobody fixed
    page.get_by_role("link", name="Explain").click()
    page.get_by_role("link", name="Gradient").click()
    page.locator("label", has_text=re.compile("^Class")).wait_for()
    with Client(visit.url, timeout=60) as client:
        gradients = client.models.gradients("seer", images=[tmp_path / "square.png"])
    page.locator(".facts", has_text=f"−{abs(gradients.value):.3f}").wait_for()
    page.get_by_role("link", name="Rollout").click()
    page.locator(".patches canvas").wait_for()
    (tmp_path / "notes.txt").write_text("no image")
    page.set_input_files("input[type=file]", tmp_path / "notes.txt")
    page.get_by_role("alert").filter(has_text="notes.txt: expected a PNG").wait_for()
    assert page.locator("input[type=file]").evaluate("field => field.value") == ""  # the image stays
    page.set_input_files("input[type=file]", tmp_path / "square.png")
    page.get_by_role("alert").wait_for(state="detached")
    assert "image=square.png&" in page.url  # the same image again is no other one
    page.reload()
    page.locator(".waits", has_text="Choose square.png again").wait_for()


def pixels_of(page) -> np.ndarray:
    """The colours ``[height, width, 3]`` of the image with its patches."""
    url = page.locator(".patches canvas").evaluate("canvas => canvas.toDataURL()")
    return np.asarray(Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"), float)


def assert_drawn(visit, labels, values, gray: int, width: int) -> None:
    """The middle of each patch of a gray image has the colour of its number."""
    visit.screenshot()  # the image is painted after its numbers came
    drawn = pixels_of(visit.page)
    scale = drawn.shape[1] / width
    most = max(abs(value) for value, place in zip(values, labels.rectangles, strict=True) if place)
    assert most > 0
    for value, place in zip(values, labels.rectangles, strict=True):
        if place is not None:
            x, y = scale * (place[0] + place[2]) / 2, scale * (place[1] + place[3]) / 2
            opacity = 0.75 * abs(value) / most
            ink = np.array([235, 90, 20] if value > 0 else [40, 60, 235])
            np.testing.assert_allclose(drawn[int(y), int(x)], gray * (1 - opacity) + ink * opacity, atol=3)


def test_what_a_word_depends_on_lies_over_the_pixels_of_the_image(visit, tmp_path):
    Image.new("RGB", (64, 48), (128, 128, 128)).save(tmp_path / "gray.png")
    text, images = "what is on the mat", [tmp_path / "gray.png"]
    visit.http.post("/v1/models", json={"checkpoint": "reader"}, timeout=180).raise_for_status()
    with Client(visit.url, timeout=60) as client:
        predicted = client.models.forward("reader", text, images=images, top_k=3).predictions[0].top
        replies = [
            client.models.gradients("reader", text, images=images, of=of, wrt=["tokens", "embeddings"])
            for of in ({}, {"token": predicted[2].id})
        ]
    page = visit.open("#/gradient?source=model:reader&text=what+is+on+the+mat")
    page.set_input_files("input[type=file]", images[0])
    page.locator(".patches canvas").wait_for(timeout=30_000)
    facts = page.locator(".facts").first
    for reply, token in zip(replies, (predicted[0], predicted[2]), strict=True):
        facts.filter(has_text=f"log p({token.token})−{abs(reply.value):.3f}").wait_for()
        labels = reply.labels_of()
        assert_drawn(visit, labels, reply.tokens, 128, 64)
        patch = labels.patches.index((0, 1, 2))
        left, top, right, bottom = labels.rectangles[patch]
        canvas = page.locator(".patches canvas")
        size = canvas.bounding_box()["width"] / 64
        canvas.hover(position={"x": size * (left + right) / 2, "y": size * (top + bottom) / 2})
        readout = page.locator(".patches .readout", has_text="by [1,2]: ").inner_text()
        assert float(readout.split(": ")[1].replace("−", "-")) == pytest.approx(reply.tokens[patch], rel=1e-3)
        page.get_by_role("heading", name="Gradient").hover()
        words = page.locator(".dependence span")
        assert words.all_inner_texts() == text.split()
        shown = [float(each.get_attribute("title").replace("−", "-")) for each in words.all()]
        np.testing.assert_allclose(shown, reply.tokens[-5:], rtol=1e-3)
        if token is predicted[0]:
            page.locator("label", has_text=re.compile("^Token")).locator("select").select_option(f"#{predicted[2].id}")
    page.get_by_label("A number for each token").select_option("norm")
    page.get_by_text("‖gradient‖ of log p").first.wait_for()
    assert_drawn(visit, labels, np.linalg.norm(replies[1].embeddings, axis=-1), 128, 64)
    assert visit.violations() == []
    visit.picture("image-gradient", page.locator(".patches").first, compared=False)
    page.get_by_role("link", name="Rollout").click()
    looking = page.get_by_label("Looking")
    looking.wait_for()
    assert looking.input_value() == page.locator("label", has_text=re.compile("^Query")).locator("select").input_value()
    page.get_by_label("Layers of").select_option("vision")
    page.locator("label", has_text=re.compile("^Query")).locator("select").select_option(label="3 [0,2]")


def test_the_words_that_a_class_depends_on_are_shown(visit):
    page = visit.open("#/gradient?source=model:moods&text=the+cat+sat")
    classes = page.locator("label", has_text=re.compile("^Class")).locator("select")
    classes.wait_for(timeout=120_000)
    with Client(visit.url, timeout=60) as client:
        alone = client.models.gradients("moods", "the cat sat", of={"token": "good"})
        pair = client.models.gradients("moods", "the cat sat", text_pair="the mat", of={"token": "good"})
        name = client.models.gradients("names", "the cat sat", of={"position": 2, "token": "bad"})
    classes.select_option("#2")
    page.locator(".facts", has_text=f"−{abs(alone.value):.3f}").wait_for()
    page.get_by_label("A second text").fill("the mat")
    page.get_by_label("A second text").press("Enter")
    page.locator(".facts", has_text=f"−{abs(pair.value):.3f}").wait_for()
    words = page.locator(".dependence span")
    shown = [float(each.get_attribute("title").replace("−", "-")) for each in words.all()]
    np.testing.assert_allclose(shown, pair.tokens, rtol=2e-3, atol=1e-6)
    page = visit.open("#/gradient?source=model:names&text=the+cat+sat&at=2&predicted=%230")
    page.locator(".facts", has_text=f"−{abs(name.value):.3f}").wait_for(timeout=120_000)
    page = visit.open("#/edit?source=model:moods&text=the+cat+sat&layer=1&head=0")
    page.get_by_role("button", name="Knock out L1H0").click()
    page.get_by_text("The classes of the text:").wait_for()
    assert visit.violations() == []


def test_a_model_without_a_head_is_offered_no_gradient_of_a_prediction(visit, tmp_path):
    Image.new("RGB", (64, 48), (128, 128, 128)).save(tmp_path / "gray.png")
    visit.http.post("/v1/models", json={"checkpoint": "headless"}, timeout=180).raise_for_status()
    page = visit.open("#/gradient?source=model:headless")
    page.set_input_files("input[type=file]", tmp_path / "gray.png")
    page.get_by_text("most important head").wait_for()
    assert "probability" not in page.get_by_label("L is").inner_text()
    assert page.locator(".patches").count() == 0


def test_the_gradient_of_a_model_of_embeddings_says_what_is_differentiated(visit):
    visit.http.post("/v1/models", json={"checkpoint": "embedder"}, timeout=180).raise_for_status()
    page = visit.open("#/gradient?source=model:embedder&text=the+cat+sat")
    last = visit.http.post("/v1/models/embedder/weights", json={"text": "the cat sat"}).json()["labels"]["tokens"][-1]
    why = "This model predicts no token and no class, so L is the sum of this attention's output"
    page.get_by_text(re.compile(f"^{why} at token .*{re.escape(last)}.$")).wait_for()
    page.get_by_text("most important head").wait_for()
    assert "probability" not in page.get_by_label("L is").inner_text()
    page.get_by_label("L is").select_option("sum")
    page.get_by_text(f"{why}.", exact=True).wait_for()
