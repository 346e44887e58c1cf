"""Steering vectors over real HTTP: fitted to the model that ships, given, read from files, exported and removed."""

import json
from base64 import b64encode
from tempfile import TemporaryDirectory

import gguf
import httpx
import numpy as np
import pytest
from safetensors.numpy import load
from sklearn.decomposition import PCA
from tests.conftest import live_server

from attention_client import Client, InvalidRequest, VectorNotFound
from attention_service.models.fit_memory import vector_bytes
from attention_service.runtime.scheduling.reservation import Reservation

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
POSITIVE = ["Kate was in the park.", "Kate was in the old house.", "Kate went to school."]
NEGATIVE = ["Tom was in the park.", "Tom was in the old house.", "Tom went to school."]
WIDTH, LAYERS = 64, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def url(root):
    with live_server(root) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with Client(url, timeout=120) as made:
        yield made


def states(client, text, **fields):
    """The states ``[layers, L, d]`` behind every layer."""
    return np.stack(
        [layer.hidden for layer in client.models.forward("tiny", text, return_=["hidden"], **fields).layers]
    )


@pytest.mark.parametrize("position", ["last", "mean"])
def test_the_difference_of_means_is_that_of_the_states(client, position):
    at = slice(-1, None) if position == "last" else slice(None)
    info = client.vectors.fit("tiny", POSITIVE, NEGATIVE[:2], position=position)
    sides = [np.mean([states(client, text)[:, at].mean(1) for text in side], 0) for side in (POSITIVE, NEGATIVE[:2])]
    got = client.vectors.get(info.id)
    for layer in range(LAYERS):
        np.testing.assert_allclose(got.directions[str(layer)], sides[0][layer] - sides[1][layer], atol=1e-6)
    assert [layer.layer for layer in info.layers] == [0, 1, 2, 3]
    norms = [layer.norm for layer in info.layers]
    np.testing.assert_allclose(norms, np.linalg.norm(sides[0] - sides[1], axis=-1), rtol=1e-6)
    assert (info.positive, info.negative, info.width, info.method) == (3, 2, WIDTH, "mean_difference")
    assert (info.checkpoint, info.source, info.state) == ("tiny", "texts", "ready")


def test_of_answers_the_states_are_those_of_their_tokens(client):
    sides = [[{"text": "Where is Leo? Leo is in the", "answer": answer}] for answer in (" park", " house")]
    info = client.vectors.fit("tiny", *sides, position="answer", layers=[2])
    means = []
    for ((pair,),) in zip(sides, strict=True):
        reply = client.models.forward("tiny", pair["text"], answer=pair["answer"], return_=["hidden"], layers=[2])
        means.append(reply.layers[0].hidden[[token.position for token in reply.answer]].mean(0))
    np.testing.assert_allclose(client.vectors.get(info.id).directions["2"], means[0] - means[1], atol=1e-6)


def test_the_component_of_pairs_is_that_of_repengs_definition(client):
    """repeng's ``pca_diff``: scikit-learn's first component of the differences, with the sign of most pairs."""
    info = client.vectors.fit("tiny", POSITIVE, NEGATIVE, method="pca", layers=[1, 3])
    got = client.vectors.get(info.id).directions
    for layer in (1, 3):
        ahead, behind = (np.stack([states(client, text)[layer, -1] for text in side]) for side in (POSITIVE, NEGATIVE))
        expected = PCA(n_components=1, whiten=False).fit(ahead - behind).components_[0]
        if np.mean(ahead @ expected < behind @ expected) > np.mean(ahead @ expected > behind @ expected):
            expected = -expected
        np.testing.assert_allclose(got[str(layer)], expected, atol=1e-4)
        assert np.linalg.norm(got[str(layer)]) == pytest.approx(1, abs=1e-6)


