"""``attention-vllm serve``: completions and chats with ``attention``, by the client of attention-service."""

import json
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_client import Client
from attention_contract.errors import AttentionError, InvalidRequest
from conftest import serving, statistics_of

LOOK = {"weights": True, "top_k": 2, "statistics": ["entropy", "max_weight"]}


@pytest.fixture(scope="module")
def url(served_model):
    with serving(served_model) as address:
        yield address


def hold(reference, prompt, tokens):
    """Hold the attention of generated tokens to transformers' in float64."""
    attentions, _ = reference("served", prompt + [each.id for each in tokens])
    assert [each.position for each in tokens] == [*range(len(prompt), len(prompt) + len(tokens))]
    for token in tokens:
        for layer in token.layers:
            exact = attentions[layer.layer][:, token.position - 1, : token.position]
            np.testing.assert_allclose(np.asarray(layer.weights), exact, atol=1e-4)
            for name, numbers in statistics_of(exact).items():
                if name in LOOK["statistics"]:
                    np.testing.assert_allclose(np.asarray(getattr(layer.statistics, name)), numbers, atol=2e-4)
            assert np.asarray(layer.top_keys.keys).shape == (8, 2)


def test_the_client_reads_completions_with_attention(url, reference):
    prompts = [[5 + n, *range(10, 14 + 9 * n)] for n in range(6)]
    options = {"max_tokens": 10, "temperature": 0, "ignore_eos": True, "attention": LOOK}
    with Client(url) as client, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda prompt: client.models.generate("m", prompt, **options), prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            (choice,) = reply.choices
            assert len(choice.attention) == reply.usage.completion_tokens == 10
            assert all(len(token.layers) == 4 for token in choice.attention)
            hold(reference, prompt, choice.attention)


def test_streams_have_the_attention_of_each_token_beside_it(url, reference):
    prompt = [7, *range(20, 50)]
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "attention": LOOK | {"layers": [3, 1]}}
    with Client(url) as client:
        pieces = list(client.models.stream("m", prompt, **options))
        whole = client.models.generate("m", prompt, **options)
    tokens = [token for piece in pieces for choice in piece.choices for token in choice.attention]
    assert len(tokens) == 12
    assert len(pieces) > 1  # vLLM joins tokens in one piece where its API server falls behind
    assert [layer.layer for layer in tokens[0].layers] == [3, 1]
    hold(reference, prompt, tokens)
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
    assert [token.id for token in tokens] == [token.id for token in whole.choices[0].attention]


def test_chats_and_edits_are_answered(url):
    messages = [{"role": "user", "content": "the cat sat on the mat"}]
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    edit = {"edits": {"1": [{"tap": "context", "set": 0}]}}
    with Client(url) as client:
        plain = client.models.chat("m", messages, attention=LOOK, **options)
        edited = client.models.chat("m", messages, attention=LOOK | edit, **options)
        again = client.models.chat("m", messages, attention=LOOK, **options)
        pieces = list(client.models.stream_chat("m", messages, attention=LOOK, **options))
    first, second = (np.asarray(each.choices[0].attention[0].layers[3].weights) for each in (plain, edited))
    assert not np.allclose(first, second)
    third = np.asarray(again.choices[0].attention[0].layers[3].weights)
    np.testing.assert_allclose(third, first, atol=1e-5)  # the edit is in no page that others find
    assert [token.id for token in plain.choices[0].attention] == [
        token.id for piece in pieces for choice in piece.choices for token in choice.attention
    ]


