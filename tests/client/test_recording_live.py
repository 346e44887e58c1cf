"""Recordings against a live server: attention that runs there, both clients, and the command end to end."""

import asyncio
import json

import numpy as np
import pytest
from safetensors import safe_open

from attention_client import AsyncClient, Client, InvalidRequest, RecordingNotFound
from attention_client.recording import Recording, record
from tests.client import tiny_models
from tests.client.cli.command_line import invoke
from tests.client.transformers import families

TEXT, TARGET = "the cat sat on the mat", "die Katze saß"
TAPS = ("q", "k", "v", "scores", "masked_scores", "weights", "context")
FAMILIES = [("bert", None), ("gpt2", None), ("llama", None), ("t5", TARGET), ("bart", TARGET)]


@pytest.mark.parametrize(("family", "target"), FAMILIES)
def test_attention_on_the_server_gives_the_numbers_of_eager_attention(family, target, tokenizer, client):
    model = tiny_models.model(family)
    local = record(model, tokenizer, TEXT, target=target)
    remote = record(model, tokenizer, TEXT, taps=TAPS, target=target, client=client)
    assert remote.attentions == local.attentions
    assert remote.facts.tokens == local.facts.tokens
    assert set(remote.facts.versions) == {*local.facts.versions, "server"}
    for name, expected in local.tensors.items():
        # a later layer's inputs differ by the roundings of those before, so its weights by more than one layer's 2e-6
        tolerance = 5e-6 if name.endswith("weights") else 2e-5
        np.testing.assert_allclose(remote.tensors[name], expected, atol=tolerance, rtol=0, err_msg=name)
    for attention in remote.attentions:
        kinds = {name.rpartition(".")[2] for name in remote.tensors if name.rpartition(".")[0] == attention.name}
        assert kinds >= set(TAPS)
        scores = remote.read(attention.name, "masked_scores").astype(np.float64)
        softmax = np.exp(scores - scores.max(-1, keepdims=True))
        softmax /= softmax.sum(-1, keepdims=True)
        np.testing.assert_allclose(softmax, remote.weights(attention.name), atol=2e-6)
    if family == "llama":
        assert remote.read(0, "k").shape == (2, 6, 4)
        assert remote.read(0, "q").shape == (4, 6, 4)


def test_a_layer_without_attention_keeps_its_number(tokenizer, client):
    model = families.tiny("lfm2", "sdpa")  # a convolution, then an attention
    local = record(model, tokenizer, TEXT)
    remote = record(model, tokenizer, TEXT, client=client)
    for recording in (local, remote):
        assert [each.name for each in recording.attentions] == ["layers.1"]
        assert {"layers.0.hidden", "layers.1.hidden"} < set(recording.tensors)
        assert recording.facts.unseen == {"layers.0": "conv has no weights of pairs of tokens"}
    np.testing.assert_allclose(remote.weights(1), local.weights(1), atol=2e-6)


TEXT_FAMILIES = [
    *families.DECODERS,
    *(name for name in families.ENCODERS if "image_size" not in families.ENCODERS[name]),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *families.PAIRS])
def test_every_family_gives_the_same_recording_here_and_there(family, tokenizer, client):
    model = families.tiny(family)
    target = TARGET if family in families.PAIRS else None
    local = record(model, tokenizer, TEXT, target=target)
    remote = record(model, tokenizer, TEXT, target=target, client=client)
    assert remote.attentions == local.attentions
    assert remote.tensors.keys() == local.tensors.keys()
    for name, expected in local.tensors.items():
        if family == "granite_swa" and name.endswith("weights"):
            continue  # transformers returns these weights without the share of the sinks
        share = 1e-5 if name.endswith("weights") else 3e-5  # errors of earlier layers add up
        tolerance = share * max(1, abs(expected).max())
        np.testing.assert_allclose(remote.tensors[name], expected, atol=tolerance, rtol=0, err_msg=name)


