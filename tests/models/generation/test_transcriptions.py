"""The text of a sound has the tokens of transformers' own ``generate``, each with the seconds that it looked at."""

import io
import json
from importlib.util import find_spec

import httpx
import numpy as np
import orjson
import pytest
import torch
from tests.conftest import live_server
from tests.models.generation.decoding.test_joined import compare
from tests.models.inputs.sounds.small_listeners import listener, spoken
from tests.models.inputs.sounds.small_sounds import (
    ENGLISH,
    GERMAN,
    NO_TIMES,
    RATE,
    SECONDS,
    START,
    TRANSCRIBE,
    extractor,
    file_of,
    loaded,
    made,
    sent,
    speech,
    tokenizer,
    whisper,
)
from tests.models.small_models import near

from attention_client import Client
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.openai_api.transcriptions import Transcription, TranscriptionRequest
from attention_contract.validation import validate
from attention_service.core.inspection.time_warping import warped_frames, warping_path
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, generate, read_prompts
from attention_service.models.generation.plans.transcription_plan import plan_transcription
from attention_service.models.process.reply_writing import lines_of

LOOK = {"top_k": 1, "statistics": []}


def answered(**fields):
    model = loaded("whisper")
    if fields.get("response_format") == "verbose_json":
        fields = {"timestamp_granularities": ["word"], **fields}
    request = validate(TranscriptionRequest, {"model": "whisper", "file": sent(speech()), "attention": LOOK, **fields})
    (whole,) = generate(model, request, plan_transcription(model, request), lambda _: None).last
    return validate(Transcription, orjson.loads(lines_of([whole])))