def test_spans_are_messages_and_characters_as_the_template_writes_them(url, served_model):
    messages = [{"role": "user", "content": "the cat sat"}, {"role": "user", "content": "on the mat"}]
    text = "user: the cat sat user: on the mat "
    spans = [
        {"name": "first", "messages": [0]},
        {"name": "second", "messages": [1]},
        {"name": "c", "characters": [0, 9]},
    ]
    ask = {"weights": True, "statistics": ["classes"], "statistic_options": {"spans": spans}}
    with Client(url) as client:
        reply = client.models.chat("m", messages, attention=ask, max_tokens=3, temperature=0, ignore_eos=True)
    offsets = AutoTokenizer.from_pretrained(served_model)(text, add_special_tokens=False).encodings[0].offsets
    (choice,) = reply.choices
    assert choice.attention[0].position == len(offsets)
    places = {name: [at for at, (_, end) in enumerate(offsets) if begin < end <= stop] for name, begin, stop in (
        ("first", 6, 17), ("second", 24, 34), ("c", 0, 9),
    )}  # fmt: skip
    assert all(places.values())
    for token in choice.attention:
        for layer in token.layers:
            for name, own in places.items():
                shares = np.asarray(layer.weights)[:, own].sum(-1)
                np.testing.assert_allclose(np.asarray(layer.statistics.classes[name]), shares, atol=1e-6)


def test_taps_of_a_whole_text_are_those_of_transformers(url, served_model, reference):
    tokens = [7, *range(20, 50)]
    model = AutoModelForCausalLM.from_pretrained(served_model, attn_implementation="eager", dtype=torch.float64).eval()
    seen = {}
    for layer, block in enumerate(model.model.layers):
        projection = block.self_attn.o_proj
        projection.register_forward_hook(
            lambda _, given, output, layer=layer: seen.update({layer: (given[0][0], output[0])})
        )
    with torch.inference_mode():
        model(torch.tensor([tokens]), use_cache=False)
    attentions, _ = reference("served", tokens)
    with Client(url) as client:
        for _ in range(2):  # the second one finds no page of the first
            reply = client.models.forward("m", tokens=tokens, return_=["weights", "context", "output"], top_k=0)
            assert reply.labels.ids == tokens
            assert [each.layer for each in reply.layers] == [0, 1, 2, 3]
            for each in reply.layers:
                context, output = seen[each.layer]
                np.testing.assert_allclose(each.weights, attentions[each.layer], atol=1e-4)
                context = context.unflatten(-1, (8, -1)).transpose(0, 1)
                # Float32 alone departs by up to 1.3e-5 of the largest number, in transformers' own eager attention.
                for tap, exact in ((each.context, context), (each.output, output)):
                    np.testing.assert_allclose(tap, exact, atol=5e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_not_answered_is_refused_by_its_field(url, streams):
    faults = {
        "attention.keep": {"attention": {"keep": True}},
        "attention.layers": {"attention": {"layers": [9]}},
        "attention.heads": {"attention": {"heads": [11]}},
        "attention.top_k": {"attention": {"top_k": -1}},
        "n": {"attention": {}, "n": 2},
    }
    for param, fields in faults.items():
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 400, "stream": streams, **fields}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        assert caught.value.code == 400
        assert json.loads(caught.value.read())["error"]["param"] == param


def test_a_refusal_reaches_the_client_as_its_error(url):
    with Client(url) as client:
        with pytest.raises(AttentionError) as caught:
            client.models.generate("m", [5, 6, 7], attention={"layers": [9]})
        assert caught.value.param == "attention.layers"
        assert client.models.generate("m", [5, 6, 7], max_tokens=2, attention={"layers": [0]}).choices[0].attention
    assert issubclass(type(caught.value), InvalidRequest | AttentionError)


def test_requests_without_attention_are_vllms_own(url):
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 3}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        reply = json.loads(answer.read())
    assert "kv_transfer_params" in reply
    assert "attention" not in reply["choices"][0]


def test_a_caller_without_a_key_is_refused_and_the_folder_of_sockets_goes_with_the_server(served_model):
    with tempfile.TemporaryDirectory() as folder:
        with serving(served_model, "--api-key", "secret", TMPDIR=folder) as address:
            assert len([*Path(folder).glob("attention-vllm-*")]) == 1
            body = json.dumps({"model": "m", "prompt": [5, 6, 7], "max_tokens": 2, "attention": {}}).encode()
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body), timeout=60)
            assert caught.value.code == 401
            with Client(address, api_key="secret") as client:
                assert client.models.generate("m", [5, 6, 7], max_tokens=2, attention={}).choices[0].attention
        assert [*Path(folder).glob("attention-vllm-*")] == []
