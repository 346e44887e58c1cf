"""Lenses over real HTTP: of the model that ships, in JSON and by the typed client."""

import json

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load
from tests.client.cli.command_line import invoke
from tests.client.transformers.families import tiny
from tests.conftest import live_server

from attention_client import Client, InvalidRequest, LensNotFound
from attention_client.torch.published_lenses import read_published_lens, write_published_lens
from attention_contract.wire import SAFETENSORS

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
TEXT = "Kate met Tamiro in the park. Then Tam"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server with the model that ships, and one without a head."""
    root = tmp_path_factory.mktemp("models")
    tiny("bert").save_pretrained(root / "bert")
    with live_server(root) as address:
        yield address


@pytest.fixture(scope="module")
def models(url):
    with Client(url, timeout=120) as client:
        yield client.models


def test_the_last_layer_reads_as_the_models_prediction(models):
    reply, forward = models.lens("tiny", TEXT, top_k=2), models.forward("tiny", TEXT, top_k=2)
    last = reply.layers[-1].hidden.top
    assert [layer.layer for layer in reply.layers] == [0, 1, 2, 3]
    assert reply.positions == [*range(14)]
    for at, token in enumerate(forward.predictions[0].top):
        assert reply.name(last.ids[-1, at]) == token.token
        assert last.logits[-1, at] == pytest.approx(token.logit, abs=1e-4)
        assert last.probabilities[-1, at] == pytest.approx(token.probability, abs=1e-4)


def test_the_heads_and_the_rest_sum_to_the_logit(models):
    reply = models.lens("tiny", TEXT, of=["heads"], targets=["ir", "o"], positions=[-1], top_k=0)
    rest = reply.rest
    heads = sum(layer.heads.targets.sum(0) for layer in reply.layers)
    total = rest.embeddings + rest.mlps.sum(0) + rest.biases.sum(0) + rest.others + rest.unembedding + heads
    np.testing.assert_allclose(total, reply.logits, atol=1e-4)
    logits = models.forward("tiny", TEXT, return_=["logits"]).logits[0]
    np.testing.assert_allclose(reply.logits[0], logits[reply.targets], atol=1e-4)


def test_json_has_lists_and_only_what_was_requested(url):
    body = {"text": TEXT, "of": ["hidden"], "layers": [2], "positions": [-1], "top_k": 1}
    reply = httpx.post(f"{url}/v1/models/tiny/lens", json=body).json()
    (layer,) = reply["layers"]
    assert layer.keys() == {"layer", "hidden"}
    ((best,),) = layer["hidden"]["top"]["ids"]
    assert reply["names"].keys() == {str(best)}
    assert {"rest", "lens", "logits"}.isdisjoint(reply)


def test_a_lens_is_priced_before_it_runs(models):
    reply = models.complexity("tiny", 64, lens=["hidden", "heads"])
    assert reply.lens.flops > reply.prefill.flops
    assert reply.lens.peak_bytes > reply.prefill.peak_bytes
    assert models.lens("tiny", TEXT, of=["hidden", "heads"]).ran.peak_bytes > 0
    fit = models.complexity("tiny", 64, batch=10, fit=True).fit
    assert fit.flops > 10 * 3 * 64 * models.complexity("tiny", 64).prefill.flops * 0.5
    assert fit.predicted_ms > 0
    assert models.complexity("tiny", 64, batch=20, fit=True).fit.flops == 2 * fit.flops


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("bert", {"tokens": [5, 3]}, "kind"),
        ("tiny", {"text": TEXT, "kind": "jacobian"}, "lens"),
        ("tiny", {"text": TEXT, "top_k": 0}, "top_k"),
        ("tiny", {"text": TEXT, "targets": ["two words here"]}, "targets.0"),
        ("tiny", {"text": TEXT, "positions": [99]}, "positions.0"),
        ("tiny", {"text": TEXT, "of": ["mlps"]}, "of.0"),
        ("tiny", {"text": TEXT, "layers": [4]}, "layers.0"),
    ],
)
def test_refusals_name_the_field(url, models, model, fields, param):
    found = httpx.post(f"{url}/v1/models/{model}/lens", json=fields, timeout=120)
    assert (found.status_code, found.json()["param"]) == (422, param)
    if fields.get("top_k") is None and "kind" not in fields and "of" not in fields:
        with pytest.raises(InvalidRequest) as caught:
            models.lens(model, **fields)
        assert caught.value.param == param


TEXTS = ["Kate met Tamiro in the park. Then Tamiro went home.", "The cat sat on the mat. The dog sat on the rug."]


def test_a_lens_is_fitted_listed_used_and_deleted(models, url):
    info = models.fit_lens("tiny", TEXTS, skip_first=4)
    assert (info.state, info.progress, info.texts, info.layers) == ("ready", 1.0, 2, [0, 1, 2])
    assert [each.id for each in models.lenses("tiny").lenses] == [info.id]
    assert models.fit_lens("tiny", TEXTS, skip_first=4) == info
    fields = {"kind": "jacobian", "lens": info.id, "targets": ["ir"], "positions": [-1]}
    reply = models.lens("tiny", TEXT, of=["hidden", "heads"], **fields)
    plain = models.lens("tiny", TEXT, targets=["ir"], positions=[-1])
    assert (reply.kind, reply.lens) == ("jacobian", info.id)
    np.testing.assert_allclose(reply.layers[3].hidden.targets, plain.layers[3].hidden.targets, atol=1e-4)
    assert abs(reply.layers[0].hidden.targets - plain.layers[0].hidden.targets).max() > 0.01
    models.delete_lens(info.id)
    assert models.lenses("tiny").lenses == []
    gone = httpx.post(f"{url}/v1/models/tiny/lens", json={"text": TEXT, "kind": "jacobian", "lens": info.id})
    assert (gone.status_code, gone.json()["code"]) == (404, "lens_not_found")


def test_a_given_lens_of_the_identity_is_the_logit_lens(models):
    info = models.fit_lens("tiny", jacobians={str(each): np.eye(64, dtype=np.float32) for each in range(3)})
    reply = models.lens("tiny", TEXT, kind="jacobian", lens=info.id, targets=["ir"])
    for layer, other in zip(reply.layers, models.lens("tiny", TEXT, targets=["ir"]).layers, strict=True):
        np.testing.assert_allclose(layer.hidden.targets, other.hidden.targets, atol=1e-4)
    models.delete_lens(info.id)


def test_a_fit_tells_its_progress_and_stops(models):
    begun = models.fit_lens("tiny", TEXTS * 40, skip_first=4, wait_s=0)
    assert (begun.state, begun.bytes) == ("fitting", 0)
    assert begun.id in [each.id for each in models.lenses("tiny").lenses]
    models.delete_lens(begun.id)
    assert models.lenses("tiny").lenses == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "texts"),
        ({"texts": ["Kate"], "skip_first": 2}, "texts.0"),
        ({"texts": ["Kate"], "skip_first": 9, "max_tokens": 9}, "max_tokens"),
        ({"jacobians": {"0": [[1.0, 0.0]]}}, "jacobians.0"),
    ],
)
def test_refused_fits_name_the_field(url, fields, param):
    found = httpx.post(f"{url}/v1/models/tiny/lenses", json=fields, timeout=120)
    assert (found.status_code, found.json()["param"]) == (422, param)


# ── files of lenses ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def given():
    random = np.random.default_rng(0)
    return {str(layer): random.normal(size=(64, 64)).astype(np.float32) for layer in range(3)}


def test_a_lens_comes_back_as_its_file_with_the_matrices(url, models, given, tmp_path):
    info = models.fit_lens("tiny", jacobians=given)
    lens = models.lens_matrices(info.id)
    assert (lens.model, lens.width, lens.layers) == ("tiny", 64, [0, 1, 2])
    for layer, matrix in given.items():
        np.testing.assert_array_equal(lens.jacobians[layer], matrix)
    assert models.fitted_lens(info.id) == info
    answer = httpx.get(f"{url}/v1/lenses/{info.id}", headers={"Accept": SAFETENSORS})
    assert load(answer.content).keys() == {f"jacobians.{layer}" for layer in range(3)}
    file = tmp_path / "lens.safetensors"
    for arguments in (["lens-matrices", info.id, "-o", str(file)], ["fit-lens", "tiny", "--jacobians", str(file)]):
        result = invoke(["--url", url, "models", *arguments])
        assert result.exit_code == 0, result.output
    assert info.id in result.output, "the same matrices are the same lens"
    with pytest.raises(LensNotFound):
        models.lens_matrices("0" * 32)


def test_a_published_lens_is_read_and_written_without_code_of_its_own(url, models, given, tmp_path):
    published, refused, mine = (tmp_path / name for name in ("net_jacobian_lens.pt", "code.pt", "mine.pt"))
    halves = {int(layer): torch.from_numpy(matrix).half() for layer, matrix in given.items()}
    torch.save({"J": halves, "source_layers": [0, 1, 2], "n_prompts": 1000, "d_model": 64}, published)
    result = invoke(["--url", url, "models", "fit-lens", "tiny", "--jacobians", str(published), "--json"])
    assert result.exit_code == 0, result.output
    lens = models.lens_matrices(json.loads(result.stdout)["id"])
    for layer, matrix in halves.items():
        np.testing.assert_array_equal(lens.jacobians[str(layer)], matrix.float().numpy())
    write_published_lens(mine, lens)
    content = torch.load(mine, weights_only=True)
    assert content.keys() == {"J", "source_layers", "n_prompts", "d_model"}
    assert (content["d_model"], content["source_layers"]) == (64, [0, 1, 2])
    assert all(torch.equal(content["J"][layer], matrix) for layer, matrix in halves.items())
    torch.save({"J": print}, refused)
    for file in (refused, tmp_path / "none.pt"):
        assert invoke(["--url", url, "models", "fit-lens", "tiny", "--jacobians", str(file)]).exit_code != 0
    with pytest.raises(InvalidRequest, match="no file of tensors alone"):
        read_published_lens(refused)
