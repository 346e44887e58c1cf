"""Voxtral reads the prompts of mistral-common without that package, and gives the numbers of its eager self."""

import base64
import io

import httpx
import numpy as np
import orjson
import pytest
import soundfile
import torch
from tests.conftest import live_server
from tests.models.inputs.sounds.small_sounds import RATE, SECONDS, file_of, sent, speech
from tests.models.inputs.sounds.small_voxtral import (
    AUDIO,
    BEGIN,
    END,
    START,
    TOKENS,
    TRANSCRIBE,
    extractor,
    loaded,
    made,
    written,
)
from tests.models.small_models import near
from transformers import VoxtralProcessor
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.openai import ChatCompletion, ChatCompletionRequest
from attention_contract.schemas.openai_api.transcriptions import Transcription, TranscriptionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.folders.tokenizer_files import TEKKEN
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans import transcription_plan
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.generation.plans.transcription_plan import plan_transcription
from attention_service.models.process.reply_writing import lines_of

HEARD = [BEGIN, *[AUDIO] * TOKENS]
SOUND = {"type": "audio"}
TRANSCRIPTS = {
    (1.5, "en"): [START, 3, *HEARD, 4, 148, 297, 98, 298, TRANSCRIBE],
    (1.5, None): [START, 3, *HEARD, 4, TRANSCRIBE],
    (7.0, "de"): [START, 3, *HEARD, *[AUDIO] * TOKENS, 4, 148, 297, 98, 140, 141, TRANSCRIBE],
}
"""The prompts that mistral-common 1.13 writes, by the seconds of a sound and its language."""
CONVERSATIONS = [
    (
        [{"role": "user", "content": [SOUND, {"type": "text", "text": "what is the angle?"}]}],
        [START, 3, *HEARD, 159, 144, 137, 156, 72, 145, 155, 301, 72, 297, 148, 141, 103, 4],
    ),
    (
        [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, SOUND]},
            {"role": "assistant", "content": "a hen"},
            {"role": "user", "content": [SOUND, {"type": "text", "text": "and the é?"}]},
        ],
        [
            START, 3, 151, 150, 141, 50, 50, 156, 159, 151, *HEARD, 4, 137, 72, 144, 298, END,
            3, *HEARD, 296, 140, 301, 72, 235, 209, 103, 4,
        ],
    ),
    (
        [
            {"role": "system", "content": "be the hen"}, {"role": "user", "content": "one"},
            {"role": "user", "content": "two"},
        ],
        [START, 17, 138, 141, 301, 72, 144, 298, 18, 3, 151, 150, 141, 50, 50, 156, 159, 151, 4],
    ),
]  # fmt: skip
"""Conversations with a sound of 1.5 s in each place, and what mistral-common 1.13 writes of them."""
TEXT = "the hen is é\n\n x"
TEXT_IDS = [START, 156, 299, 72, 144, 298, 72, 145, 155, 72, 235, 209, 50, 50, 72, 160]


def features(seconds, samples=None):
    """The features of a sound, by transformers' own processor."""
    own = VoxtralProcessor(extractor(), convert_tekken_tokenizer(str(made()[1] / TEKKEN), ""))
    return own._retrieve_input_features(
        [speech(seconds) if samples is None else samples], extractor().nb_max_frames, sampling_rate=RATE,
        padding=True, truncation=False, pad_to_multiple_of=SECONDS * RATE, return_tensors="pt",
    )  # fmt: skip


def counted(messages):
    return sum(part is SOUND for each in messages for part in each["content"])


