"""``attention-vllm serve``: completions and chats with ``attention``, by the client of attention-service."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from attention_client import Client
from attention_contract.errors import AttentionError, InvalidRequest
from conftest import MAKERS, statistics_of

LOOK = {"weights": True, "top_k": 2, "statistics": ["entropy", "max_weight"]}
TINY = Path(__file__).parents[3] / "service" / "attention_service" / "tiny_model"


@pytest.fixture(scope="module")
def folder(checkpoints):
    """A checkpoint with a tokenizer."""
    torch.manual_seed(0)
    MAKERS["grouped"]().float().save_pretrained(checkpoints / "served")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(checkpoints / "served")
    return checkpoints / "served"


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("attention-vllm")), "serve", str(folder), "--served-model-name", "m",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**27),
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=own, start_new_session=True, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            time.sleep(1)
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


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
        found = json.loads(answer.read())
    assert "kv_transfer_params" in found
    assert "attention" not in found["choices"][0]
