"""``attention transcribe`` shows the words of a sound with their times."""

import base64

import pytest

from attention_client.cli.commands import transcription_commands
from attention_contract.schemas.openai_api.transcriptions import HeardSegment, HeardWord, Transcription
from tests.client.cli.command_line import invoke

WORDS = [HeardWord(word="the", start=0.0, end=0.48), HeardWord(word="cat", start=0.48, end=12.5)]


class Played:
    """A client whose model hears ``the cat``."""

    def __init__(self):
        self.models = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def transcribe(self, model, file, **fields):
        self.call = (model, file, fields)
        segment = HeardSegment(
            id=0, seek=0, start=0.0, end=12.5, text=" the cat", tokens=[1], temperature=0.0, avg_logprob=-0.5,
            compression_ratio=0.9, no_speech_prob=None,
        )  # fmt: skip
        return Transcription(text="the cat", words=WORDS, segments=[segment])


@pytest.fixture
def played(monkeypatch):
    client = Played()
    monkeypatch.setattr(transcription_commands, "client_of", lambda _: client)
    monkeypatch.setattr(transcription_commands, "loading_shown", lambda *_: client)
    return client


def test_each_word_has_a_line_with_its_seconds(played):
    result = invoke(["transcribe", "whisper", "a.wav", "--language", "en", "--temperature", "0.5"])
    assert result.output.splitlines() == ["    0.00     0.48  the", "    0.48    12.50  cat", "the cat"]
    fields = {"language": "en", "temperature": 0.5, "response_format": "verbose_json"}
    assert played.call == ("whisper", "a.wav", fields)


def test_json_is_the_whole_reply(played):
    assert '"start":0.48' in invoke(["transcribe", "whisper", "a.wav", "--json"]).output


def test_segments_are_captions(played):
    result = invoke(["transcribe", "whisper", "a.wav", "--format", "srt", "--overlap", "2"])
    assert result.output == "1\n00:00:00,000 --> 00:00:12,500\nthe cat\n\n"
    assert played.call[2] == {"overlap": 2.0, "response_format": "verbose_json"}
    assert invoke(["transcribe", "whisper", "a.wav", "--format", "vtt"]).output.startswith("WEBVTT\n\n00:00:00.000 -->")


def test_a_sound_that_cannot_be_read_is_named():
    result = invoke(["--url", "http://127.0.0.1:9", "--retries", "0", "transcribe", "whisper", "none.wav"])
    assert result.exit_code != 0
    assert "none.wav cannot be read" in str(result.exception) + result.output


def test_a_sound_to_look_at_is_read_from_its_file(tmp_path, monkeypatch):
    from attention_client import media_files

    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF")
    read = media_files.with_media({"options": {"audio": [str(path), b"fLaC"]}})["options"]["audio"]
    assert [base64.b64decode(each["base64"]) for each in read] == [b"RIFF", b"fLaC"]
    with pytest.raises(Exception, match=r"audio\.0: expected a path, bytes, got 3"):
        media_files.with_media({"options": {"audio": [3]}})
    with pytest.raises(Exception, match="audio: expected a list of sounds"):
        media_files.with_media({"options": {"audio": b"RIFF"}})
