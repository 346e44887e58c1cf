"""A sound on the page: chosen, heard by a model, played, and marked at the seconds of what is pointed at."""

import re

import httpx
import numpy as np
import pytest

from tests.conftest import live_server
from tests.web.conftest import PHONE, Visit, numbers
from tests.web.sound_models import NAMES, small_sounds, write_models

SECONDS = 3.0
SOUND = {"name": "tones.wav", "mimeType": "audio/wav", "buffer": small_sounds.file_of(small_sounds.speech(SECONDS))}
HEARD = {"audio": [small_sounds.sent(SOUND["buffer"])]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The URL of a server with a Whisper, a HuBERT and a Qwen2-Audio with random parameters, resident."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    with live_server(folder) as url:
        for name in NAMES:
            httpx.post(f"{url}/v1/models", json={"checkpoint": name}, timeout=120).raise_for_status()
        yield url


def choose(page) -> None:
    page.get_by_label("Sound").set_input_files(SOUND)
    page.get_by_role("region", name="The sound").wait_for()


def readout_shows(page, text: str | re.Pattern) -> None:
    page.locator(".player .caption", has_text=text).wait_for()


def row(visit: Visit, layer: str, head: int, query: int) -> np.ndarray:
    """The weights of one query of a head of the listener."""
    fields = HEARD | {"target": "ab", "layers": [layer], "select": {"heads": [head], "queries": [query]}}
    reply = visit.http.post("/v1/models/listener/weights", json=fields).json()
    return np.array(reply["layers"][0]["weights"])[0, 0]


def test_a_sound_is_heard_and_each_frame_has_its_seconds(visit):
    page = visit.open("#/overview?source=model:hubert")
    page.get_by_text("Choose a sound.").wait_for()
    page.get_by_label("Sound").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"no sound"})
    page.get_by_role("alert").filter(has_text="expected a WAV, FLAC, OGG or MP3 file").wait_for()
    choose(page)
    layers = visit.http.post("/v1/models/hubert/weights", json=HEARD).json()["layers"]
    np.testing.assert_allclose(numbers(page)[:, :20], np.array(layers[0]["weights"])[0, :66, :20], rtol=2e-3, atol=1e-6)
    strip = page.locator(".strip canvas")
    box = strip.bounding_box()
    strip.hover(position={"x": box["width"] * 1.01 / SECONDS, "y": 20})
    readout_shows(page, "1.00 s: 1.00 to 1.02 s")
    page.locator(".linked .readout", has_text="1.00 s is looked at by").wait_for()  # all drawings mark the same frame
    assert visit.violations() == []
    strip.click(position={"x": box["width"] * 2 / SECONDS, "y": 20})
    page.wait_for_function("() => document.querySelector('audio').currentTime >= 1.99")
    page.wait_for_function("() => document.querySelector('audio').ended")  # it played to its end
    readout_shows(page, "Point at the sound")
    assert "sound=tones.wav" in page.url
    page.reload()
    page.get_by_text("The sound is not open.").wait_for()


def test_a_token_marks_the_second_that_it_looked_at_most(visit):
    page = visit.open("#/overview?source=model:listener&target=ab&layer=3&head=1")
    choose(page)
    page.get_by_role("heading", name="cross.0 H1").wait_for()
    weights = row(visit, "cross.0", 1, 2)
    begin = 0.02 * int(np.argmax(weights))
    page.locator(".tokens span", has_text=re.compile("^a$")).hover()
    readout_shows(page, f"a looks at {begin:.2f} to {begin + 0.02:.2f} s most: {weights.max():.3g}")
    visit.picture("sound")
    strip = page.locator(".strip canvas")
    strip.hover(position={"x": 5, "y": 20})
    readout_shows(page, "0.00 s: 0.00 to 0.02 s")
    page.evaluate("location.hash = location.hash.replace('layer=3', 'layer=2')")
    readout_shows(page, "Tokens of this layer have no seconds.")


def test_what_was_heard_becomes_the_decoder_s_text(visit):
    page = visit.open("#/overview?source=model:listener")
    choose(page)
    fields = {"model": "listener", "file": HEARD["audio"][0]}
    text = visit.http.post("/v1/audio/transcriptions", json=fields).json()["text"].strip()
    page.get_by_role("button", name="Transcribe").click()
    page.wait_for_url("**target=**")
    visit.until(lambda: page.get_by_label("The decoder's text").input_value() == text)
    page.get_by_text(re.compile(r"^300, and \d\d of the decoder")).wait_for()


def test_the_gradient_of_a_sound_is_drawn_over_its_seconds(visit):
    page = visit.open("#/gradient?source=model:hubert&at=50")
    choose(page)
    page.locator("figcaption", has_text="by frame").wait_for()
    reply = visit.http.post("/v1/models/hubert/gradients", json=HEARD | {"of": {"position": 50}}).json()
    rows = page.locator("table", has_text="The tokens with the largest").locator("tbody tr")
    strongest = int(np.argmax(np.abs(reply["tokens"])))
    assert rows.first.locator("th").inner_text() == reply["labels"]["tokens"][strongest]
    shown = float(rows.first.locator("td").inner_text().replace("−", "-"))
    assert shown == pytest.approx(reply["tokens"][strongest], rel=2e-3)
    strip = page.locator(".strip canvas").nth(1)
    strip.hover(position={"x": strip.bounding_box()["width"] / 2, "y": 20})
    readout_shows(page, re.compile(r"^1\.50 s: 1\.50 to 1\.52 s|^1\.48 s"))
    assert visit.violations() == []


@PHONE
def test_a_sound_fits_a_phone(visit):
    page = visit.open("#/head?source=model:listener&target=ab&layer=3&head=1")
    choose(page)
    page.locator(".stage canvas").wait_for()
    visit.drawn()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert visit.violations() == []


def test_a_broken_sound_is_named_by_the_server(visit):
    page = visit.open("#/overview?source=model:hubert")
    page.get_by_label("Sound").set_input_files({"name": "broken.wav", "mimeType": "audio/wav", "buffer": b"RIFF"})
    page.get_by_role("alert").filter(has_text="audio.0").wait_for()
    visit.refused(1)


def test_a_text_with_a_sound_shows_the_layers_of_both(visit):
    page = visit.open("#/overview?source=model:reader&text=what is heard")
    page.get_by_role("heading", name="L0H0").wait_for()  # a text alone is read too
    choose(page)
    fields = HEARD | {"text": "what is heard", "layers": ["audio.0"]}
    expected = np.array(visit.http.post("/v1/models/reader/weights", json=fields).json()["layers"][0]["weights"])
    page.evaluate("location.hash += '&layer=2&head=1'")
    page.get_by_role("heading", name="audio.0 H1").wait_for()
    shown = numbers(page)[:, :20]
    np.testing.assert_allclose(shown, expected[0, 1, : len(shown), :20], rtol=2e-3, atol=1e-6)
    assert visit.violations() == []


def test_the_cost_of_a_model_that_hears_is_that_of_its_tokens(visit):
    page = visit.open("#/cost?source=model:listener")
    page.locator("table", has_text="Cost of listener").wait_for()
    tokens = int(page.get_by_label("Tokens or frames").input_value())
    costs = visit.http.post("/v1/models/listener/complexity", json={"length": tokens, "batch": 1}).json()
    assert f"There is memory for {costs['max_batch']:,}".replace(",", "\u202f") in page.locator(".answer").inner_text()
    assert page.get_by_role("alert").count() == 0
