"""A model that reads text with sounds gives the numbers of its eager self, and its labels say the seconds."""

from itertools import pairwise

import numpy as np
import orjson
import pytest
import torch
from tests.models.inputs.sounds.small_sound_prompts import MARK, READS, loaded, made, processor, token
from tests.models.inputs.sounds.small_sounds import RATE, SECONDS, sent, speech
from tests.models.small_models import near

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import ChatCompletion, ChatCompletionRequest
from attention_contract.schemas.openai_api.transcriptions import Transcription, TranscriptionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.generation.plans.transcription_plan import plan_transcription
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.process.reply_writing import lines_of

TEXT = "what is heard ?"
LONG = [kind for kind, (*_, settings) in READS.items() if settings]
"""Types that hear a sound in parts."""


def whole_text(kind):
    """Return the text with its sound as the model is given it."""
    return f"{'<|audio_bos|>' if kind == 'qwen2_audio' else ''}{MARK}{'<|audio_eos|>' if kind == 'qwen2_audio' else ''}"


def reference(kind, sounds, text):
    model, _ = made(kind)
    given = processor(kind)(text=[text], audio=sounds, return_tensors="pt", sampling_rate=RATE)
    with torch.no_grad():
        return model(**given, output_attentions=True), given["input_ids"][0]


@pytest.mark.parametrize("kind", READS)
def test_logits_and_weights_are_those_of_the_eager_model(kind):
    request = ModelForwardRequest(text=TEXT, audio=[sent(speech(1.5))], return_=["weights", "logits"])
    reply = forward_reply(loaded(kind), request)
    expected, ids = reference(kind, [speech(1.5)], whole_text(kind) + TEXT)
    assert reply.labels.ids == ids.tolist()
    near(reply.logits[-1], expected.logits[0, -1])
    for layer, own in zip(
        [each for each in reply.layers if isinstance(each.layer, int)], expected.attentions, strict=True
    ):
        near(layer.weights, own[0])
    frames = reply.tokens_of("audio.1")[1]
    assert reply.media_labels_of("audio.1") == [frames]
    assert len(frames.tokens) == 50 * SECONDS
    assert frames.seconds[74:76] == [(1.48, 1.5), None]
    weights = next(each.weights for each in reply.layers if each.layer == "audio.1")
    near(weights.sum(-1), np.ones(weights.shape[:-1]))


@pytest.mark.parametrize("kind", READS)
def test_tokens_say_the_seconds_that_they_are(kind):
    reply = weights_reply(loaded(kind), ModelWeightsRequest(text=TEXT, audio=[sent(speech(2.0))], layers=[0]))
    heard = [each for each in reply.labels.seconds if each is not None]
    assert [name for name, each in zip(reply.labels.tokens, reply.labels.seconds, strict=True) if each is None][
        -4:
    ] == TEXT.split()
    assert heard[0][0] == 0
    assert all(end == begin for (_, end), (begin, _) in pairwise(heard))
    assert 1.8 < heard[-1][1] <= 2.0
    assert reply.labels.spans[-1] == (len(TEXT) - 1, len(TEXT))


@pytest.mark.parametrize("kind", LONG)
def test_a_long_sound_is_heard_in_parts(kind):
    request = ModelForwardRequest(text=TEXT, audio=[sent(speech(1.5 * SECONDS))], return_=["weights", "logits"])
    reply = forward_reply(loaded(kind), request)
    expected, _ = reference(kind, [speech(1.5 * SECONDS)], whole_text(kind) + TEXT)
    near(reply.logits[-1], expected.logits[0, -1])
    first, second = reply.audio_labels
    assert first.seconds[-1] == (SECONDS - 0.02, SECONDS)
    assert second.seconds[0] == (SECONDS, SECONDS + 0.02)
    assert second.tokens[0] == f"{SECONDS:.2f} s"


def test_two_sounds_stand_where_the_text_says():
    text = f"what is <|audio_bos|>{MARK}<|audio_eos|> heard <|audio_bos|>{MARK}<|audio_eos|> ?"
    sounds = [speech(1.0), speech(2.0, seed=1)]
    request = ModelForwardRequest(text=text, audio=[sent(each) for each in sounds], return_=["logits"])
    reply = forward_reply(loaded("qwen2_audio"), request)
    expected, _ = reference("qwen2_audio", sounds, text)
    near(reply.logits[-1], expected.logits[0, -1])
    ends = [each[1] for each, after in zip(reply.labels.seconds, [*reply.labels.seconds[1:], None], strict=True)
            if each is not None and after is None]  # fmt: skip
    assert ends == pytest.approx([1.0, 2.0], abs=0.05)


@pytest.mark.parametrize("kind", READS)
def test_a_sound_in_a_conversation_stands_where_its_part_is(kind):
    model, data = loaded(kind), sent(speech(1.0))["base64"]
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    content = [part, {"type": "text", "text": "what is heard ?"}]
    reply = forward_reply(
        model, ModelForwardRequest(messages=[{"role": "user", "content": content}], return_=["logits"])
    )
    own = [{"type": "audio"}, {"type": "text", "text": "what is heard ?"}]
    other = ModelForwardRequest(
        messages=[{"role": "user", "content": own}], audio=[{"base64": data}], return_=["logits"]
    )
    assert np.array_equal(forward_reply(model, other).logits, reply.logits)
    text = processor(kind).apply_chat_template(
        [{"role": "user", "content": own}], tokenize=False, add_generation_prompt=True
    )
    expected, ids = reference(kind, [speech(1.0)], text)
    assert reply.labels.ids == ids.tolist()
    near(reply.logits[-1], expected.logits[0, -1])
    assert reply.labels.parts[-1] is None
    assert reply.labels.parts[-4] == "user"