def test_a_vector_is_stored_listed_shared_and_gone(client, root):
    info = client.vectors.fit("tiny", POSITIVE, NEGATIVE, layers=[2])
    assert client.vectors.fit("tiny", POSITIVE, NEGATIVE, layers=[2]) == info
    assert info.id in [each.id for each in client.vectors.list("tiny").vectors]
    assert (root / "vectors" / f"{info.id}.safetensors").stat().st_size == info.bytes
    client.vectors.delete(info.id)
    assert info.id not in [each.id for each in client.vectors.list("tiny").vectors]
    for gone in (client.vectors.get, client.vectors.delete, client.vectors.export):
        with pytest.raises(VectorNotFound):
            gone(info.id)


def test_a_fit_tells_its_progress_and_stops(client):
    begun = client.vectors.fit("tiny", POSITIVE * 60, NEGATIVE * 60, wait_s=0)
    assert (begun.state, begun.bytes) == ("fitting", 0)
    client.vectors.delete(begun.id)
    assert begun.id not in [each.id for each in client.vectors.list("tiny").vectors]


# ── prices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def taken(monkeypatch):
    """The bytes that the server takes of its budget, question by question and for fits."""
    found, take, take_now = [], Reservation.take, Reservation.take_now

    async def waited(self, need):
        found.append(need)
        await take(self, need)

    def at_once(self, need):
        found.append(need)
        return take_now(self, need)

    monkeypatch.setattr(Reservation, "take", waited)
    monkeypatch.setattr(Reservation, "take_now", at_once)
    return found


@pytest.mark.parametrize("fields", [{}, {"method": "pca", "layers": [1, 3]}])
def test_a_fit_takes_the_memory_that_was_told(client, taken, fields):
    sides = [[f"{text} {fields}" for text in side] for side in (POSITIVE, NEGATIVE)]
    length = max(client.models.tokenize("tiny", text).count for side in sides for text in side)
    price = client.models.complexity("tiny", length, batch=6, vector=fields).vector
    taken.clear()
    client.vectors.fit("tiny", *sides, **fields)
    held = vector_bytes(3 if fields else 0, 2 if fields else LAYERS, WIDTH)
    assert held in taken
    assert price.peak_bytes - held in taken
    assert price.flops == client.models.complexity("tiny", length, batch=6).prefill.flops


def test_the_price_of_a_probe_along_a_vector_names_what_is_missing(client):
    info = client.vectors.fit("tiny", POSITIVE, NEGATIVE, layers=[1])
    of = {"vector": info.id, "layer": "all"}
    assert client.models.complexity("tiny", 8, batch=4, probe={"of": of}).probe.flops > 0
    for changed, param in (({"vector": "0" * 32}, "probe.of.vector"), ({"layer": 2}, "probe.of.layer")):
        with pytest.raises((VectorNotFound, InvalidRequest)) as fault:
            client.models.complexity("tiny", 8, probe={"of": of | changed})
        assert fault.value.param == param


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def given(client, layers=range(LAYERS), seed=5):
    drawn = np.random.default_rng(seed).normal(size=(LAYERS, WIDTH)).astype(np.float32)
    return client.vectors.fit("tiny", directions={str(layer): drawn[layer] for layer in layers}), drawn


def repengs_reading(path):
    """Directions by layer as ``ControlVector.import_gguf`` of repeng 0.4 reads them, and the kind of model."""
    reader = gguf.GGUFReader(path)
    architecture = reader.get_field("general.architecture")
    assert str(bytes(architecture.parts[-1]), "utf-8") == "controlvector"
    hint = str(bytes(reader.get_field("controlvector.model_hint").parts[-1]), "utf-8")
    named = [tensor for tensor in reader.tensors if tensor.name.startswith("direction.")]
    return {int(tensor.name.split(".")[1]): np.array(tensor.data) for tensor in named}, hint


def llamas_reading(path):
    """The numbers ``[layers − 1, d]`` as ``common_control_vector_load_one`` of llama.cpp lays them out."""
    rows = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name, _, layer = tensor.name.partition(".")
        assert name == "direction"
        assert int(layer) > 0
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert len(tensor.shape) == 1
        rows[int(layer) - 1] = np.array(tensor.data)
    return np.stack([rows[number] for number in range(len(rows))])