def reference(**options):
    made_of = extractor("whisper")(speech(), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    return made("whisper")[0].generate(
        made_of["input_features"], attention_mask=made_of["attention_mask"], return_token_timestamps=True, **options
    )


def running(decoder, **fields):
    request = validate(TranscriptionRequest, {"model": "whisper", **fields})
    plan = plan_transcription(decoder.loaded, request)
    return RunningGeneration(decoder, request, plan, lambda _: None)


def whole(ended):
    return validate(Transcription, orjson.loads(lines_of(ended.last)))


@pytest.mark.long
def test_sounds_share_passes_and_have_the_tokens_of_each_alone():
    """One begins later, with a prompt; another has edits; the tokens are also those of transformers."""
    fields = {
        "response_format": "verbose_json", "timestamp_granularities": ["word"], "attention": LOOK | {"weights": True},
    }  # fmt: skip
    edits = {"cross.1": [{"tap": "weights", "heads": [0], "set": 0.0}]}
    asked = [
        {"file": sent(speech()), **fields},
        {"file": sent(speech()[: 2 * RATE]), "language": "de", **fields},
        {"file": sent(speech()), "prompt": "the cat", **fields},
        {"file": sent(speech()[RATE:]), **fields, "attention": {"edits": edits}},
    ]
    decoder = Decoder(loaded("whisper"))
    texts = [running(decoder, **each) for each in asked]
    for at, each in enumerate(texts):
        while each.unread:
            assert not read_prompts(decoder, [each], 10_000)
        assert not decode(decoder, [text for text in texts[: at + 1] if not text.has_ended])
    while left := [each for each in texts if not each.has_ended]:
        assert not decode(decoder, left)
    decoder.close()
    assert {each.joined for each in texts} == {len(asked)}
    for each, text in zip(asked, texts, strict=True):
        other = Decoder(loaded("whisper"))
        alone = running(other, **each, alone=True)
        while not alone.has_ended:
            assert not (read_prompts(other, [alone], 10_000) if alone.unread else decode(other, [alone]))
        other.close()
        found, own = whole(text.end()), whole(alone.end())
        assert (found.text, found.language) == (own.text, own.language)
        assert found.words == own.words
        assert [token.id for token in found.attention] == [token.id for token in own.attention]
        for token, expected in zip(found.attention, own.attention, strict=True):
            assert token.seconds == expected.seconds
            for layer, theirs in zip(token.layers, expected.layers, strict=True):
                compare(layer.model_dump(), theirs.model_dump())
    ids = [token.id for token in whole(texts[0].end()).attention]
    assert ids == reference(task="transcribe")["sequences"][0].tolist()[-len(ids) :]


@pytest.mark.sampled(fields=1, options=1, first=1)
@pytest.mark.parametrize(
    ("fields", "options", "first"),
    [
        ({}, {"task": "transcribe"}, None),
        ({"language": "de"}, {"language": "de"}, [START, GERMAN, TRANSCRIBE, NO_TIMES]),
        ({"language": "English"}, {"language": "english"}, [START, ENGLISH, TRANSCRIBE, NO_TIMES]),
        ({"language": "en", "prompt": "the cat"}, {"language": "en", "prompt": "the cat"}, None),
    ],
)
def test_tokens_are_those_of_transformers(fields, options, first):
    found = answered(**fields, response_format="verbose_json")
    prompt = options.pop("prompt", None)
    if prompt is not None:
        options["prompt_ids"] = torch.as_tensor(tokenizer().get_prompt_ids(prompt, return_tensors="pt"))
    expected = reference(**options)
    ids = [token.id for token in found.attention]
    assert ids == expected["sequences"][0].tolist()[-len(ids) :]
    assert len(ids) > 20
    assert found.text == tokenizer().decode(ids, skip_special_tokens=True).strip()
    if first is not None:
        assert found.attention[0].position == len(first)
        assert found.language == ("german" if GERMAN in first else "english")


@pytest.mark.slow
def test_a_model_without_prompts_has_the_tokens_of_transformers():
    model = loaded("moonshine")
    request = validate(TranscriptionRequest, {"model": "moonshine", "file": sent(speech(1.5)), "attention": LOOK})
    (whole,) = generate(model, request, plan_transcription(model, request), lambda _: None).last
    ids = [token["id"] for token in whole["attention"]]
    made_of = extractor("moonshine")([speech(1.5)], sampling_rate=RATE, return_tensors="pt", padding=True)
    expected = made("moonshine")[0].generate(**made_of, max_new_tokens=len(ids), do_sample=False)
    assert expected[0].tolist() == [1, *ids]
    assert whole["attention"][0]["seconds"] is not None
    prompted = validate(TranscriptionRequest, {"model": "moonshine", "file": sent(speech(1.5)), "prompt": "the"})
    with pytest.raises(InvalidRequest, match="prompt"):
        plan_transcription(model, prompted)


@pytest.mark.slow
def test_drawn_tokens_have_the_temperature():
    cold, warm, other = (answered(temperature=each).text for each in (None, 1.5, 1.5))
    assert len({cold, warm, other}) == 3


def test_each_token_has_the_seconds_that_its_heads_looked_at_most():
    """Its weights are those of a pass over the whole text, of the token before it."""
    found = answered(language="en", attention={"layers": ["cross.1", "decoder.0"], "weights": True})
    ids = [START, ENGLISH, TRANSCRIBE, NO_TIMES, *(token.id for token in found.attention[:-1])]
    made_of = extractor("whisper")(speech(), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        run = made("whisper")[0](**made_of, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    chosen = torch.stack([run.cross_attentions[layer][0, head] for layer, head in ([0, 1], [1, 0], [1, 3])])
    for number, token in enumerate(found.attention):
        cross, own = token.layers
        near(cross.weights, run.cross_attentions[1][0, :, 3 + number])
        near(own.weights, run.decoder_attentions[0][0, :, 3 + number, : 4 + number])
        frame = int(chosen[:, 3 + number, :250].mean(0).argmax())
        assert token.seconds == (round(frame * 0.02, 6), round(frame * 0.02 + 0.02, 6))


def test_words_are_of_whole_tokens_one_behind_the_other():
    found = answered(language="en", response_format="verbose_json")
    assert "".join(word.word for word in found.words) == "".join(found.text.split())
    edges = [edge for word in found.words for edge in (word.start, word.end)]
    assert edges == sorted(edges)
    assert 0 <= edges[0] <= edges[-1] <= found.duration == 5.0


@pytest.mark.slow
def test_other_heads_give_other_times():
    own, others = (answered(attention=LOOK, **more).attention for more in ({}, {"alignment_heads": [[0, 2]]}))
    assert [token.id for token in own] == [token.id for token in others]
    assert [token.seconds for token in own] != [token.seconds for token in others]


@pytest.mark.slow
def test_edits_of_cross_attention_change_the_text():
    edits = {"cross.1": [{"tap": "context", "set": 0}]}
    assert answered(language="en").text != answered(language="en", attention=LOOK | {"edits": edits}).text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "fr"}, "language"),
        ({"prompt": "x" * 100}, "prompt"),
        ({"alignment_heads": [[0, 4]], "response_format": "verbose_json"}, "alignment_heads.0"),
        ({"attention": {"keep": True}}, "attention.keep"),
        ({"overlap": SECONDS / 2 + 0.1}, "overlap"),
        ({"file": sent(b"no sound")}, "file"),
    ],
)
def test_what_cannot_be_written_down_is_named(fields, param):
    with pytest.raises(InvalidRequest) as fault:
        answered(**fields)
    assert fault.value.param == param


def test_the_path_is_the_cheapest_of_all():
    """The reference is the recursion itself, entry by entry."""
    costs = np.random.default_rng(0).normal(size=(6, 9))
    total = np.full((7, 10), np.inf)
    total[0, 0] = 0
    for i in range(1, 7):
        for j in range(1, 10):
            total[i, j] = costs[i - 1, j - 1] + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    rows, columns = warping_path(costs)
    assert costs[rows, columns].sum() == pytest.approx(total[-1, -1])
    steps = np.stack([np.diff(rows), np.diff(columns)])
    assert ((steps >= 0) & (steps <= 1)).all()
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, 5, 8)


