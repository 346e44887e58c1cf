"""Whole models on a GPU over real HTTP: the numbers of the same models on the CPU, and memory that goes back."""

import numpy as np
import orjson
import pytest
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server
from tests.models.inputs.images import small_prompts as prompts
from tests.models.inputs.images.small_encoders import eager, noise, png, processor

from attention_client import Client
from attention_contract.wire import to_json

pytestmark = pytest.mark.gpu
TEXT = "the cat sat on the mat"
DECODERS = ("llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3")
FAMILIES = (*DECODERS, "t5", "bert")
HALF = "half"
"""A Llama in bfloat16."""


@pytest.fixture(scope="module")
def devices(tmp_path_factory):
    """Clients of two servers of the same models: on the GPU, and on the CPU."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny(family).save_pretrained(root / family)
        tokenizer().save_pretrained(root / family)
    tiny("llama").bfloat16().save_pretrained(root / HALF)
    tokenizer().save_pretrained(root / HALF)
    prompts.save(root / "gemma3", "gemma3")
    eager("vit").save_pretrained(root / "vit")
    processor("vit").save_pretrained(root / "vit")
    with (
        live_server(root, device="cuda") as gpu,
        live_server(root, device="cpu") as cpu,
        Client(gpu, timeout=300) as on_gpu,
        Client(cpu, timeout=300) as on_cpu,
    ):
        yield on_gpu, on_cpu


def numbers(reply):
    """Return every list of numbers and every word of a reply by its place, but for what ran."""
    found = {}

    def walk(value, place):
        if isinstance(value, dict):
            for name in value.keys() - {"ran", "created", "id", "model", "usage"}:
                walk(value[name], f"{place}.{name}")
        elif isinstance(value, list) and any(isinstance(each, dict | str) for each in value):
            for number, each in enumerate(value):
                walk(each, f"{place}.{number}")
        else:
            found[place] = value

    walk(orjson.loads(to_json(reply)), "")
    return found


def check(devices, ask, tolerance=2e-4):
    """Compare the answers of the two devices."""
    on_gpu, on_cpu = (numbers(ask(client)) for client in devices)
    assert on_gpu.keys() == on_cpu.keys()
    for place, value in on_gpu.items():
        if value != on_cpu[place] and isinstance(value, float | list):
            a, b = (np.asarray(each, np.float64) for each in (value, on_cpu[place]))
            np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=place)
        else:
            assert value == on_cpu[place], place


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answers_are_those_of_the_cpu(devices, family):
    more = {"target": "the dog"} if family == "t5" else {}
    taps = ["q", "k", "v", "scores", "masked_scores", "weights", "context", "output", "lse"]
    check(devices, lambda client: client.models.forward(family, TEXT, return_=taps, top_k=2, **more))
    check(devices, lambda client: client.models.weights(family, TEXT, top_k=3, **more))
    layer = devices[1].models.weights(family, TEXT, **more).layers[0].layer
    edits = {str(layer): [{"tap": "weights", "heads": [1], "set": 0.0}, {"tap": "context", "heads": [0], "scale": 2}]}
    check(devices, lambda client: client.models.forward(family, TEXT, edits=edits, top_k=2, **more))
    if family != "bert":
        fields = {"of": {"token": 7}, "wrt": ["embeddings", "weights", "scores"], **more}
        check(devices, lambda client: client.models.gradients(family, TEXT, **fields))


@pytest.mark.parametrize("family", [*DECODERS, "t5"])
def test_tokens_are_those_of_the_cpu(devices, family):
    options = {"max_tokens": 6, "temperature": 0, "logprobs": 2, "attention": {"weights": True, "top_k": 2}}
    check(devices, lambda client: client.models.generate(family, [TEXT, "the"], **options))
    pieces = [list(client.models.stream(family, TEXT, max_tokens=6, temperature=0)) for client in devices]
    assert [one.choices[0].text for one in pieces[0]] == [one.choices[0].text for one in pieces[1]]


def test_images_and_embeddings_are_those_of_the_cpu(devices):
    image = png(noise())
    check(devices, lambda client: client.models.weights("vit", images=[image]))
    check(devices, lambda client: client.models.forward("vit", images=[image], top_k=5))
    check(devices, lambda client: client.models.weights("gemma3", "what is on the mat", images=[png(noise(60, 44))]))
    check(devices, lambda client: client.models.embed("bert", [TEXT, "the dog"]))


def test_a_half_type_is_as_near_as_its_digits(devices):
    check(devices, lambda client: client.models.weights(HALF, TEXT), 0.05)
    assert devices[0].models.get(HALF).dtype == "bfloat16"


def test_memory_goes_back(devices):
    client = devices[0]
    client.models.weights("llama", TEXT)
    held = client.models.get("llama")
    assert held.state == "resident"
    before = client.server.info()
    client.models.unload("llama")
    after = client.server.info()
    assert before.memory.in_flight_bytes == after.memory.in_flight_bytes == 0
    assert after.memory.free_bytes > before.memory.free_bytes