def test_a_tap_that_does_not_exist_is_refused_before_the_model_runs(tokenizer, client):
    with pytest.raises(InvalidRequest, match="did you mean 'weights'"):
        record(None, tokenizer, TEXT, taps=["weihgts"], client=client)


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
def test_a_recording_lives_its_life(tokenizer, server, tmp_path, media_type):
    recording = record(tiny_models.model("bert"), tokenizer, TEXT)
    with Client(server, media_type=media_type) as client:
        made = client.recordings.create(recording)
        assert client.recordings.create(recording.save(tmp_path / "cat.safetensors")).id == made.id
        assert client.recordings.get(made.id) == made
        assert made.tokens == {"layers": TEXT.split()}
        assert made.id in [each.id for each in client.recordings.list().recordings]
        part = client.recordings.read(made.id, 1, heads=[2], queries=slice(0, 3))
        np.testing.assert_array_equal(part.value, recording.weights(1)[2:3, :3])
        hidden = client.recordings.read(made.id, "layers.0", "hidden", queries=-1 % 6)
        np.testing.assert_array_equal(hidden.value, recording.hidden(0)[5:])
        whole = client.recordings.download(made.id)
        assert whole.facts == recording.facts
        for name, array in recording.tensors.items():
            np.testing.assert_array_equal(whole.tensors[name], array)
        client.recordings.delete(made.id)
        with pytest.raises(RecordingNotFound):
            client.recordings.get(made.id)


