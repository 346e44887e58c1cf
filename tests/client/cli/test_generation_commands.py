"""``attention generate`` and ``attention chat`` show tokens as they come, with what the heads looked at."""

import numpy as np
import pytest

from attention_client.cli.commands import generation_commands
from attention_contract.schemas.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatPiece,
    Completion,
    CompletionChoice,
    GeneratedToken,
    TokensAttention,
)
from attention_contract.schemas.prompts import TokenLabelsReply
from attention_contract.schemas.weights import TopKeys
from tests.client.cli.command_line import invoke

LABELS = TokenLabelsReply(tokens=["<s>", " the"], ids=[0, 1], spans=[None, (0, 3)])
KEYS, WEIGHTS = np.array([[0, 1], [1, -1]]), np.array([[0.75, 0.25], [0.5, 0]], np.float32)


def token(position, text, heads=slice(None)):
    top = TopKeys(keys=KEYS[heads], weights=WEIGHTS[heads])
    layers = [TokensAttention(layer=layer, top_keys=top) for layer in (0, 1, 2)]
    return GeneratedToken(position=position, token=text, id=5, layers=layers)


class Played:
    """A client whose model says ``cat sat``."""

    def __init__(self):
        self.models, self.calls = self, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def forward(self, model, text=None, **fields):
        assert fields["top_k"] == 0
        self.calls.append((model, text or [each["content"] for each in fields["messages"]]))
        return self

    labels = LABELS

    def tokens(self, fields):
        self.fields = fields
        heads = (fields.get("attention") or {}).get("heads")
        for at, text in enumerate((" cat", " sat")):
            yield (
                text,
                [token(2 + at, text, slice(None) if heads is None else heads)] if "attention" in fields else None,
            )

    def stream(self, model, text, **fields):
        for word, attention in self.tokens(fields):
            given = {} if attention is None else {"attention": attention}
            choice = CompletionChoice(index=0, text=word, **given)
            yield Completion(id="1", created=1, model=model, choices=[choice])

    def stream_chat(self, model, messages, **fields):
        for word, attention in self.tokens(fields):
            given = {} if attention is None else {"attention": attention}
            choice = ChatPiece(index=0, delta=AssistantMessage(content=word), **given)
            yield ChatCompletionChunk(id="1", created=1, model=model, choices=[choice])

    def chat(self, model, messages, **fields):
        self.calls.append((model, [each["content"] for each in messages]))
        message = AssistantMessage(role="assistant", content=" cat sat")
        return ChatCompletion(id="1", created=1, model=model, choices=[ChatChoice(index=0, message=message)])

    def generate(self, model, text, **fields):
        self.fields = fields
        return Completion(id="1", created=1, model=model, choices=[CompletionChoice(index=0, text=" cat sat")])


@pytest.fixture
def played(monkeypatch):
    client = Played()
    monkeypatch.setattr(generation_commands, "client_of", lambda _: client)
    return client


def run(*arguments, stdin=None):
    result = invoke(arguments, input=stdin)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_each_token_has_a_line_with_the_mean_of_many_heads(played):
    lines = run("generate", "net", "the", "--max-tokens", "2")
    assert lines[0].split() == ["cat", "←", "<s>", "(0.38)", "the", "(0.38)"]
    assert lines[-1] == " cat sat"
    assert played.calls == [("net", "the")]
    assert played.fields["temperature"] == 0
    assert played.fields["max_tokens"] == 2
    assert played.fields["attention"] == {"top_k": 8, "statistics": []}


def test_few_heads_have_their_own_parts_and_keep_their_numbers(played):
    lines = run("generate", "net", "the", "--head", "1", "--layer", "0", "--layer", "cross.1")
    looks = "the (0.50)"
    assert lines[0].split() == f"cat ← L0H1: {looks} L1H1: {looks} L2H1: {looks}".split()
    assert played.fields["attention"]["layers"] == [0, "cross.1"]


def test_a_generated_token_can_be_looked_at(played, monkeypatch):
    monkeypatch.setitem(globals(), "KEYS", np.array([[2, 1], [2, -1]]))
    lines = run("generate", "net", "the")
    assert "2 (0.62)" in lines[0]  # a token that has no name yet
    assert "cat (0.62)" in lines[1]


def test_text_alone_is_printed_as_it_comes(played):
    assert run("generate", "net", "the", "--no-look") == [" cat sat"]
    assert "attention" not in played.fields


def test_json_is_the_whole_reply(played):
    (line,) = run("generate", "net", "the", "--json")
    assert '"text":" cat sat"' in line


def test_a_page_has_the_text_and_the_attention_of_each_token(played, tmp_path):
    (line,) = run("generate", "net", "the", "--plot", str(tmp_path / "a.html"))
    page = (tmp_path / "a.html").read_text("utf-8")
    assert line == f"{tmp_path / 'a.html'}: {len(page.encode())} bytes"
    assert played.fields["attention"]["weights"]
    assert " cat sat" in page


def test_a_conversation_goes_on_until_the_end_of_input(played):
    lines = run("chat", "net", "--system", "be brief", "--no-look", stdin="hello\n\nagain\n")
    assert "".join(lines).count(" cat sat") == 2
    assert played.calls[1] == ("net", ["be brief", "hello", " cat sat", "again"])


def test_images_go_with_the_first_message_alone_and_their_patches_are_named(played, tmp_path):
    names = ["cat.jpg", "mat"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    images = [text for name in names for text in ("--image", str(tmp_path / name))]
    played.labels = LABELS.model_copy(update={"tokens": ["[0:1,2]", " the"]})
    lines = run("chat", "net", *images, stdin="what\nagain\n")
    assert lines[0].split() == ["cat", "←", "[0:1,2]", "(0.38)", "the", "(0.38)"]
    (first,), (_, _, second) = (calls for _, calls in played.calls)
    assert [part["type"] for part in first] == ["image_url", "image_url", "text"]
    urls = [part["image_url"]["url"] for part in first[:2]]
    assert urls == ["data:image/jpeg;base64,Y2F0LmpwZw==", "data:image/png;base64,bWF0"]
    assert (first[2]["text"], second) == ("what", "again")
    answered = run("generate", "net", "what", *images)
    assert (answered[0], answered[-1]) == (lines[0], " cat sat")
    assert '"content":" cat sat"' in run("generate", "net", "what", *images, "--json")[0]


def test_an_image_that_cannot_be_read_is_named_before_any_request(played):
    result = invoke(["chat", "net", "--image", "none.png"], input="what\n")
    assert result.exit_code != 0
    assert "none.png cannot be read" in str(result.exception) + result.output
    assert not played.calls
