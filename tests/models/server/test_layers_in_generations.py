"""A layer's ``generation`` says over HTTP what a generation is answered and refused for, and the reason."""

from typing import get_args

import pytest
from tests.client.tiny_models import tokenizer
from tests.conftest import live_server
from tools.models_walk.model_types import built

from attention_client import Client, InvalidRequest
from attention_contract.schemas.attention import EditableTap

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
KINDS = {"llama": set(), "gpt_neo": set(), "t5": {"attention"}, "mamba2": {"attention", "v"}, "qwen3_next": {"gate"}}
"""A type of each way, with some that it refuses: computed attention, attention of the model's own, an encoder beside a
decoder, running states, and gates."""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        model = built(kind)
        model.generation_config.decoder_start_token_id = 0 if kind == "t5" else None
        model.save_pretrained(root / kind)
        tokenizer().save_pretrained(root / kind)
    with live_server(root) as address, Client(address, timeout=120) as client:
        yield client


def refusal(client, kind, attention):
    """The reason for which a generation with this attention is refused; None if it is answered."""
    try:
        client.models.generate(kind, "the cat", max_tokens=2, attention=attention)
    except InvalidRequest as why:
        return str(why)
    return None


@pytest.mark.long
@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_says_what_a_generation_is_refused_for(client, kind):
    client.models.load(kind)
    layers = client.models.get(kind).layers
    for layer in layers:
        told = layer.generation
        why = refusal(client, kind, {"layers": [layer.layer]})
        assert told.attention == (why is None) == ("attention" not in told.refused), why
        assert told.refused.get("attention", "") in (why or "")
        for tap in get_args(EditableTap):
            edits = {str(layer.layer): [{"tap": tap, "set": 0}]}
            why = refusal(client, kind, {"statistics": [], "edits": edits})
            assert (tap in told.edits) == (why is None), why
            assert (tap in told.refused) == (tap in layer.edits and why is not None)
            assert told.refused.get(tap, "") in (why or "")
    assert {name for layer in layers for name in layer.generation.refused} >= KINDS[kind]