@pytest.mark.parametrize("kind", READS)
def test_generated_tokens_are_those_of_transformers(kind):
    model, data = loaded(kind), sent(speech(1.0))["base64"]
    content = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, {"type": "text", "text": "what ?"},
    ]  # fmt: skip
    given = {
        "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0,
        "attention": {"layers": [1], "top_k": 2},
    }  # fmt: skip
    request = validate(ChatCompletionRequest, given)
    (whole,) = generate(model, request, plan_generation(model, request), lambda _: None).last
    (choice,) = validate(ChatCompletion, orjson.loads(lines_of([whole]))).choices
    own = [{"type": "audio"}, {"type": "text", "text": "what ?"}]
    text = processor(kind).apply_chat_template(
        [{"role": "user", "content": own}], tokenize=False, add_generation_prompt=True
    )
    given = processor(kind)(text=[text], audio=[speech(1.0)], return_tensors="pt", sampling_rate=RATE)
    expected = made(kind)[0].generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0)
    found = [each.id for each in choice.attention]
    assert found == expected[0, given["input_ids"].shape[1] :][: len(found)].tolist()
    assert choice.attention[0].position == given["input_ids"].shape[1]


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("instruction", [None, "what is heard ?"])
@pytest.mark.parametrize("kind", LONG)
def test_a_transcript_has_the_tokens_of_transformers(kind, instruction):
    """The prompt is that of the processor, whose instruction can be replaced."""
    fields = {"model": "m", "file": sent(speech(1.0)), "attention": {"layers": [1], "top_k": 1}}
    request = validate(TranscriptionRequest, fields | ({} if instruction is None else {"prompt": instruction}))
    plan = plan_transcription(loaded(kind), request)
    (whole,) = generate(loaded(kind), request, plan, lambda _: None).last
    found = validate(Transcription, orjson.loads(lines_of([whole]))).attention
    given = processor(kind).apply_transcription_request([speech(1.0)], instruction)
    assert plan.rows == given["input_ids"].tolist()
    expected = made(kind)[0].generate(**given, max_new_tokens=len(found), do_sample=False, pad_token_id=0)
    assert [each.id for each in found] == expected[0, given["input_ids"].shape[1] :].tolist()
    assert all(0 <= each.seconds[0] < each.seconds[1] <= 1.0 for each in found)


def test_a_language_and_a_model_without_an_instruction_are_refused():
    request = {"model": "m", "file": sent(speech(1.0))}
    with pytest.raises(InvalidRequest, match="language"):
        plan_transcription(loaded(LONG[0]), validate(TranscriptionRequest, request | {"language": "de"}))
    with pytest.raises(InvalidRequest, match="writes down no sounds"):
        plan_transcription(loaded("qwen2_audio"), validate(TranscriptionRequest, request))


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", READS)
def test_gradients_reach_the_seconds_that_a_word_depends_on(kind):
    request = ModelGradientsRequest(text=TEXT, audio=[sent(speech(1.0))], of={"token": token("bell")}, check=True)
    reply = ModelGradients(loaded(kind), request).reply()
    assert all(each.passed for each in reply.check.values())
    assert len(reply.tokens) == len(reply.labels.tokens)
    heard = [at for at, each in enumerate(reply.labels.seconds) if each is not None]
    assert np.abs(reply.tokens[heard]).max() > 0


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"text": f"what {MARK}"}, "text"),
        ({"tokens": [4, token(MARK)]}, "tokens"),
        ({"text": "what", "audio": [sent(speech(1.0))], "target": "a"}, "audio"),
        ({"text": ["what", "is"], "audio": [sent(speech(1.0))]}, "audio"),
        ({"text": "what", "audio": [sent(speech(0.03))]}, "audio.0"),
        ({"text": "what", "audio": [sent(speech(SECONDS + 1.0))]}, "audio.0"),
        ({"text": f"{MARK}{MARK} what", "audio": [sent(speech(1.0))] * 2}, "text"),
        ({"text": f"{MARK} what", "audio": [sent(speech(1.0))] * 2}, "audio"),
        ({"tokens": [4, 5], "audio": [sent(speech(1.0))]}, "tokens"),
        ({"text": "what", "audio": [{"base64": "AAAA"}]}, "audio.0"),
        ({"text": "what", "layers": ["audio.0"], "return": ["weights"]}, "layers.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(request_, param):
    with pytest.raises(InvalidRequest) as fault:
        check_request(loaded("qwen2_audio"), ModelForwardRequest(**request_))
    assert fault.value.facts.get("param", fault.value.param) == param


def test_a_text_alone_and_tokens_with_a_sound_are_read_too():
    model = loaded("qwen2_audio")
    plain = forward_reply(model, ModelForwardRequest(text=TEXT, return_=["logits"]))
    assert len(plain.labels.tokens) == 4
    assert not plain.audio_labels
    first = forward_reply(model, ModelForwardRequest(text=TEXT, audio=[sent(speech(1.0))], return_=["logits"]))
    again = ModelForwardRequest(tokens=first.labels.ids, audio=[sent(speech(1.0))], return_=["logits"])
    assert np.array_equal(forward_reply(model, again).logits, first.logits)
    costs = ModelCosts(model)
    assert costs.memory.needed_bytes(check_request(model, again), again) > 2**20
