"""The ``openai`` package, unmodified: sync, async, streams, embeddings, errors."""

import base64

import numpy as np
import pytest
import torch

from attention_client import Client
from tests.api.doors.openai.conftest import letters, talker
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
WRITTEN = "<system>Be brief.<user>Hello<assistant>"
LOOK = {"attention": {"layers": [1], "heads": [0, 3], "statistics": ["entropy"], "top_k": 2}}


@pytest.fixture(scope="module")
def client(door):
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key=door.key, max_retries=0) as made:
        yield made


def own(text, count, seed=0, **options):
    """Return what transformers itself generates after a text."""
    ids = torch.tensor([letters()(text)["input_ids"]])
    model = talker()
    model.set_attn_implementation("sdpa")
    torch.manual_seed(seed)
    settings = {"do_sample": False} if not options else {"do_sample": True, "top_k": 0, **options}
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, pad_token_id=0, **settings
    )[:, ids.shape[1] :]  # fmt: skip
    return [letters().decode(row) for row in found]


def test_a_conversation_is_answered(client):
    reply = client.chat.completions.create(model="talker", messages=CHAT, temperature=0, max_completion_tokens=9)
    assert reply.choices[0].message.content == own(WRITTEN, 9)[0]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 9
    assert reply.usage.total_tokens == 9 + len(WRITTEN)
    again = [*CHAT, reply.choices[0].message, {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model="talker", messages=again, max_tokens=2).choices


def test_drawn_answers_are_those_of_transformers_after_the_same_seed(client):
    reply = client.chat.completions.create(
        model="talker", messages=CHAT, max_tokens=12, n=3, seed=7, temperature=0.8, top_p=0.9
    )
    expected = [own(WRITTEN, 12, seed=7 + choice, temperature=0.8, top_p=0.9)[0] for choice in range(3)]
    assert [choice.message.content for choice in reply.choices] == expected


def test_an_answer_is_streamed_token_by_token(client):
    fields = {"model": "talker", "messages": CHAT, "temperature": 0, "max_tokens": 6, "logprobs": True}
    whole = client.chat.completions.create(top_logprobs=2, **fields)
    chunks = [*client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, top_logprobs=2, extra_body=LOOK, **fields
    )]  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["length"]
    tokens = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content]
    assert tokens == whole.choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 2 for each in tokens)
    assert chunks[-1].usage == whole.usage
    looked = [token for piece in pieces for token in piece.model_extra.get("attention", [])]
    assert [token["position"] for token in looked] == [len(WRITTEN) + at for at in range(6)]
    assert "".join(token["token"] for token in looked) == whole.choices[0].message.content
    for token in looked:
        (layer,) = token["layers"]
        assert layer["layer"] == 1
        assert np.shape(layer["statistics"]["entropy"]) == (2,)
        assert np.shape(layer["top_keys"]["keys"]) == (2, 2)


def test_texts_are_continued_alone_and_as_a_batch(client):
    prompts = ["Once upon", "A", "The end of it"]
    reply = client.completions.create(model="talker", prompt=prompts, temperature=0, max_tokens=7, logprobs=1)
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        assert choice.text == own(prompt, 7)[0]
        assert choice.logprobs.tokens == list(choice.text)
        assert choice.logprobs.text_offset == [*range(7)]
        alone = client.completions.create(
            model="talker", prompt=letters()(prompt)["input_ids"], temperature=0, max_tokens=7
        )
        assert alone.choices[0].text == choice.text
    pieces = client.completions.create(model="talker", prompt=prompts, temperature=0, max_tokens=7, stream=True)
    texts = {0: "", 1: "", 2: ""}
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert [*texts.values()] == [choice.text for choice in reply.choices]


def test_a_stop_text_ends_an_answer(client):
    text = own("Hello", 20)[0]
    reply = client.completions.create(model="talker", prompt="Hello", temperature=0, max_tokens=20, stop=[text[4:7]])
    assert reply.choices[0].text == text[: text.index(text[4:7])]
    assert reply.choices[0].finish_reason == "stop"