async def test_the_awaited_client_has_the_same_calls(tokenizer, server):
    recording = record(tiny_models.model("gpt2"), tokenizer, TEXT)
    async with AsyncClient(server) as client:
        made = await client.recordings.create(recording)
        listed, described, part, whole = await asyncio.gather(
            client.recordings.list(),
            client.recordings.get(made.id),
            client.recordings.read(made.id, 0),
            client.recordings.download(made.id),
        )
        await client.recordings.delete(made.id)
    assert made.id in [each.id for each in listed.recordings]
    assert described == made
    np.testing.assert_array_equal(part.value, recording.weights(0))
    np.testing.assert_array_equal(whole.weights(1), recording.weights(1))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(server, tmp_path, monkeypatch, tokenizer):
    """Return a function that runs the command in a folder with the checkpoint ``tiny`` in its model repository."""
    monkeypatch.chdir(tmp_path)
    for name, family in (("tiny", "bert"), ("pair", "t5")):
        tiny_models.model(family).save_pretrained(tmp_path / "models" / name)
        tokenizer.save_pretrained(tmp_path / "models" / name)
    (tmp_path / "models" / "broken").mkdir()
    monkeypatch.setenv("ATTENTION_MODELS_DIR", str(tmp_path / "models"))

    def run(*arguments, code=0):
        result = invoke(["--url", server, *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.output  # the server of this process logs to standard error

    return run


@pytest.mark.slow
def test_the_command_records_shows_draws_and_stores(run, tmp_path):
    printed = run("record", "tiny", TEXT, "--taps", "weights", "--taps", "q", "--output", "cat.safetensors", "--post")
    assert "written to cat.safetensors" in printed
    assert "tiny: the cat sat on the mat" in printed
    assert "6 tokens of layers; embeddings, hidden, q, weights" in printed
    recording = Recording.load("cat.safetensors")
    assert all(f"{nats:.2f}" in printed for layer in range(2) for nats in recording.entropy(layer))
    firmest = np.argmin([recording.entropy(layer) for layer in range(2)])
    assert "L{}H{}".format(*divmod(int(firmest), 4)) in printed, "the picture is of the head with the least entropy"
    stored = printed.partition("stored as ")[2].split()[0]

    rows = run("show", "cat.safetensors", "--layer", "1", "--head", "2", "--query", "1", "--top-k", "2")
    (first, weight), (second, _) = recording.top_keys(1, 2, 1, 2)
    assert f"{first} ({weight:.3f})  {second} (" in rows
    assert "L1H3" not in rows
    assert run("show", stored, "--layer", "layers.0") == run("show", "cat.safetensors", "--layer", "0")
    assert json.loads(run("show", "cat.safetensors", "--json"))["tokens"] == {"layers": TEXT.split()}
    for ending, begins in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        assert "drawn into" in run("show", "cat.safetensors", "--layer", "0", "--picture", f"cat.{ending}")
        assert (tmp_path / f"cat.{ending}").read_bytes().startswith(begins)

    assert stored in run("recordings")
    assert stored in run("recordings", "list", "--json")
    assert "[4, 6, 6]" in run("recordings", "get", stored, "--output", "again.safetensors").replace('"shape": ', "")
    with safe_open("again.safetensors", framework="np") as again, safe_open("cat.safetensors", framework="np") as one:
        assert again.metadata() == one.metadata()
    assert f"deleted {stored}" in run("recordings", "delete", stored)
    assert "RecordingNotFound" not in run("recordings")
    assert "no recording has the id" in run("recordings", "delete", stored, code=1)
    assert f"stored as {stored}" in run("recordings", "create", "cat.safetensors")


def test_the_command_records_a_whole_model_of_the_server(server, client, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("ATTENTION_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    before = client.recordings.list().recordings
    result = invoke(["record", "tiny", TEXT, "--taps", "weights", "--taps", "q", "--url", server])
    assert result.exit_code == 0, result.output
    recording = Recording.load("recording.safetensors")
    reply = client.models.forward("tiny", TEXT, return_=["weights", "q", "hidden"], top_k=0)
    for layer in reply.layers:
        np.testing.assert_allclose(recording.weights(layer.layer), layer.weights, atol=1e-6)
        np.testing.assert_allclose(recording.read(layer.layer, "q"), layer.q, atol=1e-5)
    assert recording.facts.tokens["layers"] == reply.labels.tokens
    assert f"{len(reply.labels.tokens)} tokens of layers; embeddings, hidden, q, weights" in result.output
    assert client.recordings.list().recordings == before  # the server keeps none of it


def test_the_command_records_two_stacks_and_without_a_server(run, tmp_path):
    run("record", str(tmp_path / "models" / "pair"), TEXT, "--target", TARGET, "--local")
    recording = Recording.load("recording.safetensors")
    assert recording.facts.target == TARGET
    assert recording.facts.model == "pair"
    assert "server" not in recording.facts.versions
    shown = run("show", "recording.safetensors", "--layer", "decoder.1.cross", "--head", "0")
    assert "Katze" in shown


@pytest.mark.sampled(arguments=9, detail=9)
@pytest.mark.parametrize(
    ("arguments", "code", "detail"),
    [
        (("record", "none", TEXT), 1, "'none'"),
        (("record", "broken", TEXT), 1, "'broken'"),
        (("record", "tiny", TEXT, "--taps", "scores", "--local"), 1, "taps"),
        (("record", "tiny", TEXT, "--taps", "nothing"), 1, "taps"),
        (("record", "tiny", "", "--local"), 1, "text"),
        (("record", "tiny", TEXT, "--output", "cat.npz"), 2, ".safetensors"),
        (("record", "tiny", TEXT, "--output", "no/cat.safetensors"), 2, "no folder"),
        (("show", "none.safetensors"), 2, "there is no file"),
        (("show", "0" * 32), 1, "no recording has the id"),
        (("show", "noise.safetensors"), 1, "not a readable safetensors file"),
        (("show", "good.safetensors", "--layer", "9"), 1, "layers.9"),
        (("show", "good.safetensors", "--layer", "0", "--head", "4"), 1, "heads 0 to 3"),
        (("show", "good.safetensors", "--query", "6"), 1, "0 to 5"),
        (("show", "good.safetensors", "--picture", "cat.gif"), 2, ".svg or .png"),
    ],
)
def test_what_cannot_be_done_is_refused(run, tokenizer, tmp_path, arguments, code, detail):
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 64)
    record(tiny_models.model("bert"), tokenizer, TEXT).save("good.safetensors")
    assert detail in " ".join(run(*arguments, code=code).replace("│", " ").split())
    assert not (tmp_path / "recording.safetensors").exists()
