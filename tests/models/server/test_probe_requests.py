"""Probes over real HTTP: fitted to the model that ships, stored, listed, and gone when they are deleted."""

import httpx
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tests.conftest import live_server

from attention_client import Client, ProbeNotFound
from attention_contract.errors import AttentionError

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
PLACES = "park", "house", "garden", "street", "school"
TEXTS = [f"{name} was in the {place}." for place in PLACES for name in ("Kate", "Tom")]
LABELS = [0, 1] * len(PLACES)
HIDDEN = {"point": "hidden", "layer": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def url(root):
    with live_server(root) as address:
        yield address


@pytest.fixture(scope="module")
def models(url):
    with Client(url, timeout=120) as client:
        yield client.models


def test_the_first_word_is_told_at_every_layer_and_the_probe_is_stored(models, root):
    info = models.fit_probe("tiny", {"point": "hidden", "layer": "all"}, TEXTS, LABELS, positions=[1] * 10)
    assert [layer.layer for layer in info.layers] == [0, 1, 2, 3]
    assert all(layer.auc == 1 and layer.auc_low < 0.8 and layer.auc_high == 1 for layer in info.layers)
    assert (info.state, info.samples, info.positives, info.width, info.layer) == ("ready", 10, 5, 64, 0)
    states = np.stack([models.forward("tiny", text, return_=["hidden"]).layers[2].hidden[1] for text in TEXTS])
    weights = models.probe(info.id).weights["2"]
    scores = states @ weights + info.layers[2].bias
    assert ((scores > 0) == LABELS).all()
    assert [each.id for each in models.probes("tiny").probes] == [info.id]
    assert (root / "probes" / f"{info.id}.safetensors").stat().st_size == info.bytes
    assert models.fit_probe("tiny", {"point": "hidden", "layer": "all"}, TEXTS, LABELS, positions=[1] * 10) == info
    models.delete_probe(info.id)
    assert models.probes("tiny").probes == []
    for gone in (models.probe, models.delete_probe):
        with pytest.raises(ProbeNotFound):
            gone(info.id)


def test_labels_of_tokens_and_of_texts_are_the_same_where_they_say_the_same(models):
    count = [len(models.forward("tiny", text).labels.tokens) for text in TEXTS]
    by_token = [[label] * tokens for label, tokens in zip(LABELS, count, strict=True)]
    one = models.fit_probe("tiny", HIDDEN, TEXTS, LABELS, positions="all", method="ridge")
    other = models.fit_probe("tiny", HIDDEN, TEXTS, by_token, positions="all", method="ridge")
    assert one.samples == other.samples == sum(count)
    assert one.layers == other.layers
    named = [[*range(tokens)] for tokens in count]
    assert models.fit_probe("tiny", HIDDEN, TEXTS, LABELS, positions=named, method="ridge").layers == one.layers


def test_statistics_of_heads_are_features_too(models):
    info = models.fit_probe("tiny", {"statistics": ["entropy", "first_key"], "heads": [0, 3]}, TEXTS, LABELS)
    assert (info.width, info.layer, info.layers[0].layer) == (4 * 2 * 2, None, None)
    assert models.probe(info.id).weights.keys() == {"statistics"}
    assert 0 <= info.layers[0].auc_low <= info.layers[0].auc <= info.layers[0].auc_high <= 1


def test_a_probe_of_a_steering_vector_scores_along_it(models, url):
    with Client(url, timeout=120) as client:
        rng = np.random.default_rng(0)
        directions = {"1": 5 * rng.normal(size=64), "3": rng.normal(size=64)}
        vector = client.vectors.fit("tiny", directions=directions).id
        info = models.fit_probe("tiny", {"vector": vector}, TEXTS, LABELS, positions=[1] * 10)
        assert ([layer.layer for layer in info.layers], info.width) == ([1, 3], 64)
        for layer, v in directions.items():
            w, unit = models.probe(info.id).weights[layer], v / np.linalg.norm(v)
            np.testing.assert_allclose(w, (w @ unit) * unit, rtol=1e-5, atol=1e-9)
            states = np.stack(
                [models.forward("tiny", text, return_=["hidden"]).layers[int(layer)].hidden[1] for text in TEXTS]
            )
            scaled = StandardScaler().fit_transform(states @ unit[:, None])
            expected = LogisticRegression(C=1.0).fit(scaled, LABELS).decision_function(scaled)
            bias = next(entry.bias for entry in info.layers if str(entry.layer) == layer)
            np.testing.assert_allclose(states @ w + bias, expected, atol=1e-3)
        given = models.fit_probe("tiny", {"vector": vector, "layer": 3}, weights=[2.0], bias=0.5)
        watched = models.forward("tiny", TEXTS[0], return_=["hidden"], watch=[{"probe": given.id}])
        unit = directions["3"] / np.linalg.norm(directions["3"])
        expected = 2 * np.asarray(watched.layers[3].hidden) @ unit + 0.5
        np.testing.assert_allclose(np.ravel(watched.watched[0].scores), expected, atol=1e-4)
        for of, param in (
            ({"vector": "0" * 32}, "of.vector"), ({"vector": vector, "layer": 2}, "of.layer"),
        ):  # fmt: skip
            with pytest.raises(AttentionError) as refused:
                models.fit_probe("tiny", of, TEXTS, LABELS)
            assert refused.value.param == param
        client.vectors.delete(vector)


def test_given_weights_are_divided_by_their_scale(models):
    weights, scale = np.arange(64.0), np.full(64, 4.0)
    info = models.fit_probe("tiny", HIDDEN, weights=weights, bias=-2.5, scale=scale)
    assert (info.layers[0].bias, info.layers[0].auc, info.method) == (-2.5, None, None)
    np.testing.assert_array_equal(models.probe(info.id).weights["1"], weights / 4)


def test_a_fit_tells_its_progress_and_stops(models):
    begun = models.fit_probe("tiny", HIDDEN, TEXTS * 60, LABELS * 60, wait_s=0)
    assert (begun.state, begun.bytes) == ("fitting", 0)
    assert begun.id in [each.id for each in models.probes("tiny").probes]
    models.delete_probe(begun.id)
    assert begun.id not in [each.id for each in models.probes("tiny").probes]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"of": HIDDEN}, "texts"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": [1] * 10}, "labels"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": LABELS[:-1]}, "labels"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": [0, 1, 2, *LABELS[3:]]}, "labels.2"),
        ({"of": HIDDEN, "texts": TEXTS[:4], "labels": LABELS[:4]}, "labels"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": [[0], [1]] * 5}, "labels"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": [[0], [1]] * 5, "positions": "all"}, "labels.0"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": LABELS, "positions": [0] * 9}, "positions"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": LABELS, "positions": [0, 99] + [0] * 8}, "positions.1"),
        ({"of": {"point": "hidden", "layer": 4}, "texts": TEXTS, "labels": LABELS}, "of.layer"),
        ({"of": {"point": "mood", "layer": 1}, "texts": TEXTS, "labels": LABELS}, "of.point"),
        ({"of": HIDDEN, "texts": [*TEXTS[:-1], ""], "labels": LABELS}, "texts.9"),
        ({"of": HIDDEN, "texts": TEXTS, "labels": LABELS, "bias": 1}, "bias"),
        ({"of": HIDDEN, "weights": [1.0, 2.0]}, "weights"),
        ({"of": HIDDEN, "weights": [1.0] * 63 + ["NaN"]}, "weights"),
        ({"of": HIDDEN, "weights": [1.0] * 64, "scale": [0.0] * 64}, "scale"),
        ({"of": HIDDEN, "weights": [1.0] * 64, "labels": LABELS}, "labels"),
        ({"of": HIDDEN | {"layer": "all"}, "weights": [1.0] * 64}, "of.layer"),
    ],
)
def test_refused_fits_name_the_field(url, fields, param):
    refused = httpx.post(f"{url}/v1/models/tiny/probes", json=fields, timeout=120)
    assert (refused.status_code, refused.json()["param"]) == (422, param), refused.json()["detail"]