def test_an_exported_file_is_read_by_others_and_back(client, tmp_path):
    info, drawn = given(client)
    path = tmp_path / "vector.gguf"
    path.write_bytes(client.vectors.export(info.id))
    directions, hint = repengs_reading(path)
    assert (sorted(directions), hint) == ([1, 2, 3], info.model_type)
    np.testing.assert_array_equal([directions[layer] for layer in (1, 2, 3)], drawn[1:])
    np.testing.assert_array_equal(llamas_reading(path), drawn[1:])
    count = gguf.GGUFReader(path).get_field("controlvector.layer_count")
    assert int(count.parts[-1][0]) == 3
    again = client.vectors.fit("tiny", gguf=path)
    assert (again.source, [layer.layer for layer in again.layers]) == ("gguf", [1, 2, 3])
    for layer, x in client.vectors.get(again.id).directions.items():
        np.testing.assert_array_equal(x, drawn[int(layer)])


def test_the_reply_as_safetensors_is_a_file_of_its_directions(client, url):
    info, drawn = given(client)
    reply = httpx.get(f"{url}/v1/vectors/{info.id}", headers={"Accept": "application/vnd.safetensors"})
    tensors = load(reply.content)
    assert sorted(tensors) == [f"directions.{layer}" for layer in range(LAYERS)]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(tensors[f"directions.{layer}"], drawn[layer])


def test_a_vector_of_the_first_layer_alone_has_no_file(client, url):
    info, _ = given(client, layers=[0])
    refused = httpx.get(f"{url}/v1/vectors/{info.id}", headers={"Accept": "application/vnd.gguf"})
    assert (refused.status_code, refused.json()["param"]) == (422, "Accept")


def file(architecture="controlvector", name="direction.1", numbers=None):
    """A GGUF file of one tensor."""

    with TemporaryDirectory() as folder:
        path = f"{folder}/made.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_tensor(name, np.ones(WIDTH, np.float32) if numbers is None else numbers)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        with open(path, "rb") as made:
            return made.read()


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────

ONES, PAIR = [1.0] * WIDTH, [{"text": "a", "answer": "b"}]


def as_file(data):
    return {"gguf": {"base64": b64encode(data).decode()}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "positive"),
        ({"positive": POSITIVE}, "negative"),
        ({"negative": NEGATIVE}, "positive"),
        ({"positive": [], "negative": NEGATIVE}, "positive"),
        ({"positive": POSITIVE, "negative": []}, "negative"),
        ({"positive": POSITIVE, "negative": ["ok", ""]}, "negative.1"),
        ({"positive": POSITIVE, "negative": POSITIVE}, "negative"),
        ({"positive": POSITIVE, "negative": NEGATIVE[:2], "method": "pca"}, "negative"),
        ({"positive": POSITIVE[:1], "negative": NEGATIVE[:1], "method": "pca"}, "positive"),
        ({"positive": POSITIVE, "negative": NEGATIVE, "method": "mood"}, "method"),
        ({"positive": POSITIVE, "negative": NEGATIVE, "position": "answer"}, "positive.0"),
        ({"positive": PAIR, "negative": PAIR}, "positive.0"),
        ({"positive": POSITIVE, "negative": NEGATIVE, "layers": [4]}, "layers.0"),
        ({"positive": POSITIVE, "negative": NEGATIVE, "directions": {"1": ONES}}, "directions"),
        ({"directions": {}}, "directions"),
        ({"directions": {"1": [*ONES[1:], "NaN"]}}, "directions.1"),
        ({"directions": {"1": [*ONES[1:], "Infinity"]}}, "directions.1"),
        ({"directions": {"1": [*ONES[1:], 1e39]}}, "directions.1"),
        ({"directions": {"1": ONES[1:]}}, "directions.1"),
        ({"directions": {"1": [ONES]}}, "directions.1"),
        ({"directions": {"4": ONES}}, "directions.4"),
        ({"directions": {"1": ONES}, "method": "pca"}, "method"),
        ({"gguf": {"base64": "no base64"}}, "gguf.base64"),
        (as_file(b"no file"), "gguf"),
        (as_file(file(architecture="llama")), "gguf"),
        (as_file(file(name="other.1")), "gguf"),
        (as_file(file(name="direction.7")), "gguf"),
        (as_file(file(numbers=np.ones((2, 32), np.float32))), "gguf"),
        (as_file(file(numbers=np.ones(63, np.float32))), "gguf"),
        (as_file(file(numbers=np.full(WIDTH, np.nan, np.float32))), "gguf"),
        (as_file(file()[:-40]), "gguf"),
    ],
)
def test_refused_vectors_name_the_field(url, fields, param):
    refused = httpx.post(f"{url}/v1/models/tiny/vectors", json=fields, timeout=120)
    assert (refused.status_code, refused.json()["param"]) == (422, param), refused.json()["detail"]


