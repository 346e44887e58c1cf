"""Recording a text on the server: by the recorder in a process of its own."""

import asyncio

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from attention_client import Client, InvalidCheckpoint
from attention_client.recording import predict, record
from attention_contract.schemas.recordings import RecordText
from attention_service.modules.checkpoints import catalogue
from attention_service.runtime import text_recording
from attention_service.runtime.callers import Caller, caller
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.text_recording import OF_ONE, WAITING, TextRecorder
from tests.api.talk import post, refuse
from tests.conftest import live_server

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it

PATH, TEXT = "/v1/recordings/text", "-- the cat sat"


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A model repository with what looks like a checkpoint with a tokenizer, and one without."""
    root = tmp_path_factory.mktemp("models")
    for name in ("tiny/bert", "bare"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text('{"model_type": "bert"}')
        save_file({"embeddings": np.zeros((4, 4), np.float32)}, root / name / "model.safetensors")
    (root / "tiny/bert/tokenizer.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def url(repository):
    with live_server(repository) as url:
        yield url


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.mark.slow
def test_the_recording_has_the_models_own_numbers(tmp_path):
    from tests.client import tiny_models

    model, tokenizer = tiny_models.model("bert"), tiny_models.tokenizer()
    model.save_pretrained(tmp_path / "org/tiny")
    tokenizer.save_pretrained(tmp_path / "org/tiny")
    with live_server(tmp_path) as url, Client(url, timeout=120) as client:
        info = client.recordings.record("org/tiny", TEXT)
        made = client.recordings.download(info.id)
        with pytest.raises(InvalidCheckpoint, match="target: the model has one stack"):
            client.recordings.record("org/tiny", "the cat", target="die Katze")
        assert client.server.info().memory.in_flight_bytes == 0
    assert (info.model, info.text, info.computed) == ("tiny", TEXT, "local")
    expected = record(model, tokenizer, TEXT)
    assert info.tokens == expected.facts.tokens
    for name, value in expected.tensors.items():
        np.testing.assert_allclose(made.tensors[name], value, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_predictions_are_the_models_own_and_edits_change_them(tmp_path):
    from transformers import BertForMaskedLM

    from tests.client import tiny_models
    from tests.client.test_recording import headed

    model, tokenizer = headed(BertForMaskedLM, "bert"), tiny_models.tokenizer()
    for folder in (tmp_path / "headed", tmp_path / "headless"):
        (model if folder.name == "headed" else model.bert).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    edits = {"layers.1": [{"tap": "context", "heads": [0], "set": 0}]}
    with live_server(tmp_path) as url, Client(url, timeout=120) as client:
        told = client.recordings.predict("headed", TEXT, edits=edits, position=2, top_k=3)
        with pytest.raises(InvalidCheckpoint, match="BertModel, which predicts no tokens"):
            client.recordings.predict("headless", TEXT)
        with pytest.raises(InvalidCheckpoint, match="expected layers among 0, 1; got 7"):
            client.recordings.predict("headed", TEXT, edits={"layers.7": []})
        assert client.server.info().memory.in_flight_bytes == 0
        taps = ["weights", "q", "k", "v"]
        made = client.recordings.download(client.recordings.record("headed", TEXT, taps=taps).id)
    expected = predict(model, tokenizer, TEXT, edits=edits, position=2, top_k=3)
    assert max(expected.divergence) > 1e-5
    np.testing.assert_allclose(told.divergence, expected.divergence, atol=1e-6)
    assert [each.token for each in told.top] == [each.token for each in expected.top]
    for name, value in record(model.bert, tokenizer, TEXT, taps=taps).tensors.items():
        np.testing.assert_allclose(made.tensors[name], value, atol=2e-6, err_msg=name)


def test_which_checkpoints_can_record_is_listed(http, monkeypatch):
    listed = {each["path"]: each["records_text"] for each in http.get("/v1/checkpoints").json()["checkpoints"]}
    assert listed == {"bare": False, "tiny/bert": True}
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    assert http.get("/v1/checkpoints/tiny%2Fbert").json()["records_text"] is False


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"checkpoint": "bare", "text": "the"}, 422, "has no tokenizer"),
        ({"checkpoint": "../tiny", "text": "the"}, 404, "no checkpoint"),
        ({"checkpoint": "tiny/bert", "text": ""}, 422, "text"),
        ({"checkpoint": "tiny/bert", "text": "a\0b"}, 422, "text"),
        ({"checkpoint": "tiny/bert", "text": "a", "taps": ["scores"]}, 422, "taps"),
        ({"checkpoint": "tiny/bert", "text": "a" * 20_001}, 422, "text"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_runs(http, body, status, told):
    problem = refuse(http, PATH, **body)
    assert (problem["status"], told in problem["detail"]) == (status, True), problem


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"text": "a" * 2001}, "text"),
        ({"edits": {"first": []}}, "edits"),
        ({"edits": {"layers.0": [{"tap": "context"}]}}, "exactly one of set, value and scale"),
        ({"position": -1}, "position"),
        ({"top_k": 101}, "top_k"),
        ({"checkpoint": "bare"}, "has no tokenizer"),
    ],
)
def test_what_cannot_be_predicted_is_refused_before_anything_runs(http, more, told):
    problem = refuse(http, "/v1/recordings/predictions", **{"checkpoint": "tiny/bert", "text": "the"} | more)
    assert (problem["status"], told in problem["detail"]) == (422, True), problem


def test_a_server_without_transformers_says_what_to_install(http, monkeypatch):
    monkeypatch.setattr("attention_service.runtime.text_recording.has_transformers", lambda: False)
    problem = refuse(http, PATH, checkpoint="tiny/bert", text="the cat")
    assert problem["param"] == "checkpoint"
    assert "attention-service[transformers]" in problem["detail"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # libraries of other tests watch forks
def test_a_recording_ends_at_its_deadline_with_its_process(http):
    answer = http.post(PATH, json={"checkpoint": "tiny/bert", "text": TEXT}, headers={"Prefer": "wait=1"})
    assert (answer.status_code, answer.json()["code"]) == (503, "deadline_exceeded")
    assert http.get("/v1").json()["memory"]["in_flight_bytes"] == 0
    assert post(http, "/v1/attention/forward", query=[[1.0]])["output"] == [[1.0]]


def test_no_python_file_of_the_repository_runs_and_no_command_line_has_a_text(http, repository, monkeypatch):
    """The recorder starts in the model repository, whose checkpoints are data."""
    for name in ("numpy", "typer", "attention_client", "sitecustomize"):
        (repository / f"{name}.py").write_text(f"open({str(repository / 'ran')!r}, 'w').close()\n")
    lines = []
    start = asyncio.create_subprocess_exec
    monkeypatch.setattr(
        asyncio, "create_subprocess_exec", lambda *line, **more: lines.append(line) or start(*line, **more)
    )
    try:
        secret = "the cat sat on its secret"
        problem = refuse(http, PATH, checkpoint="tiny/bert", text=secret, target="die Katze")
        assert "cannot run this text" in problem["detail"]
        assert lines
        assert not any(text in part for part in lines[0] for text in (secret, "die Katze"))
        assert not (repository / "ran").exists()
    finally:
        for file in repository.glob("*.py"):
            file.unlink()


def test_texts_that_wait_for_their_turn_hold_no_memory(tmp_path):
    held = []

    class Stopped(TextRecorder):
        async def _process(self, command, request, need):
            await asyncio.sleep(60)

    async def crowd():
        budget = Budget(100, 100, lambda: 0, 16)
        recorder = Stopped(tmp_path, budget.holding)
        request = RecordText(checkpoint="tiny", text="a")
        texts = [asyncio.create_task(recorder.record(request, 40, None)) for _ in range(OF_ONE)]
        await asyncio.sleep(0.05)
        held.append((budget.in_flight, budget.waiting))
        for text in texts:
            text.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
        held.append((budget.in_flight, budget.waiting))

    asyncio.run(crowd())
    assert held == [(40, 0), (0, 0)]


def test_one_caller_leaves_places_to_others(tmp_path):
    class Stopped(TextRecorder):
        async def _process(self, command, request, need):
            await asyncio.sleep(60)

    async def crowd():
        recorder = Stopped(tmp_path, Budget(100, 100, lambda: 0, 16).holding)
        request = RecordText(checkpoint="tiny", text="a")
        texts = []

        async def send(name, count):
            """The refusals of so many texts of one caller."""
            caller.set(Caller(name))
            mine = [asyncio.create_task(recorder.record(request, 1, None)) for _ in range(count)]
            texts.extend(mine)
            await asyncio.sleep(0.05)
            return [str(text.exception()) for text in mine if text.done()]

        told = await send("greedy", OF_ONE + 2), await send("other", WAITING - OF_ONE), await send("third", 1)
        for text in texts:
            text.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
        return *told, await send("greedy", 1)

    greedy, other, third, again = asyncio.run(crowd())
    assert [f"{OF_ONE} texts of yours wait" in each for each in greedy] == [True, True]
    assert other == again == []
    assert f"{WAITING} texts wait" in third[0]


def test_a_model_that_takes_much_more_memory_than_estimated_is_ended(http, monkeypatch):
    monkeypatch.setattr(text_recording, "_PROCESS_BYTES", 2**20)
    problem = refuse(http, PATH, checkpoint="tiny/bert", text=TEXT)
    assert (problem["status"], problem["code"], problem["param"]) == (413, "over_budget", "text")
    assert problem["needed_bytes"] > problem["limit_bytes"] >= 2**20
    assert http.get("/v1").json()["memory"]["in_flight_bytes"] == 0
