"""Sounds of which the right transcript is known: cut into windows, joined, divided into segments, as captions."""

import re
import zlib

import orjson
import pytest
import torch
from tests.models.inputs.sounds.small_listeners import PROMPT, STEP, listener, spoken
from tests.models.inputs.sounds.small_sounds import (
    BEFORE,
    NO_TIMES,
    RATE,
    SECONDS,
    START,
    extractor,
    sent,
    speech,
    tokenizer,
    whisper,
)

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai_api.captions import captions
from attention_contract.schemas.openai_api.transcriptions import Transcription, TranscriptionRequest
from attention_contract.validation import validate
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.transcription_plan import plan_transcription
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.process.reply_writing import lines_of

SAID = "abc def gab cde fga bcd efg abc dec fab gef dac gad bec fad ab"
"""15.5 seconds: three windows of the 6 that the model hears."""
WINDOWS = [[0, 6], [5, 11], [9.5, 15.5]]


def loaded(folder):
    return LoadedModel.load(folder, dtype=None, device=torch.device("cpu"), progress=lambda _: None)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listener")
    listener(folder)
    return loaded(folder)


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A small Whisper that may write tokens of times, and its eager self."""
    folder = tmp_path_factory.mktemp("timed")
    eager = whisper(folder, suppress_tokens=[3, 5, START, BEFORE])
    return loaded(folder), eager


def objects(model, sound, **fields):
    """Return the objects that are sent while a sound is written down, the last behind the others."""
    request = validate(TranscriptionRequest, {"model": "m", "file": sent(sound), "language": "en", **fields})
    told = []
    last = generate(model, request, plan_transcription(model, request), told.extend).last
    return [orjson.loads(lines_of([one])) for one in [*told, *last]]


def written(model, sound, **fields):
    return validate(Transcription, objects(model, sound, **fields)[-1])


WORDS = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}


@pytest.mark.parametrize("overlap", [None, 1.5])
def test_a_long_sound_has_the_text_and_the_times_that_were_said(hearing, overlap):
    reply = written(hearing, spoken(SAID), **WORDS, **({} if overlap is None else {"overlap": overlap}))
    assert reply.text == SAID
    assert [word.word for word in reply.words] == SAID.split()
    for word, place in zip(reply.words, re.finditer(r"\S+", SAID), strict=True):
        # A word begins behind the word before, and the frame of a head is that of the middle of a letter.
        assert max(0, place.start() - 1) * STEP - 0.2 <= word.start <= (place.start() + 1) * STEP + 0.2
        assert word.end == pytest.approx(place.end() * STEP, abs=0.2)
    assert reply.duration == len(SAID) * STEP
    if overlap is None:
        assert reply.windows == [tuple(window) for window in WINDOWS]


def test_windows_without_an_overlap_have_all_that_was_said(hearing):
    reply = written(hearing, spoken(SAID), **WORDS, overlap=0)
    assert reply.windows == [(0, 6), (6, 12), (9.5, 15.5)]
    assert reply.text.replace(" ", "") == SAID.replace(" ", "")


def test_the_events_of_a_long_sound_are_the_text_of_its_windows(hearing):
    *events, done = objects(hearing, spoken(SAID), stream=True, attention={"top_k": 1, "statistics": []})
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 3
    assert "".join(event["delta"] for event in events) == SAID == done["text"]
    seconds = [token["seconds"][0] for event in events for token in event["attention"]][: len(SAID)]
    assert seconds == pytest.approx([(at + 0.5) * STEP for at in range(len(SAID))], abs=0.03)


def test_windows_without_a_common_word_are_joined_by_time(hearing, monkeypatch):
    """What the second window hears in the common part is another text than what the first hears there."""
    from attention_service.models.generation.plans import transcription_plan

    cut = transcription_plan.cut

    def other(sound, *args):
        first, second = cut(sound, *args)
        changed = second.sound.samples.copy()
        changed[:RATE] = spoken("gggg")
        return [first, second._replace(sound=second.sound._replace(samples=changed))]

    monkeypatch.setattr(transcription_plan, "cut", other)
    said = "aaa bbb ccc ddd eee f ee fab gef dac gad abc"
    assert written(hearing, spoken(said), **WORDS).text == said


def test_a_model_without_tokens_of_times_has_a_segment_a_window(hearing):
    generation = hearing.model.generation_config
    before = generation.no_timestamps_token_id
    try:
        generation.no_timestamps_token_id = None
        del generation.no_timestamps_token_id
        request = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
        # Without that token, the prompt is one shorter; every letter is heard a step later.
        reply = written(hearing, spoken(SAID), **request)
    finally:
        generation.no_timestamps_token_id = before
    assert len(reply.segments) == len(WINDOWS)
    assert "".join(segment.text for segment in reply.segments).strip() == reply.text
    assert [segment.seek for segment in reply.segments] == [0, 500, 950]
    assert all(segment.no_speech_prob is None for segment in reply.segments)


def reference(eager, sound):
    features = extractor("whisper")(sound, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    return eager.generate(
        features["input_features"], attention_mask=features["attention_mask"], language="en", return_timestamps=True,
        force_unique_generate_call=True,  # else it hears again what is behind the last pair of times
    )[0].tolist()  # fmt: skip


def test_segments_are_those_that_tokens_of_times_divide(timed):
    """The tokens are those of transformers with ``return_timestamps``; the rule is written out once more."""
    model, eager = timed
    reply = written(model, speech(), response_format="verbose_json", attention={"top_k": 1, "statistics": []})
    ids = [token.id for token in reply.attention]
    assert ids == reference(eager, speech())[-len(ids) :]
    assert any(token > NO_TIMES for token in ids)
    pieces, start, begun = [], None, []
    for token in ids:
        if token <= NO_TIMES:
            begun.append(token)
        elif begun:
            pieces.append((start, (token - NO_TIMES - 1) * 0.02, begun))
            start, begun = None, []
        else:
            start = (token - NO_TIMES - 1) * 0.02
    texts = [tokenizer().decode(tokens, skip_special_tokens=True) for *_, tokens in pieces]
    whole = [(*piece[:2], text) for piece, text in zip(pieces, texts, strict=True) if text.strip()]
    assert len(whole) > 1
    for segment, (begin, end, text) in zip(reply.segments, whole, strict=False):
        assert segment.text == text
        assert segment.end == pytest.approx(min(end, 5.0), abs=1e-3)
        assert begin is None or segment.start == pytest.approx(min(begin, 5.0), abs=1e-3)
        raw = text.encode()
        assert segment.compression_ratio == len(raw) / len(zlib.compress(raw))
    assert "".join(segment.text for segment in reply.segments).strip() == reply.text
    assert reply.words


def test_numbers_of_segments_are_those_of_one_pass(timed):
    model, eager = timed
    fields = {"response_format": "verbose_json", "timestamp_granularities": ["segment"], "include": ["logprobs"]}
    reply = written(model, speech(), **fields)
    features = extractor("whisper")(speech(), sampling_rate=RATE, return_tensors="pt")["input_features"]
    ids = reference(eager, speech())
    with torch.no_grad():
        logs = eager(features, decoder_input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert reply.segments[0].no_speech_prob == pytest.approx(
        float(logs[ids.index(START), NO_TIMES - 1].exp()), rel=1e-4
    )
    chosen = {at + 1: float(logs[at, token]) for at, token in enumerate(ids[1:])}
    texts = [at for at, token in enumerate(ids) if at >= PROMPT - 1 and token < NO_TIMES - 8]
    assert [each.logprob for each in reply.logprobs][: len(texts)] == pytest.approx(
        [chosen[at] for at in texts], rel=1e-4
    )
    count = sum(token <= NO_TIMES for token in reply.segments[0].tokens)
    assert reply.segments[0].avg_logprob == pytest.approx(sum(chosen[at] for at in texts[:count]) / count, rel=1e-4)
    assert reply.words is None or not reply.words


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"overlap": SECONDS / 2 + 0.1}, "overlap"),
        ({"overlap": -1}, "overlap"),
        ({"stream": True, "response_format": "srt"}, "stream"),
        ({"response_format": "srt", "timestamp_granularities": ["segment"]}, "timestamp_granularities"),
        ({"response_format": "ass"}, "response_format"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["letter"]}, "timestamp_granularities.0"),
        ({"response_format": "verbose_json", "timestamp_granularities": []}, "timestamp_granularities"),
    ],
)
def test_what_cannot_be_asked_is_named(hearing, fields, param):
    with pytest.raises(InvalidRequest) as fault:
        written(hearing, spoken("abc"), **fields)
    assert fault.value.param == param


# ── captions ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_STAMP = r"(\d{2,}):([0-5]\d):([0-5]\d)[.,](\d{3})"


def read_captions(text, form):
    """Read captions strictly, as their formats are defined. Returns begin and end in milliseconds, and the text."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    if form == "vtt":
        assert blocks.pop(0) == "WEBVTT"
    cues = []
    for number, block in enumerate(blocks, 1):
        lines = block.split("\n")
        if form == "srt":
            assert lines.pop(0) == str(number)
        stamps, words = lines
        assert ("," in stamps) is (form == "srt")
        times = [int(x) for x in re.fullmatch(f"{_STAMP} --> {_STAMP}", stamps).groups()]
        begin, end = (
            ((hours * 60 + minutes) * 60 + seconds) * 1000 + thousandths
            for hours, minutes, seconds, thousandths in (times[:4], times[4:])
        )
        assert begin < end
        assert "-->" not in words
        if form == "vtt":
            assert not re.search(r"<|>|&(?!amp;|lt;|gt;)", words)
        cues.append((begin, end, words))
    return cues


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_captions_are_read_as_their_formats_say(form):
    cues = [(0, 1.2346, " a < b --> c & d\n\ne "), (1.5, 1.5, "now"), (2, 3, "  "), (3661.0, 3725.5, "late")]
    cleaned = {"srt": "a < b -> c & d e", "vtt": "a &lt; b --&gt; c &amp; d e"}[form]
    assert read_captions(captions(cues, form), form) == [
        (0, 1235, cleaned), (1500, 1501, "now"), (3_661_000, 3_725_500, "late"),
    ]  # fmt: skip
    assert read_captions(captions([], form), form) == []
