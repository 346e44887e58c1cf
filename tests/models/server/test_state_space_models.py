"""Models without attention over real HTTP: listed, generating, with implicit weights, and refusals that say why."""

import httpx
import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tools.models_walk.model_types import built
from typer.testing import CliRunner

from attention_client import Client, InvalidRequest, look
from attention_client.cli import app
from attention_client.servers import looks

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TOKENS = [5, 3, 7, 8, 6, 4, 9]
TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def originals():
    return {"mamba2": built("mamba2"), "mamba": built("mamba")}


@pytest.fixture(scope="module")
def address(tmp_path_factory, originals):
    root = tmp_path_factory.mktemp("models")
    for name, model in originals.items():
        model.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    with live_server(root) as address:
        yield address


@pytest.fixture(scope="module")
def models(address):
    with Client(address, timeout=120) as client:
        listed = {model.id: model for model in client.models.list().data}
        assert listed["mamba2"].takes == ["text"]
        assert listed["mamba2"].refused is None
        client.models.load("mamba2")
        yield client.models


def test_layers_are_listed_with_their_kind_and_what_they_answer(models):
    info = models.get("mamba2")
    assert info.attention is None
    assert [(layer.layer, layer.kind, layer.heads) for layer in info.layers] == [
        (0, "state_space", 4), (1, "state_space", 4),
    ]  # fmt: skip
    assert info.layers[0].taps == ["v", "weights", "context", "output", "hidden"]
    assert "running state" in info.layers[0].refused["scores"]
    assert (info.generates, info.unseen, info.without_weights) == (True, [], {})


def test_predictions_are_the_models_own(models, originals):
    reply = models.forward("mamba2", tokens=TOKENS, return_=["logits"], top_k=1)
    with torch.no_grad():
        own = originals["mamba2"](torch.tensor([TOKENS])).logits[0]
    np.testing.assert_allclose(reply.logits[-1], own[-1], atol=1e-5)
    assert reply.predictions[0].top[0].id == int(own[-1].argmax())


@pytest.mark.parametrize(("model", "layers"), [("mamba2", "all"), ("mamba", [0])])
def test_the_weights_times_the_values_are_the_context(models, model, layers):
    weights = models.weights(model, tokens=TOKENS, layers=layers)
    taps = models.forward(model, tokens=TOKENS, layers=layers, return_=["v", "context"])
    for layer, own in zip(weights.layers, taps.layers, strict=True):
        assert layer.implicit is True
        np.testing.assert_allclose(layer.weights @ own.v, own.context, atol=1e-5)


def test_edits_and_gradients(models):
    edits = {"0": [{"tap": "weights", "heads": [1], "set": 0.0}]}
    reply = models.forward("mamba2", tokens=TOKENS, edits=edits, compare="unedited")
    assert reply.predictions[0].divergence > 0
    slopes = models.gradients("mamba2", tokens=TOKENS, layers=[0], wrt=["weights"], check=True)
    assert slopes.layers[0].gradients["weights"].shape == (4, 7, 7)
    assert all(each.passed for each in slopes.check.values())


def test_a_lens_reads_its_layers_and_their_heads(models):
    reply = models.lens("mamba2", TEXT, of=["heads"], targets=[5], positions=[-1])
    heads = sum(np.sum(layer.heads.targets) for layer in reply.layers)
    rest = reply.rest
    others = np.sum(rest.embeddings) + np.sum(rest.mlps) + np.sum(rest.others) + np.sum(rest.unembedding)
    biases = 0 if rest.biases is None else np.sum(rest.biases)
    np.testing.assert_allclose(heads + others + biases, np.sum(reply.logits), atol=1e-4)


