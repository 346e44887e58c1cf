"""Models that hear, over real HTTP: what the list says, each operation, costs, and what is refused by name."""

import shutil
from io import BytesIO

import httpx
import pyarrow as pa
import pytest
from openai import OpenAI
from pyarrow import parquet
from tests.api.talk import post
from tests.conftest import live_server
from tests.models.inputs.sounds.small_sound_prompts import made
from tests.models.inputs.sounds.small_sounds import file_of, sent, speech, written

from attention_client import Client, InvalidRequest
from attention_contract.schemas.openai_api.transcriptions import Transcription
from attention_contract.wire import TABLES


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind in ("whisper", "hubert", "audio-spectrogram-transformer"):
        written(kind, root / kind)
    shutil.copytree(made("qwen2_audio")[1], root / "listener")
    with live_server(root) as url:
        yield url


@pytest.fixture(scope="module")
def client(server):
    with Client(server, timeout=300) as made:  # three models are loaded by one test, on a machine that may be busy
        yield made


def test_the_list_says_what_they_take_before_they_are_loaded(client):
    rows = {each.id: each for each in client.models.list().data}
    assert rows["whisper"].takes == ["audio", "target"]
    assert rows["listener"].takes == ["text", "messages", "audio"]
    assert rows["hubert"].takes == rows["audio-spectrogram-transformer"].takes == ["audio"]
    assert not any(row.refused for row in rows.values())


def test_costs_are_reported_by_frames(client):
    for name, length in (("whisper", 8), ("hubert", 100), ("audio-spectrogram-transformer", 134)):
        cost = client.models.complexity(name, length)
        assert cost.prefill.flops > 0
        assert cost.prefill.peak_bytes > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "the"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}, "messages"),
        ("/v1/embeddings", {"input": "the"}, "input"),
        ("/v1/audio/transcriptions", {"file": {"base64": "UklGRg=="}}, "file"),
    ],
)
@pytest.mark.parametrize("name", ["whisper", "hubert"])
def test_what_reads_no_sound_is_refused(server, name, path, body, param):
    with httpx.Client(base_url=server, timeout=60) as http:
        reply = http.post(path, json={"model": name, **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] in {param, "model"}


def test_a_sound_is_refused_by_a_model_of_texts(client):
    with pytest.raises(InvalidRequest, match="audio"):
        client.models.forward("tiny", audio=[file_of(speech(0.1))])
    with pytest.raises(InvalidRequest, match="audio"):
        client.models.forward("tiny", "the cat", audio=[file_of(speech(0.1))])


def test_classes_and_frames_are_shown_by_the_client(client, tmp_path):
    path = tmp_path / "sound.flac"
    path.write_bytes(file_of(speech(1.0, 44_100), 44_100, "FLAC", "PCM_16"))
    classes = client.models.forward("audio-spectrogram-transformer", audio=[path], top_k=3)
    assert [each.token for each in classes.predictions[0].top if each.token.startswith("LABEL_")]
    frames = client.models.forward("hubert", audio=[path], top_k=1, positions=[0, 5])
    assert (frames.predicts, [each.position for each in frames.predictions]) == ("own", [0, 5])
    kept = client.models.weights("whisper", audio=[path], layers=["encoder.1"], keep=True, top_k=1).recording
    assert client.recordings.get(kept).id == kept


@pytest.mark.slow
def test_a_picture_of_weights_is_drawn(server):
    with httpx.Client(base_url=server, timeout=60) as http:
        reply = http.post(
            "/v1/models/hubert/weights", json={"audio": [sent(speech(0.3))], "layers": [1]},
            headers={"accept": "image/svg+xml"},
        )  # fmt: skip
    assert reply.status_code == 200, reply.text
    assert "0.02 s" in reply.text or reply.text.startswith("<?xml")


def test_requests_are_read_with_lists_of_numbers(server):
    with httpx.Client(base_url=server, timeout=60) as http:
        found = post(http, "/v1/models/hubert/gradients", audio=[sent(speech(0.3))], wrt=["tokens"])
    assert len(found["tokens"]) == len(found["labels"]["seconds"])


@pytest.mark.slow
def test_a_conversation_with_a_sound_is_answered_and_looked_at(server, client):
    content = [
        {"type": "input_audio", "input_audio": {"data": sent(speech(0.5))["base64"], "format": "wav"}},
        {"type": "text", "text": "what is heard ?"},
    ]  # fmt: skip
    with OpenAI(base_url=f"{server}/v1", api_key="none") as openai:
        answer = openai.chat.completions.create(
            model="listener", messages=[{"role": "user", "content": content}], max_tokens=3, temperature=0,
            extra_body={"attention": {"layers": [1], "top_k": 1}},
        )  # fmt: skip
    assert answer.choices[0].model_extra["attention"][0]["layers"][0]["layer"] == 1
    reply = client.models.weights("listener", "what is heard ?", audio=[file_of(speech(0.5))], top_k=1)
    assert [each.layer for each in reply.layers] == [0, 1, "audio.0", "audio.1"]
    assert reply.labels_of().seconds[1] == (0.0, 0.04)
    assert reply.tokens_of("audio.0")[0].seconds[0] == (0.0, 0.02)
    with httpx.Client(base_url=server, timeout=60) as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("media_type", TABLES)
def test_the_attention_of_a_transcript_is_a_table_over_http(server, client, media_type):
    sound, attention = sent(speech(1.0)), {"layers": ["cross.1", "decoder.0"], "heads": [2, 0], "top_k": 1}
    body = {"model": "whisper", "file": sound, "attention": attention}
    answer = httpx.post(f"{server}/v1/audio/transcriptions", json=body, headers={"Accept": media_type}, timeout=60)
    assert answer.headers["content-type"] == media_type
    assert answer.headers["vary"] == "Accept"
    if media_type == next(iter(TABLES)):
        rows = parquet.read_table(BytesIO(answer.content))
    else:
        rows = (pa.ipc.open_file if media_type.endswith("file") else pa.ipc.open_stream)(answer.content).read_all()
    whole = httpx.post(f"{server}/v1/audio/transcriptions", json=body, timeout=60).json()
    expected = Transcription(**whole).to_table([2, 0])
    assert rows == expected
    assert {"begin_s", "layer", "head", "entropy", "top_keys"} <= {*rows.column_names}
    for name, value in (("response_format", "srt"), ("stream", True), ("attention", None)):
        wrong = httpx.post(answer.url, json=body | {name: value}, headers={"Accept": media_type})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