# ── requests that add vectors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def vector(client):
    return given(client, layers=[1, 2])


def test_an_edit_adds_the_direction_of_its_layer(client, vector):
    info, drawn = vector
    for layer, scale in ((1, 1.0), (2, -3.5)):
        added = {"vector": info.id} if scale == 1 else {"vector": info.id, "scale": scale}
        plain, named = ([{"tap": "hidden", "add": x}] for x in (drawn[layer] * np.float64(scale), added))
        for ask in (
            lambda edits: (
                client.models.forward("tiny", POSITIVE[0], edits=edits, return_=["logits"], alone=True).logits
            ),
            lambda edits: client.models.weights("tiny", POSITIVE[0], edits=edits, alone=True).layers[3].weights,
            lambda edits: client.models.gradients("tiny", POSITIVE[0], edits=edits, alone=True).tokens,
        ):
            found = ask({str(layer): named})
            np.testing.assert_array_equal(found, ask({str(layer): plain}))
            assert np.abs(found - ask({})).max() > 1e-4


def test_a_sweep_adds_to_each_layer_its_own_direction(client, vector):
    info, drawn = vector
    of, scales = {"position": -1, "token": " the"}, [0.0, 1.0, -2.0]
    sweep = {"tap": "hidden", "add": {"vector": info.id, "scale": 0.5}, "over": ["layers", "scales"], "scales": scales}
    reply = client.models.effects("tiny", POSITIVE[0], sweep=sweep, of=of)
    assert reply.swept == {"layers": [1, 2], "scales": scales}
    for at, layer in enumerate((1, 2)):
        one = sweep | {"add": drawn[layer] * 0.5, "over": ["scales"]}
        expected = client.models.effects("tiny", POSITIVE[0], sweep=one, of=of, layers=[layer]).effects.value
        np.testing.assert_allclose(reply.effects.value[at], expected, atol=1e-5)
    assert np.abs(reply.effects.value[:, 0]).max() < 1e-6
    assert client.models.complexity("tiny", 8, sweep=sweep).sweep.edits


def generated(url, **attention):
    body = {"model": "tiny", "prompt": POSITIVE[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body | {"logprobs": 0, "attention": attention}, timeout=120)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_every_spelling_steers_as_edits_do(url, vector):
    info, drawn = vector
    by_hand = {str(layer): [{"tap": "hidden", "add": (4 * drawn[layer]).tolist()}] for layer in (1, 2)}
    text, logs = generated(url, edits=by_hand)
    assert text != generated(url)[0]
    for steer in (
        [{"vector": info.id, "scale": 4}],
        [{"vector": info.id, "scale": 1.5}, {"id": info.id, "scale": 2.5, "layers": [1, 2]}],
        [{"id": info.id, "layer": 2, "scale": 4}, {"vector": info.id, "layer": 1, "scale": 4}],
    ):
        found = generated(url, steer=steer)
        assert found[0] == text
        np.testing.assert_allclose(found[1], logs, atol=1e-5)
    answers = [generated(url, **fields, **{"from": "answer"}) for fields in (
        {"steer": [{"vector": info.id, "scale": 4}]}, {"edits": by_hand},
    )]  # fmt: skip
    assert answers[0][0] == answers[1][0]
    np.testing.assert_allclose(answers[0][1], answers[1][1], atol=1e-5)


@pytest.mark.parametrize("door", ["chat", "response"])
def test_the_other_doors_steer_too(url, vector, door):
    path, body = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Where is Leo?"}], "max_tokens": 6}),
        "response": ("/v1/responses", {"input": "Where is Leo?", "max_output_tokens": 6}),
    }[door]
    texts = []
    for attention in ({}, {"steer": [{"vector": vector[0].id, "scale": 6}]}):
        body = body | {"model": "tiny", "temperature": 0, "attention": attention}
        reply = httpx.post(url + path, json=body, timeout=120).json()
        texts.append(
            reply["choices"][0]["message"]["content"] if door == "chat" else str(reply["output"][0]["content"])
        )
    assert texts[0] != texts[1]


