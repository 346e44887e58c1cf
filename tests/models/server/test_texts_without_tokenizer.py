"""Models whose folders have no tokenizer: every door refuses a text by the name of its field, and takes tokens."""

import httpx
import pytest
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server

VOCABULARY = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"])
CHAT = [{"role": "user", "content": "the cat"}]
SWEEP = {"tap": "context", "over": ["layers"], "set": 0}
ALL = {
    "forward": ("/v1/models/{}/forward", {"text": "the cat"}, "text"),
    "several": ("/v1/models/{}/forward", {"text": ["the cat", "mat"]}, "text.0"),
    "pair": ("/v1/models/{}/forward", {"text": "the cat", "text_pair": "mat"}, "text"),
    "messages": ("/v1/models/{}/forward", {"messages": CHAT}, "messages"),
    "weights": ("/v1/models/{}/weights", {"text": "the cat"}, "text"),
    "gradients": ("/v1/models/{}/gradients", {"text": "the cat"}, "text"),
    "similarity": ("/v1/models/{}/similarity", {"pairs": [["the cat", "mat"]]}, "pairs"),
    "embeddings": ("/v1/embeddings", {"input": "the cat"}, "input"),
    "tokenize": ("/v1/tokenize", {"prompt": "the cat"}, "prompt"),
}  # fmt: skip
"""A request, and the field that has the text."""
GENERATES = {
    "answer": ("/v1/models/{}/forward", {"text": "the cat", "answer": " sat"}, "text"),
    "effects": ("/v1/models/{}/effects", {"text": "the cat", "sweep": SWEEP}, "text"),
    "lens": ("/v1/models/{}/lens", {"text": "the cat"}, "text"),
    "fit": ("/v1/models/{}/lenses", {"texts": ["the cat"], "skip_first": 0}, "texts.0"),
    "complexity": ("/v1/models/{}/complexity", {"text": "the cat", "answer": " sat"}, "text"),
    "context": ("/v1/models/{}/context", {"text": "the cat", "answer": " sat"}, "text"),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}, "messages"),
    "completion": ("/v1/completions", {"prompt": "the cat", "max_tokens": 2}, "prompt"),
    "response": ("/v1/responses", {"input": "the cat", "max_output_tokens": 16}, "input"),
    "detokenized": ("/v1/completions", {"prompt": [3, 4], "max_tokens": 2}, "prompt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in ("bert", "albert", "llama", "t5"):
        tiny(family).save_pretrained(folder / family)
    (folder / "albert" / "vocab.txt").write_text(VOCABULARY)
    return folder


@pytest.fixture(scope="module")
def http(root):
    with live_server(root) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("model", ["bert", "albert", "llama"])
def test_a_model_takes_the_same_before_and_after_it_is_loaded(http, model):
    before = http.get(f"/v1/models/{model}").json()
    assert before["takes"] == []
    assert http.post("/v1/models", json={"checkpoint": model}).json()["takes"] == []
    after = http.get(f"/v1/models/{model}").json()
    assert after["takes"] == []
    assert {*before["left_out"]} <= {*after["left_out"]}


def test_a_vocabulary_of_another_kind_is_told(http):
    (told,) = (each for each in http.get("/v1/models/albert").json()["left_out"] if "vocab.txt" in each)
    assert told == "vocab.txt (AlbertTokenizer reads tokenizer.json or spiece.model)"


@pytest.mark.parametrize(
    ("model", "door"),
    [
        *((model, door) for model in ("bert", "albert", "llama") for door in ALL),
        *(("llama", door) for door in GENERATES),
    ],
)
def test_every_door_names_the_field_of_the_text(http, model, door):
    path, body, field = (ALL | GENERATES)[door]
    named = path.format(model)
    reply = http.post(named, json=body if named != path else body | {"model": model})
    fault = reply.json().get("error", reply.json())
    assert reply.status_code == (400 if "error" in reply.json() else 422), reply.text  # as OpenAI answers
    assert fault["param"] == field, fault
    assert "the checkpoint has no tokenizer" in fault.get("detail", fault.get("message", ""))


@pytest.mark.parametrize("model", ["bert", "albert", "llama"])
def test_tokens_are_taken_in_the_place_of_texts(http, model):
    reply = http.post(f"/v1/models/{model}/forward", json={"tokens": [5, 3, 7], "return": ["weights"]})
    assert reply.status_code == 200, reply.text


def test_a_target_needs_a_tokenizer_too(http):
    assert http.get("/v1/models/t5").json()["takes"] == []
    reply = http.post("/v1/models/t5/forward", json={"tokens": [5, 3, 7], "target": "the cat"})
    assert (reply.status_code, reply.json()["param"]) == (422, "target")
    assert http.get("/v1/models/t5").json()["takes"] == []


def test_two_texts_are_told_apart_once_the_tokenizer_is_there(http, root):
    """It is added while the model is resident."""
    tokenizer().save_pretrained(root / "bert")
    reply = http.post("/v1/models/bert/similarity", json={"pairs": [["the cat", "mat"]]})
    assert (reply.status_code, reply.json()["param"]) == (422, "pairs")
    assert "unload the model to read it" in reply.json()["detail"]
    assert http.delete("/v1/models/bert").status_code == 204
    assert http.get("/v1/models/bert").json()["takes"] == ["text"]
    reply = http.post("/v1/models/bert/similarity", json={"pairs": [["the cat", "mat"], ["mat", "mat"]]})
    first, second = reply.json()["similarity"]
    assert first < 0.999 < second
    assert http.get("/v1/models/bert").json()["takes"] == ["text"]
