"""Tokens that are generated after an image are those of transformers' own ``generate``, each with what it looked at."""

import orjson
import pytest
import torch
from PIL import Image
from tests.models.inputs.images.small_encoders import noise, sent
from tests.models.inputs.images.small_prompts import PROMPTS, eager, loaded

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_contract.schemas.openai import ChatCompletion, ChatCompletionRequest
from attention_contract.schemas.prompts import Message
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, generate, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.process.reply_writing import lines_of
from attention_service.prompts.conversations import ChatForm

pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")  # of PaliGemma's processor
SAMPLED = {"temperature": 0.9, "seed": 4, "n": 3}


def data_url(pixels):
    return f"data:image/png;base64,{sent(pixels)['base64']}"


BROKEN = data_url(noise())[:90]


def messages(image):
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "the mat"}]}]


def answered(kind, conversation, **fields):
    request = validate(ChatCompletionRequest, {"model": kind, "messages": conversation, "max_tokens": 6, **fields})
    model = loaded(kind)
    (whole,) = generate(model, request, plan_generation(model, request), lambda _: None).last
    return validate(ChatCompletion, orjson.loads(lines_of([whole]))).choices


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLED])
def test_tokens_after_an_image_are_those_of_transformers(kind, options):
    image = noise(60, 44)
    conversation = messages(image)
    choices = answered(kind, conversation, attention={"top_k": 2}, **options)
    reader, model = loaded(kind).reader, eager(kind)
    text = reader.with_places([Message(**each) for each in conversation], 1, ChatForm()).text
    made = reader.processed(text, [Image.fromarray(image)], add_special_tokens=False)
    arguments = {name: x for name, x in made.items() if name in reader.names}
    drawn = {"temperature": options["temperature"], "top_p": 1.0, "top_k": 0} if options["temperature"] else {}
    assert len(choices) == options.get("n", 1)
    for number, choice in enumerate(choices):
        torch.manual_seed(options.get("seed", 0) + number)
        tokens = model.generate(**arguments, max_new_tokens=6, do_sample=bool(drawn), **drawn)
        own = tokens[0, arguments["input_ids"].shape[1] :].tolist()
        found = [token.id for token in choice.attention]
        assert found == own[: len(found)]
        assert choice.attention[0].position == arguments["input_ids"].shape[1]
        assert {str(each.layer) for each in choice.attention[0].layers} == {"0", "1"}


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", PROMPTS)
def test_conversations_that_run_beside_each_other_have_the_tokens_of_each_alone(kind):
    """Some models keep the positions behind an image in their modules."""
    model = loaded(kind)
    plain = [{"role": "user", "content": "the cat sat on the mat"}]
    requests = [
        validate(ChatCompletionRequest, {"model": kind, "messages": conversation, "max_tokens": 7, "temperature": 0})
        for conversation in (messages(noise(60, 44)), plain, messages(noise(24, 40)))
    ]

    def together(members):
        decoder = Decoder(model)
        running = [RunningGeneration(decoder, each, plan_generation(model, each), lambda _: None) for each in members]
        found = []
        try:
            for each in running:  # one comes a turn
                assert not read_prompts(decoder, [each], 10_000)
                found += [text.ids for text in each.texts]
                assert not decode(decoder, running)
            while any(each.texts for each in running):
                assert not decode(decoder, running)
        finally:
            decoder.close()
        return found

    assert together(requests) == [together([each])[0] for each in requests]


def test_keys_of_generated_tokens_are_places_among_the_labels_of_the_same_messages():
    conversation = messages(noise(60, 44))
    (choice,) = answered("gemma3", conversation, temperature=0, attention={"weights": True, "layers": [1]})
    reply = forward_reply(
        loaded("gemma3"),
        ModelForwardRequest(messages=[Message(**each) for each in conversation], layers=[1], return_=["weights"]),
    )
    count = len(reply.labels.tokens)
    assert choice.attention[0].position == count
    assert (choice.attention[0].layers[0].weights[:, :count] - reply.layers[0].weights[:, -1]).max() < 1e-6
    assert reply.labels.patches.count(None) < count


@pytest.mark.parametrize(
    ("kind", "conversation", "param"),
    [
        ("gemma3", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": BROKEN}}]}], "messages"),
        ("llava", [{"role": "user", "content": "<image> what"}], "messages"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_read_are_of_the_messages(kind, conversation, param):
    with pytest.raises(InvalidRequest) as fault:
        answered(kind, conversation)
    assert fault.value.param == param


def test_nothing_is_fetched():
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}]
    with pytest.raises(InvalidRequest, match="the server fetches nothing"):
        validate(ChatCompletionRequest, {"model": "x", "messages": [{"role": "user", "content": parts}]})


def test_edits_of_layers_that_see_images_are_refused():
    edits = {"vision.0": [{"tap": "context", "set": 0}]}
    with pytest.raises(InvalidRequest) as fault:
        answered("gemma3", messages(noise()), attention={"edits": edits})
    assert fault.value.param == "attention.edits.vision.0.0.tap"
