"""Replies of models as their processes write them, and the server passes them on."""

import numpy as np
import pytest
from safetensors.numpy import load
from tests.conftest import live_server

from attention_client import Client
from attention_contract.errors import RecordingNotFound
from attention_contract.schemas.model_requests import ModelForwardReply
from attention_contract.wire import JSON, SAFETENSORS, from_body
from attention_service.api.access.api_keys import create_key

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")  # JAX warns, if another test of this process imported it
ONE, MIB = "/v1/models/one", 2**20


@pytest.mark.parametrize("size", [0.01, 0.25, 1])
def test_a_reply_has_the_form_that_was_requested(http, size):
    """The process writes it, but for a JSON text of more than a mebibyte of tensors, which the server makes."""
    fields = {"text": f"needs 20 large {size}"}
    reply = http.post(f"{ONE}/forward", json=fields, headers={"accept": SAFETENSORS})
    assert reply.headers["content-type"] == SAFETENSORS
    expected = load(reply.content)["layers.0.q"]
    assert expected.size == int(size * MIB) // 4
    for encoding in ("list", "base64"):
        reply = http.post(f"{ONE}/forward", json=fields | {"encoding": encoding}, headers={"accept": JSON})
        assert (reply.headers["content-type"], reply.headers["vary"]) == (JSON, "Accept")
        assert (b'"base64"' in reply.content) == (encoding == "base64")
        found = from_body(ModelForwardReply, reply.content, JSON, "reply")
        np.testing.assert_array_equal(found.layers[0].q, expected)
        assert found.labels.tokens == [fields["text"]]


def test_a_reply_tells_what_the_server_alone_knows(http, repository):
    with live_server(repository) as url, Client(url) as client:
        first, second = (client.models.forward("one", "needs 20").ran for _ in range(2))
        assert first.load_ms > 0 == second.load_ms
        assert second.queue_ms > 0
        assert (second.model, second.peak_bytes) == ("one", 20 * MIB)


def test_the_id_of_a_recording_is_that_of_its_owner(stand_ins, repository):
    keys = {name: create_key(repository, name, ["infer", "manage"][: 1 + (name == "boss")]) for name in ("boss", "ann")}
    with (
        live_server(repository, require_keys=True) as url,
        Client(url, api_key=keys["ann"]) as ann,
        Client(url, api_key=keys["boss"]) as boss,
    ):
        of_ann, of_all = (each.models.forward("one", "keep it", keep=True).recording for each in (ann, boss))
        assert ann.recordings.get(of_ann).text == boss.recordings.get(of_all).text == "keep it"
        assert of_ann != of_all
        with pytest.raises(RecordingNotFound):
            ann.recordings.get(of_all)