UNKNOWN = "f" * 32


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"edits": {"1": [{"tap": "hidden", "add": {"vector": UNKNOWN}}]}}, 404, "edits.1.0.add.vector"),
        ({"edits": {"1": [{"tap": "hidden", "add": {"vector": "own"}}]}}, 422, "edits.1.0.add.vector"),
        ({"edits": {"1": [{"tap": "hidden", "add": {"vector": "V", "scale": "NaN"}}]}}, 422, "edits.1.0.add.scale"),
        ({"edits": {"0": [{"tap": "hidden", "add": {"vector": "V"}}]}}, 422, "edits.0.0.add.vector"),
        ({"edits": {"1": [{"tap": "q", "add": {"vector": "V"}}]}}, 422, "edits.1.0.add"),
        ({"edits": {"1": [{"tap": "hidden", "add": {"vector": "V", "scale": 1e39}}]}}, 422, "edits.1.0.add"),
        ({"edits": {"1": [{"tap": "hidden", "add": {"vector": "OTHER"}}]}}, 422, "edits.1.0.add.vector"),
        ({"steer": [{"vector": UNKNOWN}]}, 404, "attention.steer.0.vector"),
        ({"steer": [{"id": UNKNOWN}]}, 404, "attention.steer.0.id"),
        ({"steer": [{"vector": "OTHER"}]}, 400, "attention.steer.0.vector"),
        ({"steer": [{"scale": 4}]}, 400, "attention.steer.0.vector"),
        ({"steer": [{"vector": "V", "id": "V"}]}, 400, "attention.steer.0.vector"),
        ({"steer": [{"vector": "V", "layer": 1, "layers": [1]}]}, 400, "attention.steer.0.layer"),
        ({"steer": [{"vector": "V", "layers": [0]}]}, 400, "attention.steer.0.layers"),
        ({"steer": [{"vector": "V", "layers": []}]}, 400, "attention.steer.0.layers"),
        ({"steer": [{"vector": "V", "scale": "Infinity"}]}, 400, "attention.steer.0.scale"),
        ({"from": "answer", "steer": []}, 400, "attention.from"),
    ],
)
def test_refused_additions_name_the_field(url, client, vector, fields, status, param):
    ids = {"V": vector[0].id}
    if "OTHER" in str(fields):
        client.models.load("tiny", name="copy")
        ids["OTHER"] = client.vectors.fit("copy", directions={"1": ONES}).id
    text = json.dumps(fields)
    for name, own in ids.items():
        text = text.replace(f'"{name}"', f'"{own}"')
    fields = json.loads(text)
    if "edits" in fields:
        path, body = "/v1/models/tiny/forward", {"text": "Kate"} | fields
    else:
        path, body = "/v1/completions", {"model": "tiny", "prompt": "Kate", "attention": fields}
    refused = httpx.post(url + path, json=body, timeout=120)
    problem = refused.json()
    problem = problem.get("error", problem)
    assert (refused.status_code, problem["param"]) == (status, param), problem


def test_a_module_takes_no_vector(url):
    body = {"query": [[[1.0]]], "key": [[[1.0]]], "value": [[[1.0]]]}
    edits = [{"tap": "output", "add": {"vector": UNKNOWN}}]
    refused = httpx.post(f"{url}/v1/attention/forward", json=body | {"edits": edits})
    assert (refused.status_code, refused.json()["param"]) == (422, "edits.0.add")