def test_edits_change_the_answer(client):
    edits = {"1": [{"tap": "context", "set": 0}], "0": [{"tap": "context", "set": 0}]}
    fields = {"model": "talker", "prompt": "Hello", "temperature": 0, "max_tokens": 8}
    edited = client.completions.create(extra_body={"attention": {"statistics": [], "edits": edits}}, **fields)
    assert edited.choices[0].text != client.completions.create(**fields).choices[0].text


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_texts_become_vectors(client, form):
    texts = ["the cat sat", "the dog"]
    options = {} if form is None else {"encoding_format": form}
    reply = client.embeddings.create(model="encoder", input=texts, **options)
    model = tiny("bert")
    for text, each in zip(texts, reply.data, strict=True):
        with torch.no_grad():
            states = model.base_model(torch.tensor([tokenizer()(text)["input_ids"]])).last_hidden_state[0].mean(0)
        packed = form == "base64"  # the package unpacks by itself what it packed by itself
        vector = np.frombuffer(base64.b64decode(each.embedding), "<f4") if packed else each.embedding
        np.testing.assert_allclose(vector, torch.nn.functional.normalize(states, dim=0).numpy(), atol=1e-5)
    assert reply.usage.prompt_tokens == 5


def test_the_client_embeds(door):
    with Client(door.url, api_key=door.key) as client:
        assert len(client.models.embed("encoder", ["the cat", "mat"], dimensions=3).data[1].embedding) == 3


def test_models_are_listed(client):
    assert {"talker", "encoder"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("talker").owned_by == "attention-service"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


async def test_the_awaited_client_does_the_same(door):
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client:
        fields = {"model": "talker", "messages": CHAT, "temperature": 0, "max_tokens": 5}
        whole = await client.chat.completions.create(**fields)
        text = ""
        async for chunk in await client.chat.completions.create(stream=True, **fields):
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content == own(WRITTEN, 5)[0]
        assert len((await client.embeddings.create(model="encoder", input="the cat")).data) == 1
        assert [model async for model in client.models.list()]


@pytest.mark.parametrize(
    ("options", "kind", "param", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"model": "encoder"}, openai.BadRequestError, "model", "invalid_request"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "tools",
            "invalid_request",
        ),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format", "invalid_request"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "invalid_request"),
        ({"extra_body": {"attention": {"layers": [9]}}}, openai.BadRequestError, "attention.layers", "invalid_request"),
        (
            {"n": 100, "max_tokens": 1900, "extra_body": {"attention": {"weights": True}}},
            openai.APIStatusError,
            None,
            "never_fits",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused_is_raised_as_the_package_does(client, options, kind, param, code, stream):
    with pytest.raises(kind) as refusal:
        client.chat.completions.create(**{"model": "talker", "messages": CHAT, "stream": stream} | options)
    assert (refusal.value.param, refusal.value.code) == (param, code)
    assert refusal.value.type in {"invalid_request_error", "server_error"}
    assert refusal.value.request_id


def test_keys_are_those_of_the_server(door):
    with pytest.raises(openai.AuthenticationError) as refusal:
        openai.OpenAI(base_url=f"{door.url}/v1", api_key="wrong").chat.completions.create(model="talker", messages=CHAT)
    assert refusal.value.type == "authentication_error"


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (lambda client: client.responses.retrieve("one"), "not_found"),
        (lambda client: client.moderations.create(input="Hello"), "not_found"),
        (lambda client: client.files.list(), "not_found"),
        (lambda client: client.chat.completions.retrieve("one"), "not_found"),
        (lambda client: client.models.retrieve("nobody"), "model_not_found"),
        (lambda client: client.models.delete("nobody"), "model_not_found"),
    ],
)
def test_what_the_server_does_not_have_is_refused_as_the_package_reads_it(client, ask, code):
    with pytest.raises(openai.NotFoundError) as refusal:
        ask(client)
    assert (refusal.value.type, refusal.value.code) == ("invalid_request_error", code)
    reply = refusal.value.response.json()
    # OpenAI's package for JavaScript shows the message alone, or "404 status code (no body)".
    assert reply["error"]["message"] == reply["detail"]
    assert code == "model_not_found" or "/v1/chat/completions" in reply["detail"]
    assert reply["error"]["request_id"] == reply["request_id"] == refusal.value.request_id


def test_a_wrong_key_is_refused_on_every_path_of_the_package(door):
    client = openai.OpenAI(base_url=f"{door.url}/v1", api_key="wrong", max_retries=0)
    for ask in (client.models.list, client.files.list, lambda: client.responses.create(model="talker", input="Hello")):
        with pytest.raises(openai.AuthenticationError) as refusal:
            ask()
        assert refusal.value.type == "authentication_error"