def test_tokens_that_look_further_and_further_are_found_where_they_look():
    weights = torch.full((2, 5, 50), 0.001)
    for token in range(5):
        weights[:, token, 10 * token : 10 * token + 10] = 0.1
    assert warped_frames(weights, 3).tolist() == [0, 10, 20, 30, 40]
    assert warped_frames(torch.full((1, 3, 8), 0.125)).tolist()[0] == 0  # that never vary are no fault


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    whisper(root / "whisper")
    listener(root / "listener")
    with live_server(root) as url:
        yield url


def test_the_server_answers_in_every_form(server):
    expected = answered(language="en", response_format="verbose_json")
    with Client(server) as client:
        assert client.models.get("whisper").takes == ["audio", "target"]
        found = client.models.transcribe(
            "whisper",
            file_of(speech()),
            language="en",
            response_format="verbose_json",
            attention=LOOK,
            timestamp_granularities=["word"],
        )
        assert (found.text, found.words) == (expected.text, expected.words)
        assert [token.seconds for token in found.attention] == [token.seconds for token in expected.attention]
        reply = client.models.weights("whisper", audio=[file_of(speech())], target="the", layers=["cross.0"])
        assert reply.encoder_labels.seconds[3] == (0.06, 0.08)
    form = {"model": "whisper", "language": "en", "response_format": "text"}
    files = {"file": ("a.flac", file_of(speech(), form="FLAC", subtype="PCM_24"))}
    with httpx.Client(base_url=server, timeout=60) as http:
        for accept in ("*/*", "text/plain"):
            response = http.post("/v1/audio/transcriptions", data=form, files=files, headers={"accept": accept})
            assert response.headers["content-type"].startswith("text/plain")
            assert response.text == expected.text
        for wrong, words in (
            ({"data": form}, "Content-Type"),
            ({"data": form | {"temperature": "hot"}, "files": files}, "temperature"),
            ({"data": form | {"model": "tiny"}, "files": files}, "writes down no sounds"),
            ({"content": b"--x\r\nbroken", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "form"),
            ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
        ):
            refused = http.post("/v1/audio/transcriptions", **wrong)
            assert 400 <= refused.status_code < 500
            assert words in refused.json()["error"]["message"]


@pytest.mark.long
def test_the_server_writes_down_a_long_sound(server):
    """Each window is a turn of its own; captions are those of the segments, and events the text."""
    said = "abc def gab cde fga bcd efg abc dec fab"
    sound = file_of(spoken(said))
    fields = {"language": "en"}
    with Client(server) as client:
        whole = client.models.transcribe("listener", sound, **fields)
        verbose = client.models.transcribe("listener", sound, **fields, response_format="verbose_json")
        *events, done = client.models.stream_transcription("listener", sound, **fields)
    assert whole.text == done.text == "".join(event.delta for event in events) == said
    assert verbose.segments
    assert verbose.words
    assert len(verbose.windows) == len(events) == 2
    with httpx.Client(base_url=server, timeout=60) as http:
        for form in ("srt", "vtt"):
            data = {"model": "listener", "response_format": form, **fields}
            response = http.post("/v1/audio/transcriptions", data=data, files={"file": ("a.wav", sound)})
            assert response.headers["content-type"].startswith("text/plain")
            assert response.text == verbose.captions(form)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openai") is None, reason="needs openai")
def test_the_openai_package_reads_the_transcript(server):
    import openai
    from openai.types.audio import TranscriptionVerbose

    expected = answered(language="en", response_format="verbose_json", include=["logprobs"])
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    file = io.BytesIO(file_of(speech()))
    file.name = "speech.wav"
    plain = client.audio.transcriptions.create(model="whisper", file=file, language="en", include=["logprobs"])
    assert plain.text == expected.text
    assert len(plain.logprobs) == len(expected.attention)
    file.seek(0)
    whole = client.audio.transcriptions.create(
        model="whisper", file=file, language="en", response_format="verbose_json", temperature=0.0,
        timestamp_granularities=["word"], extra_body={"attention": {"layers": ["cross.0"], "top_k": 2}},
    )  # fmt: skip
    file.seek(0)
    both = client.audio.transcriptions.create(
        model="whisper", file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert TranscriptionVerbose.model_validate(both.to_dict()).segments[0].seek == 0
    assert (whole.language, float(whole.duration)) == ("english", 5.0)
    assert [(word.word, word.start, word.end) for word in whole.words] == [
        (word.word, word.start, word.end) for word in expected.words
    ]
    assert len(whole.attention) == len(expected.attention)
    assert len(whole.attention[0]["layers"][0]["top_keys"]["keys"][0]) == 2
    file.seek(0)
    events = [*client.audio.transcriptions.create(model="whisper", file=file, language="en", stream=True)]
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == expected.text == "".join(event.delta for event in events[:-1]).strip()
    file.seek(0)
    assert client.audio.transcriptions.create(
        model="whisper", file=file, language="en", response_format="text"
    ).strip() == expected.text  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="file"):
        client.audio.transcriptions.create(model="whisper", file=("a.wav", b"no sound"))
    assert json.dumps(whole.to_dict())
    client.close()
