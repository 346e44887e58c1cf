"""The tokens of texts and conversations: those that the model reads, with their places."""

import pytest

from attention_client import Client
from tests.api.doors.openai.conftest import letters
from tests.api.doors.openai.test_openai_package import CHAT, WRITTEN
from tests.client.tiny_models import tokenizer


def tokenize(http, **fields):
    return http.post("/v1/tokenize", json=fields)


def test_the_tokens_of_a_text_are_those_of_the_tokenizer(http):
    found = tokenize(http, model="encoder", prompt="the cat sat", return_token_strs=True).json()
    expected = tokenizer()("the cat sat", return_offsets_mapping=True)
    assert found["tokens"] == found["labels"]["ids"] == expected["input_ids"]
    assert found["count"] == len(expected["input_ids"])
    assert found["token_strs"] == tokenizer().convert_ids_to_tokens(expected["input_ids"])
    words = [None if span is None else found["text"][slice(*span)] for span in found["labels"]["spans"]]
    assert [word for word in words if word] == ["the", "cat", "sat"]
    bare = tokenize(http, model="encoder", prompt="the cat sat", add_special_tokens=False).json()
    assert bare["tokens"] == tokenizer()("the cat sat", add_special_tokens=False)["input_ids"]
    assert "token_strs" not in bare or bare["token_strs"] is None


def test_a_conversation_is_written_by_its_template(http):
    found = tokenize(http, model="talker", messages=CHAT).json()
    assert found["text"] == WRITTEN
    assert found["tokens"] == letters()(WRITTEN)["input_ids"]
    assert found["max_model_len"] == 2048
    parts = found["labels"]["parts"]
    assert "".join(token for token, part in zip(WRITTEN, parts, strict=True) if part == "user") == "Hello"


def test_its_positions_are_those_of_attention_in_a_chat(http):
    found = tokenize(http, model="talker", messages=CHAT).json()
    chat = {"model": "talker", "messages": CHAT, "max_tokens": 1, "attention": {"layers": [0]}}
    (token,) = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["attention"]
    assert token["position"] == found["count"]


def test_a_given_answer_has_the_labels_of_weights(http):
    found = tokenize(http, model="talker", prompt="the cat", answer=" sat").json()
    weights = http.post("/v1/models/talker/weights", json={"text": "the cat", "answer": " sat"}).json()
    assert found["labels"] == weights["labels"]
    assert found["text"] == "the cat sat"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": CHAT, "answer": "a"}, "answer"),
        ({"prompt": "a", "surprise": 1}, "surprise"),
        ({"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(http, fields, param):
    refusal = tokenize(http, model="talker", **fields)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["param"] == param


def test_the_client_asks_too(door):
    with Client(door.url, api_key=door.key) as client:
        assert client.models.tokenize("encoder", "the cat").labels.spans[:2] == [(0, 3), (4, 7)]
        assert client.models.tokenize("talker", messages=CHAT).text == WRITTEN
