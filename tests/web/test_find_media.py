"""Heads are found on the page by what they do in sounds and images: as the client finds them, file by file."""

import re

import httpx
import numpy as np
import pytest

from attention_client import Client
from tests.conftest import live_server
from tests.web.sound_models import NAMES, small_sounds, write_models

small_encoders = pytest.importorskip("tests.models.inputs.images.small_encoders")
SOUNDS = [small_sounds.file_of(small_sounds.speech(seconds, seed=number)) for number, seconds in enumerate((2.0, 3.0))]
FILES = [{"name": f"{number}.wav", "mimeType": "audio/wav", "buffer": content} for number, content in enumerate(SOUNDS)]
LINES = ["the cat sat", "a dog"]
PICTURES = [
    {"name": f"{width}.png", "mimeType": "image/png", "buffer": small_encoders.png(small_encoders.noise(width))}
    for width in (64, 96)
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a Whisper, a HuBERT, a Qwen2-Audio and a ViT with random parameters, resident."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    for part in (small_encoders.eager("vit"), small_encoders.processor("vit")):
        part.save_pretrained(folder / "seer")
    with live_server(folder) as url:
        for name in (*NAMES, "seer"):
            httpx.post(f"{url}/v1/models", json={"checkpoint": name}, timeout=120).raise_for_status()
        yield url


def shown(page):
    """The two statistics of each head of the scatter."""
    page.locator(".scatter").wait_for(timeout=60_000)
    heads = page.locator(".scatter [role=button]").all()
    numbers = [
        re.findall(r"[\d−-][\d.e−-]*(?=,|$)", each.get_attribute("aria-label").partition(": ")[2]) for each in heads
    ]
    return np.array([[float(number.replace("−", "-")) for number in each] for each in numbers])


def test_heads_that_follow_sounds_are_those_of_the_client(visit):
    with Client(str(visit.http.base_url), timeout=120) as client:
        expected = client.models.survey("listener", LINES, audio=SOUNDS)
    page = visit.open("#/find?source=model:listener")
    assert page.get_by_role("button", name="Go through 0 sounds").is_disabled()
    page.locator("input[multiple]").set_input_files(FILES)
    page.get_by_role("button", name="Go through 2 sounds").wait_for()
    page.locator("textarea").fill(LINES[0])
    page.locator("textarea").blur()
    page.get_by_text("1 lines for 2 files").wait_for()
    page.locator("textarea").fill("\n".join(LINES))
    page.locator("textarea").blur()
    page.get_by_role("button", name="Go through 2 sounds").click()
    means = np.stack([expected.means("max_weight"), expected.means("alignment")], 1)
    np.testing.assert_allclose(shown(page), means, rtol=6e-3, atol=1e-4)
    first = expected.ranked("alignment")[0]
    page.get_by_role("heading", name=f"{first.layer} H{first.head}").wait_for()
    best = expected.strongest(*first, "alignment", 1)[0]
    page.locator(".passages button").first.filter(has_text=f"{best}.wav: {LINES[best]}").wait_for()
    page.locator(".linked canvas").wait_for()
    assert visit.violations() == []
    page.get_by_role("button", name="Open in Head").click()
    page.get_by_role("region", name="The sound").wait_for()
    assert page.get_by_label("The decoder's text").input_value() == LINES[best]


def test_sounds_are_written_down_by_the_model(visit):
    page = visit.open("#/find?source=model:listener")
    page.locator("input[multiple]").set_input_files(FILES)
    page.get_by_role("button", name="Transcribe all").click()
    bodies = [{"model": "listener", "file": small_sounds.sent(content)} for content in SOUNDS]
    texts = [visit.http.post("/v1/audio/transcriptions", json=each).json()["text"] for each in bodies]
    lines = [" ".join(text.split()) for text in texts]
    visit.until(lambda: page.locator("textarea").input_value().split("\n") == lines)


@pytest.mark.parametrize(
    ("name", "kind", "statistics"),
    [
        ("hubert", "sounds", ["max_weight", "alignment"]),
        ("reader", "sounds", ["max_weight", "alignment"]),
        ("seer", "images", ["mean_distance", "max_weight"]),
    ],
)
def test_a_model_without_a_decoder_answers_for_files_alone(visit, name, kind, statistics):
    """A layer that hears a sound in windows stands at their mean."""
    page = visit.open(f"#/find?source=model:{name}&texts={kind}")
    files = PICTURES if kind == "images" else FILES
    page.locator("input[multiple]").set_input_files(files)
    assert page.get_by_label("Transcripts").count() == 0
    page.get_by_role("button", name=f"Go through 2 {kind}").click()
    field = "images" if kind == "images" else "audio"
    expected = []
    for file in files:
        body = {"statistics": statistics, "return_weights": False, field: [small_sounds.sent(file["buffer"])]}
        layers = visit.http.post(f"/v1/models/{name}/weights", json=body).json()["layers"]
        expected.append([[np.atleast_2d(each["statistics"][one]).mean(0) for one in statistics] for each in layers])
    means = np.array(expected).mean(0).transpose(0, 2, 1).reshape(-1, 2)  # [heads of all layers, statistics]
    np.testing.assert_allclose(shown(page), means, rtol=6e-3, atol=1e-4)
    page.locator(".linked canvas").wait_for()


def test_a_file_that_is_no_sound_is_named(visit):
    page = visit.open("#/find?source=model:hubert")
    page.locator("input[multiple]").set_input_files(
        [FILES[0], {"name": "broken.wav", "mimeType": "audio/wav", "buffer": b"RIFF"}]
    )
    page.get_by_role("button", name="Go through 2 sounds").click()
    page.get_by_role("alert").filter(has_text="broken.wav cannot be read").wait_for()
    visit.refused(1)