# ── watched requests ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def direction(models):
    """A probe of the states after a layer, with its weights."""
    drawn = np.random.default_rng(2).normal(size=64)
    weights = drawn / np.linalg.norm(drawn)
    return models.fit_probe("tiny", HIDDEN, weights=weights, bias=0.5).id, weights


def test_requests_for_a_pass_and_for_weights_score_every_token(models, direction):
    probe, weights = direction
    for text, rank in ((TEXTS[0], 1), (TEXTS[:2], 2)):
        reply = models.forward("tiny", text, return_=["hidden"], watch=[{"probe": probe}])
        (watched,) = reply.watched
        assert (watched.probe, watched.scores.ndim) == (probe, rank)
        np.testing.assert_allclose(watched.scores, reply.layers[1].hidden @ weights + 0.5, atol=1e-5)
        (beside,) = models.weights("tiny", text, layers=[3], watch=[{"probe": probe}]).watched
        assert (beside.probe, beside.scores.ndim) == (probe, rank)
        np.testing.assert_allclose(beside.scores, watched.scores, atol=1e-5)
    alone = models.forward("tiny", TEXTS[0], watch=[{"probe": probe}])
    assert alone.layers == []
    np.testing.assert_allclose(alone.watched[0].scores, watched.scores[0], atol=1e-5)