@pytest.mark.long
@pytest.mark.sampled(model=1)
@pytest.mark.parametrize("model", ["mamba2", "mamba"])
def test_it_generates_and_texts_share_passes(address, originals, model):
    request = {"model": model, "prompt": [[5, 3, 7], [8, 6, 4, 9, 3]], "max_tokens": 5, "temperature": 0, "n": 2}
    request |= {"ignore_eos": True}
    choices = httpx.post(f"{address}/v1/completions", json=request, timeout=120).json()["choices"]
    own = []
    for prompt in request["prompt"]:
        tokens = originals[model].generate(
            torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        own += [tokenizer().decode(tokens[0, len(prompt) :], skip_special_tokens=True)] * 2
    assert [each["text"].strip() for each in choices] == own


def test_the_next_turn_of_a_conversation_reads_what_is_new(address, originals):
    def ask(prompt):
        request = {"model": "mamba2", "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=request, timeout=120).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def own(prompt):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return originals["mamba2"].generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()

    first = [3 + 5 * number % 11 for number in range(80)]
    second = [*own(first), 7, 8, 6, 4]
    assert ask(first)[1] == 0
    text, cached = ask(second)
    assert cached == len(first) + 4  # the last token has chosen none
    assert text.strip() == tokenizer().decode(own(second)[len(second) :], skip_special_tokens=True)
    assert ask(second[:83])[1] == 0


@pytest.mark.parametrize(
    ("call", "fields", "param", "words"),
    [
        ("effects", {"sweep": {"tap": "scores", "over": ["heads"], "set": 0}}, "layers", "scores: no layer"),
        ("effects", {"from": {"parts": ["heads"]}}, "from", "has no attention"),
        ("forward", {"return": ["scores"]}, "return.0", "running state, which has no scores"),
        ("forward", {"keep": True}, "keep", "no recording holds layer 0"),
        ("weights", {"statistics": ["entropy"]}, "statistics.0", "needs a distribution"),
        ("context", {"split": "sentences", "return": ["attention"]}, "return.0", "has no attention"),
        ("context", {"split": "sentences", "return": ["hidden"]}, "return.0", "without keys that could be hidden"),
    ],
)
def test_what_needs_attention_is_refused_with_the_reason(address, call, fields, param, words):
    body = {"text": TEXT} | fields
    reply = httpx.post(f"{address}/v1/models/mamba2/{call}", json=body, timeout=120)
    assert reply.status_code == 422
    assert reply.json()["param"] == param, reply.json()
    assert words in reply.json()["detail"]


def test_attention_of_generated_tokens_is_refused(address):
    for attention, words in (
        ({"top_k": 1}, "has no attention"),
        ({"layers": [0]}, "not made token by token"),
        ({"statistics": [], "edits": {"0": [{"tap": "context", "set": 0}]}}, "not edited while tokens are generated"),
    ):
        request = {"model": "mamba2", "prompt": "the cat", "max_tokens": 2, "attention": attention}
        reply = httpx.post(f"{address}/v1/completions", json=request, timeout=120)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("attention"), reply.json()
        assert words in reply.json()["error"]["message"]


def test_channels_are_too_many_for_all_layers(models):
    with pytest.raises(InvalidRequest, match="name some layers") as refused:
        models.weights("mamba", tokens=TOKENS)
    assert refused.value.param == "layers"


def test_the_command_looks_at_one_channel_of_the_first_layer_and_says_so(address):
    command = CliRunner().invoke(app, ["look", "mamba", TEXT], env={"ATTENTION_URL": address})
    assert command.exit_code == 0
    assert "Layer 0, channel 0 alone" in command.stderr
    assert "Name a layer (0, 1)" in command.stderr
    assert command.stdout.startswith("L0H0\n")  # its map
    assert "L0H1" not in command.stdout
    assert not command.stdout.rstrip("\n").endswith((",", ", "))  # no kernel computed it
    chosen = CliRunner().invoke(app, ["look", "mamba", TEXT, "--head", "3"], env={"ATTENTION_URL": address})
    assert "Layer 0 alone" in chosen.stderr
    assert chosen.stdout.startswith("L0H3\n")
    whole = CliRunner().invoke(app, ["look", "mamba", TEXT, "--layer", "1"], env={"ATTENTION_URL": address})
    assert "L1H47" in whole.stdout
    assert not whole.stderr


def test_a_look_is_at_one_channel_of_the_first_layer_and_says_so(address, monkeypatch):
    monkeypatch.setenv("ATTENTION_URL", address)
    found = look("mamba", TEXT)
    (layer,) = found.reply.layers
    assert (layer.layer, layer.weights.shape) == (0, (1, 6, 6))
    assert "Layer 0, channel 0 alone" in found.note
    assert str(found).startswith(found.note)
    assert found.note in found._repr_html_()
    assert look("mamba", TEXT, layer=1).note == ""
    with pytest.raises(InvalidRequest, match="out of range"):
        look("mamba", TEXT, head=48)
    looks._named(address).close()
    looks._named.cache_clear()


def test_costs_count_the_running_state_and_no_keys(models):
    cost = models.complexity("mamba2", length=64, new_tokens=8)
    assert cost.cache_bytes_per_token == 0
    assert cost.cache_bytes == 2 * 4 * 64 * (16 + 4)  # layers, bytes, values, state and window of each
    assert cost.prefill.flops > 0
    assert models.complexity("mamba2", length=64, weights=True).prefill.flops > cost.prefill.flops