def forward_request(messages, **fields):
    sounds = [sent(speech(1.5))] * counted(messages)
    return ModelForwardRequest(messages=messages, **({"audio": sounds} if sounds else {}), **fields)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Let transcripts of random models end soon."""
    monkeypatch.setattr(transcription_plan, "_MIN_TRANSCRIPT_TOKENS", 24)


def transcribed(seconds=1.5, **fields):
    request = validate(TranscriptionRequest, {"model": "m", "file": sent(speech(seconds))} | fields)
    plan = plan_transcription(loaded(), request)
    (whole,) = generate(loaded(), request, plan, lambda _: None).last
    return plan, validate(Transcription, orjson.loads(lines_of([whole])))


def test_recorded_prompts_are_those_of_mistral_common(tmp_path):
    """Runs where that package is installed, which refuses the release of numpy that this project is tested with."""
    pytest.importorskip("mistral_common")
    from transformers.tokenization_mistral_common import MistralCommonBackend

    own = MistralCommonBackend(str(made()[1] / TEKKEN))
    processor = VoxtralProcessor(extractor(), own)
    settings = {"pad_to_multiple_of": SECONDS * RATE, "max_source_positions": extractor().nb_max_frames}
    for (seconds, language), expected in TRANSCRIPTS.items():
        given = processor.apply_transcription_request(
            audio=[speech(seconds)], model_id="m", language=language, sampling_rate=RATE, format=["wav"],
            audio_kwargs=settings,
        )  # fmt: skip
        assert given["input_ids"][0].tolist() == expected
        read, _ = soundfile.read(io.BytesIO(file_of(speech(seconds), RATE, "WAV", "PCM_16")), dtype="float32")
        assert torch.equal(given["input_features"], features(seconds, read))  # it takes sounds as 16 bits
    part = SOUND | {"base64": base64.b64encode(file_of(speech(1.5))).decode()}
    for messages, expected in CONVERSATIONS:
        turns = [
            each | {"content": [part if one is SOUND else one for one in each["content"]]}
            if isinstance(each["content"], list) else each
            for each in messages
        ]  # fmt: skip
        given = processor.apply_chat_template(turns, processor_kwargs={"audio_kwargs": settings})
        assert given["input_ids"][0].tolist() == expected
    assert own(TEXT)["input_ids"] == TEXT_IDS


def test_a_text_has_the_tokens_of_mistral_common():
    reply = forward_reply(loaded(), ModelForwardRequest(text=TEXT))
    assert reply.labels.ids == TEXT_IDS
    assert reply.labels.spans[1:4] == [(0, 1), (1, 3), (3, 4)]


@pytest.mark.parametrize(("messages", "expected"), CONVERSATIONS)
def test_logits_and_weights_of_a_conversation_are_those_of_the_eager_model(messages, expected):
    reply = forward_reply(loaded(), forward_request(messages, return_=["weights", "logits"]))
    assert reply.labels.ids == expected
    heard = {"input_features": torch.cat([features(1.5)] * counted(messages))} if counted(messages) else {}
    with torch.no_grad():
        run = made()[0](input_ids=torch.tensor([expected]), output_attentions=True, **heard)
    near(reply.logits[-1], run.logits[0, -1])
    of_text = [each for each in reply.layers if isinstance(each.layer, int)]
    for layer, own in zip(of_text, run.attentions, strict=True):
        near(layer.weights, own[0])
    parts = [each for each in reply.labels.parts if each is not None]
    assert set(parts) == {each["role"] for each in messages}


def test_tokens_and_frames_of_a_sound_say_their_seconds():
    """A sound longer than a window is heard in two."""
    request = ModelForwardRequest(text="what is it?", audio=[sent(speech(7.0))], return_=["weights", "logits"])
    reply = forward_reply(loaded(), request)
    heard = [at for at, each in enumerate(reply.labels.ids) if each == AUDIO]
    assert heard == [*range(2, 2 + 2 * TOKENS)]
    seconds = [reply.labels.seconds[at] for at in heard]
    assert seconds[:2] == [(0.0, 0.08), (0.08, 0.16)]
    assert seconds[87:89] == [(6.96, 7.0), None]
    first, second = reply.audio_labels
    assert (first.seconds[-1], second.seconds[0]) == ((SECONDS - 0.02, SECONDS), (SECONDS, SECONDS + 0.02))
    weights = next(each.weights for each in reply.layers if each.layer == "audio.1")
    assert weights.shape == (2, 4, 50 * SECONDS, 50 * SECONDS)
    near(weights.sum(-1), np.ones(weights.shape[:-1]))
    with torch.no_grad():
        run = made()[0](input_ids=torch.tensor([reply.labels.ids]), input_features=features(7.0))
    near(reply.logits[-1], run.logits[0, -1])


@pytest.mark.sampled(seconds=1, language=2)
@pytest.mark.parametrize(("seconds", "language"), TRANSCRIPTS)
def test_a_transcript_has_the_tokens_of_generate(seconds, language):
    """Each token says the frame at which the heads of the later layer looked most."""
    fields = {} if language is None else {"language": language}
    plan, found = transcribed(
        seconds, response_format="verbose_json", attention={"layers": [1], "weights": True}, **fields
    )
    prompt = TRANSCRIPTS[seconds, language]
    assert plan.rows == [prompt]
    ids = [each.id for each in found.attention]
    expected = made()[0].generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        input_features=features(seconds), max_new_tokens=len(ids), do_sample=False,
    )  # fmt: skip
    assert ids == expected[0, len(prompt) :].tolist()
    assert len(ids) > 20
    assert found.duration == pytest.approx(seconds)
    assert found.language == {"en": "english", "de": "german", None: None}[language]
    places = [at for at, each in enumerate(prompt) if each == AUDIO][: int(np.ceil(seconds / 0.08))]
    for each in found.attention[:8]:
        at = int(each.layers[0].weights[:, places].mean(0).argmax())
        assert each.seconds == pytest.approx((at * 0.08, min(at * 0.08 + 0.08, seconds)))
    edges = [edge for word in found.words for edge in (word.start, word.end)]
    assert edges == sorted(edges)
    assert edges[-1] <= seconds


def test_other_heads_give_other_times():
    own, others = (
        transcribed(attention={"top_k": 1, "statistics": []}, **more)[1].attention
        for more in ({}, {"alignment_heads": [[0, 2]]})
    )
    assert [each.id for each in own] == [each.id for each in others]
    assert [each.seconds for each in own] != [each.seconds for each in others]


def test_an_answer_about_a_sound_has_the_tokens_of_generate():
    part = {"type": "input_audio", "input_audio": {"data": sent(speech(1.5))["base64"], "format": "wav"}}
    messages, prompt = CONVERSATIONS[0]
    content = [part, *messages[0]["content"][1:]]
    given = {
        "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0,
        "attention": {"layers": [1], "top_k": 2},
    }  # fmt: skip
    request = validate(ChatCompletionRequest, given)
    (whole,) = generate(loaded(), request, plan_generation(loaded(), request), lambda _: None).last
    (choice,) = validate(ChatCompletion, orjson.loads(lines_of([whole]))).choices
    expected = made()[0].generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        input_features=features(1.5), max_new_tokens=8, do_sample=False,
    )  # fmt: skip
    assert [each.id for each in choice.attention] == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_gradients_reach_the_seconds_that_a_word_depends_on():
    request = ModelGradientsRequest(text="what is the", audio=[sent(speech(1.5))], of={"token": 296}, check=True)
    reply = ModelGradients(loaded(), request).reply()
    assert all(each.passed for each in reply.check.values())
    heard = [at for at, each in enumerate(reply.labels.seconds) if each is not None]
    assert np.abs(reply.tokens[heard]).max() > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"language": "yue"}, "language"),
        ({"prompt": "the hen"}, "prompt"),
        ({"alignment_heads": [[2, 0]], "response_format": "verbose_json"}, "alignment_heads.0"),
        ({"file": sent(speech(0.1))}, "file"),
        ({"overlap": 3.5 * SECONDS}, "overlap"),
        ({"attention": {"keep": True}}, "attention.keep"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as fault:
        plan_transcription(loaded(), validate(TranscriptionRequest, {"model": "m", "file": sent(speech(1.5))} | fields))
    assert fault.value.facts.get("param", fault.value.param) == param


def test_tools_are_refused_where_no_template_writes_them():
    call = {"id": "a", "type": "function", "function": {"name": "ring", "arguments": "{}"}}
    messages = [{"role": "user", "content": "ring"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match="it writes no tools"):
        forward_reply(loaded(), ModelForwardRequest(messages=messages))


@pytest.mark.slow
def test_a_server_hears_and_writes_down(tmp_path):
    written(tmp_path / "voxtral")
    with live_server(tmp_path) as url:
        listed = httpx.get(f"{url}/v1/models/voxtral").json()
        assert listed["takes"] == ["text", "messages", "audio"]
        assert listed["left_out"] == []
        assert (
            httpx.post(f"{url}/v1/models", json={"checkpoint": "voxtral"}, timeout=60).json()["takes"]
            == listed["takes"]
        )
        file = {"file": ("speech.flac", file_of(speech(1.5), 44_100, "FLAC", "PCM_16"))}
        form = {"model": "voxtral", "language": "en", "response_format": "verbose_json"}
        found = httpx.post(f"{url}/v1/audio/transcriptions", data=form, files=file, timeout=60).json()
        assert found["language"] == "english"
        assert found["words"]