DOORS = {
    "completion": ("/v1/completions", {"prompt": TEXTS[0], "max_tokens": 10}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Where is Leo?"}], "max_tokens": 10}),
    "response": ("/v1/responses", {"input": "Where is Leo?", "max_output_tokens": 10}),
}


def asked(url, door, watch, **fields):
    """The part of a reply that has the generated tokens."""
    path, own = DOORS[door]
    body = {"model": "tiny", "temperature": 0, "attention": {"watch": [watch]}} | own | fields
    reply = httpx.post(url + path, json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    if fields.get("stream"):
        return reply.text
    return reply.json()["output"][0]["content"][0] if door == "response" else reply.json()["choices"][0]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_stops_where_a_loop_over_the_scores_says(url, models, direction, door):
    probe = direction[0]
    whole = asked(url, door, {"probe": probe, "prompt": True})
    ids = [token["id"] for token in whole["attention"]]
    scores = [token["scores"][probe] for token in whole["attention"]]
    prompt = whole["prompt_scores"][probe]
    assert len(prompt) == whole["attention"][0]["position"]
    assert prompt[-1] == pytest.approx(scores[0], abs=1e-9)
    above = (max(scores[1:]) + sorted(scores[1:])[-2]) / 2
    end = next(at for at, score in enumerate(scores) if at >= 1 and score > above)
    stop = {"probe": probe, "stop": {"above": above, "after": 1}}
    part = asked(url, door, stop)
    assert [token["id"] for token in part["attention"]] == ids[: end + 1]
    assert part["stop_reason"] == {"probe": probe, "score": pytest.approx(scores[end], abs=1e-4), "token": end}
    assert "prompt_scores" not in part
    if door != "response":
        assert part["finish_reason"] == "stop"
    assert f'"stop_reason":{{"probe":"{probe}"' in asked(url, door, stop, stream=True)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("forward", {"watch": [{"probe": "f" * 32}]}, 404, "watch.0.probe"),
        ("weights", {"watch": [{"probe": "f" * 32}]}, 404, "watch.0.probe"),
        ("forward", {"watch": [{"probe": "own", "stop": {"above": 1}}]}, 422, "watch.0.stop"),
        ("weights", {"watch": [{"probe": "own", "stop": {"above": 1}}]}, 422, "watch.0.stop"),
        ("forward", {"watch": [{"probe": "own", "prompt": True}]}, 422, "watch.0.prompt"),
        ("forward", {"watch": [{"probe": "own"}, {"probe": "own"}]}, 422, "watch.1.probe"),
        ("weights", {"watch": [{"probe": "own"}, {"probe": "own"}]}, 422, "watch.1.probe"),
        ("forward", {"watch": [{"probe": "statistics"}]}, 422, "watch.0.probe"),
        ("forward", {"watch": [{"probe": "query"}]}, 422, "watch.0.probe"),
        ("complete", {"probe": "own", "stop": {"above": 1, "after": -1}}, 422, "attention.watch.0.stop.after"),
        ("complete", {"probe": "own", "stop": {"above": "Infinity"}}, 422, "attention.watch.0.stop.above"),
        ("complete", {"probe": "own", "stop": {}}, 422, "attention.watch.0.stop.above"),
        ("complete", {"probe": "f" * 32}, 404, "attention.watch.0.probe"),
        ("complete", {"probe": "other"}, 422, "attention.watch.0.probe"),
    ],
)
def test_refused_watches_name_the_field(url, models, direction, path, fields, status, param):
    of = {"statistics": {"statistics": ["entropy"]}, "query": {"point": "q", "layer": 0}}
    ids = {"own": direction[0]}

    def known(watch):
        name = watch["probe"]
        if name in of:
            width = 16 if name == "statistics" else 64
            ids[name] = models.fit_probe("tiny", of[name], weights=np.ones(width)).id
        if name == "other":
            models.load("tiny", name="copy")
            ids[name] = models.fit_probe("copy", HIDDEN, weights=np.ones(64)).id
        return watch | {"probe": ids.get(name, name)}

    if path != "complete":
        body, path = {"text": "Kate"} | {"watch": [*map(known, fields["watch"])]}, f"/v1/models/tiny/{path}"
    else:
        body, path = {"model": "tiny", "prompt": "Kate", "attention": {"watch": [known(fields)]}}, "/v1/completions"
    refused = httpx.post(url + path, json=body, timeout=120).json()
    fault = refused.get("error", refused)
    assert (refused.get("status", status), fault["param"]) == (status, param), refused


def test_a_probe_of_statistics_scores_what_a_generation_tells_of_its_heads(url, models):
    weights = np.random.default_rng(5).normal(size=16)
    probe = models.fit_probe("tiny", {"statistics": ["entropy"]}, weights=weights, bias=0.25).id
    wanted = {"watch": [{"probe": probe}], "statistics": ["entropy"]}
    choice = models.generate("tiny", TEXTS[0], max_tokens=5, temperature=0, attention=wanted).choices[0]
    for token in choice.attention:
        told = np.concatenate([layer.statistics.entropy for layer in token.layers])
        assert token.scores[probe] == pytest.approx(told @ weights + 0.25, abs=1e-5)
    body = {"model": "tiny", "prompt": "Kate", "attention": {"watch": [{"probe": probe, "prompt": True}]}}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "attention.watch.0.prompt")  # as OpenAI
