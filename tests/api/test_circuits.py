"""Circuits over HTTP: the reply's fields, composition of two modules, costs, and what is refused."""

import numpy as np
import pytest

from attention_client import InvalidRequest, ModuleNotFound, VersionMismatch
from tests.api.talk import post, refuse

PATH = "/v1/modules/{}/circuits"
MODULES = {
    "circuits.early": {"d_model": 16, "num_heads": 4, "num_kv_heads": 2, "spec": {"position": {"name": "rope"}}},
    "circuits.late": {"d_model": 16, "num_heads": 2, "bias": False},
    "circuits.bilinear": {"d_model": 16, "num_heads": 2, "spec": {"score": {"name": "bilinear"}}},
    "circuits.additive": {"d_model": 16, "num_heads": 2, "spec": {"score": {"name": "additive"}}},
    "circuits.wide": {"d_model": 24, "num_heads": 2},
    "circuits.cross": {"d_model": 24, "num_heads": 2, "key_width": 16, "value_width": 16},
}


@pytest.fixture(scope="module")
def client(client):
    for seed, (name, config) in enumerate(MODULES.items()):
        client.modules.create(name, config, seed=seed, durable=False)
    return client


def whole(client, name):
    """W_QK and W_OV ``[H, …]`` of a module without a score of its own, from the parameters that the server lists."""
    config = client.modules.get(name).config
    q, k, v, o = (client.modules.parameter(name, f"{role}_proj.weight").value.astype(float) for role in "qkvo")
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    q, o = q.reshape(heads, width, -1), o.reshape(len(o), heads, -1).swapaxes(0, 1)
    k, v = (np.repeat(x.reshape(kv_heads, width, -1), heads // kv_heads, axis=0) for x in (k, v))
    return q.swapaxes(1, 2) @ k / np.sqrt(width), o @ v


def test_circuits_of_a_module_are_those_of_its_parameters(client):
    reply = client.circuits("circuits.early", heads=[3, 0], vectors=True)
    assert reply.heads.tolist() == [3, 0]
    for circuit, every in zip((reply.qk, reply.ov), whole(client, "circuits.early"), strict=True):
        matrices = every[[3, 0]]
        expected = np.linalg.svd(matrices, compute_uv=False)[:, :4]
        np.testing.assert_allclose(circuit.singular_values, expected, rtol=1e-9)
        np.testing.assert_allclose(circuit.norm, np.linalg.norm(matrices, axis=(1, 2)))
        made = np.einsum("hk,hki,hkj->hij", circuit.singular_values, circuit.left, circuit.right)
        np.testing.assert_allclose(made, matrices, atol=1e-12)
    assert reply.left_out == ["position rope", *(f"{role}_proj.bias" for role in "qkvo")]
    ran = reply.ran
    assert (ran.kernel, ran.dtype, ran.version) == ("lapack", "float64", client.modules.get("circuits.early").version)
    assert min(ran.flops, ran.predicted_ms, ran.peak_bytes, ran.compute_ms) > 0


def test_every_parameter_has_its_norm_and_spectrum(client):
    spectra = {each.name: each for each in client.circuits("circuits.bilinear", parts=["spectra"], top=3).spectra}
    listed = client.modules.parameters("circuits.bilinear").parameters
    assert [*spectra] == [each.name for each in listed]
    for each in listed:
        found = spectra[each.name]
        assert found.shape == each.shape
        np.testing.assert_allclose(np.linalg.norm(found.norm), each.norm, rtol=1e-9)
        value = client.modules.parameter("circuits.bilinear", each.name).value.astype(float)
        if value.ndim > 1:
            expected = np.linalg.svd(value, compute_uv=False)[..., :3]
            np.testing.assert_allclose(found.singular_values, expected, rtol=1e-9)


def test_heads_of_two_modules_are_composed(client):
    reply = client.circuits("circuits.early", with_="circuits.late", heads=[2, 1], parts=["ov"])
    found = reply.composition
    assert (found.module, found.version) == ("circuits.late", client.modules.get("circuits.late").version)
    assert found.baseline == 0.25
    assert reply.qk is None
    written = whole(client, "circuits.early")[1][[2, 1]]
    qk, ov = whole(client, "circuits.late")
    for scores, matrices in ((found.q, qk.swapaxes(1, 2)), (found.k, qk), (found.v, ov)):
        products = np.linalg.norm(matrices[None] @ written[:, None], axis=(2, 3))
        norms = np.linalg.norm(written, axis=(1, 2))[:, None] * np.linalg.norm(matrices, axis=(1, 2))
        np.testing.assert_allclose(scores, products / norms, rtol=1e-9)


def test_scores_that_are_not_defined_are_left_out(client):
    additive = client.circuits("circuits.early", with_="circuits.additive", parts=["ov"]).composition
    assert additive.q is None
    assert additive.k is None
    assert additive.v.shape == (4, 2)
    cross = client.circuits("circuits.early", with_="circuits.cross", parts=["ov"]).composition
    assert cross.q is None
    assert cross.k.shape == cross.v.shape == (4, 2)
    assert client.circuits("circuits.cross", parts=["ov"]).ov.copying is None
    assert client.circuits("circuits.wide", parts=["ov"]).ov.copying.shape == (2,)


def test_a_reply_in_json_has_what_was_requested(client, http):
    reply = post(http, PATH.format("circuits.late"), heads=[1], parts=["qk"], top=1)
    assert {*reply} == {"heads", "qk", "left_out", "ran"}
    assert {*reply["qk"]} == {"singular_values", "norm", "effective_rank", "stable_rank"}
    assert np.shape(reply["qk"]["singular_values"]) == (1, 1)
    assert reply["left_out"] == []


@pytest.mark.parametrize(
    ("name", "fields", "param", "says"),
    [
        ("early", {"heads": [4]}, "heads", "out of range; there are 4 heads"),
        ("early", {"heads": []}, "heads", "at least 1"),
        ("early", {"top": 0}, "top", "greater than or equal to 1"),
        ("early", {"parts": ["kq"]}, "parts.0", "'qk'"),
        ("early", {"with": "circuits.wide"}, "with", "write 16 numbers"),
        ("early", {"with_version": "abc"}, "with_version", "send with"),
        ("early", {"layer": 1}, "layer", "layer"),
        ("additive", {}, "parts", "additive of module 'circuits.additive' is not bilinear"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_field(client, http, name, fields, param, says):
    found = refuse(http, PATH.format(f"circuits.{name}"), **fields)
    assert (found["status"], found["param"]) == (422, param)
    assert says in found["detail"]


def test_an_unknown_module_or_version_is_named_by_its_field(client):
    with pytest.raises(ModuleNotFound) as unknown:
        client.circuits("circuits.early", with_="circuits.none")
    assert unknown.value.param == "with"
    with pytest.raises(VersionMismatch) as other:
        client.circuits("circuits.early", with_="circuits.late", with_version="abc")
    assert other.value.param == "with_version"
    with pytest.raises(VersionMismatch) as own:
        client.circuits("circuits.early", version="abc")
    assert own.value.param == "version"


def test_parameters_that_are_not_finite_or_overflow_are_refused(client):
    config = {"d_model": 4, "num_heads": 1, "bias": False, "dtype": "float64"}
    ones = {f"{role}_proj.weight": np.ones((4, 4)) for role in "qkvo"}
    client.modules.create("circuits.nan", config, parameters=ones | {"v_proj.weight": np.full((4, 4), np.nan)})
    with pytest.raises(InvalidRequest, match=r"v_proj.weight of module 'circuits.nan' has NaN"):
        client.circuits("circuits.nan")
    client.modules.create("circuits.huge", config, parameters=dict.fromkeys(ones, np.full((4, 4), 1e200)))
    with pytest.raises(InvalidRequest, match="overflow float64"):
        client.circuits("circuits.huge", parts=["qk"])
