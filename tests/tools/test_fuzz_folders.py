"""A short walk over damaged folders of every form, and proof that it sees a reader that fails."""

import json
import os
import signal

import httpx
import pytest

pytest.importorskip("gguf")
pytest.importorskip("peft")
from tests.conftest import live_server
from tools.fuzz import folder_walk
from tools.fuzz.damaged_values import GGUF_VALUES, VALUES, json_damages
from tools.fuzz.folder_forms import FORMS, LOADED, NAME, write_sound
from tools.fuzz.folder_walk import ask_readers, walk_folders
from tools.fuzz.load_walk import ask_loaded

from attention_service.modules.checkpoints.json_objects import UnreadableJson, json_object

pytestmark = pytest.mark.long

SOME = ["texts", "model gemma2", "form bitsandbytes NF4", "timm vit", "openclip clip", "gguf llama"]


@pytest.mark.sampled(form=3)  # CI damages 300 more folders (`make fuzz`)
@pytest.mark.parametrize("form", FORMS)
def test_every_reader_answers_or_names_what_is_damaged(form):
    outcome = walk_folders(ask_readers, 20, 5, [form])
    assert not outcome.faults, "\n".join(outcome.faults)
    assert min(outcome.counts["answered"], outcome.counts["refused"]) > 0


@pytest.mark.sampled(form=1)
@pytest.mark.parametrize("form", SOME)
def test_a_damaged_folder_is_loaded_and_read_or_refused_by_name(form):
    outcome = walk_folders(ask_loaded, 8, 5, [form])
    assert not outcome.faults, "\n".join(outcome.faults)


@pytest.mark.sampled(form=2)
@pytest.mark.parametrize("form", LOADED)
def test_a_sound_folder_is_answered_and_loaded(tmp_path, form):
    write_sound(tmp_path, form)
    assert ask_readers(tmp_path)[f"GET /v1/models/{NAME}"] == "answered"
    if not form.startswith(("entries of hqq", "entries of class")):  # without what these are about
        said = ask_loaded(tmp_path)
        assert said.get("tokens", "answered") == said["POST /v1/models"] == "answered"


def test_every_value_replaces_every_entry():
    damages = [*json_damages(b'{"a": {"b": [1, 2]}}')]
    made = {(damage.place, damage.content()) for damage in damages}
    assert {place for place, _ in made} == {(), ("a",), ("a", "b"), ("a", "b", "0"), ("a", "b", "1")}
    assert (("a", "b"), b'{"a": {"b": NaN}}') in made
    assert (("a",), b"{}") in made
    assert len(made) >= 5 * len(VALUES)


def test_every_type_of_gguf_is_among_the_values():
    assert {kind for kind, _ in GGUF_VALUES.values()} == {*range(14)}


@pytest.mark.parametrize("fault", [TypeError("unhashable type: 'list'"), KeyError("x")])
def test_a_reader_that_fails_is_a_fault(monkeypatch, fault):
    def failing(*_):
        raise fault

    monkeypatch.setitem(folder_walk.QUESTIONS, "POST /v1/modules/import", failing)
    outcome = walk_folders(ask_readers, 3, 5, ["family llama 1"])
    assert len(outcome.faults) == 3
    assert ", POST /v1/modules/import: FAULT" in outcome.faults[0]


def test_a_process_that_ends_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.fuzz.load_walk._answers", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert ask_loaded(tmp_path)["POST /v1/models"].startswith("FAULT the process ended with status -9")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "is not a JSON object"), (b"{", "is not a JSON object"), (b"\xff", "is not a JSON object"),
        (b'{"a": ' * 5000, "is not a JSON object"), (b'{"a":' * 70 + b"1" + b"}" * 70, "more than 64 lists"),
        (rb'{"a": "\ud800"}', "half a character"), (rb'{"\udfff": 1}', "half a character"),
    ],
)  # fmt: skip
def test_what_no_reader_could_take_is_no_json_object(content, words):
    with pytest.raises(UnreadableJson, match=words):
        json_object(content)


def test_json_objects_are_read_as_they_are():
    assert json_object(rb'{"a": "\ud83d\ude00", "b": [[[1]]], "c": 1e400}') == {
        "a": "\U0001f600", "b": [[[1]]], "c": float("inf"),
    }  # fmt: skip
    assert json_object(b'{"a": %s}' % (b"9" * 5000)) == {"a": float("inf")}
    assert json_object(b'{"a": %s}' % (b"9" * 300)) == {"a": int("9" * 300)}


@pytest.mark.slow
def test_over_http_no_damaged_folder_gives_500(tmp_path):
    """One folder for each of some damages, asked about together."""
    files = write_sound(tmp_path, "texts")
    config = next(file for file in files if file.name == "config.json").read_bytes()
    for at, damage in enumerate([*json_damages(config)][::40]):
        folder = tmp_path / f"damaged-{at}"
        folder.mkdir()
        for file in (tmp_path / NAME).iterdir():
            (folder / file.name).hardlink_to(file)
        (folder / "config.json").unlink()
        (folder / "config.json").write_bytes(damage.content())
    with live_server(tmp_path) as url, httpx.Client(base_url=url, timeout=60) as http:
        names = [each["path"] for each in http.get("/v1/checkpoints").raise_for_status().json()["checkpoints"]]
        http.get("/v1/models").raise_for_status()
        assert len(names) > 10
        for name in names:
            replies = [
                http.get(f"/v1/checkpoints/{name}"), http.get(f"/v1/models/{name}"),
                http.post("/v1/modules/import", json={"checkpoint": name, "name": name}),
            ]  # fmt: skip
            for reply in replies:
                assert reply.status_code < 500, (name, reply.text)
                if reply.status_code >= 400:
                    assert reply.headers["content-type"] == "application/problem+json"
                    assert len(json.loads(reply.content)["detail"]) > 10
