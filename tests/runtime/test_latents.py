"""Modules whose projections read a latent: every operation, beside the equations written out in float64."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.circuits import CircuitsRequest
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.costs.complexity import ComplexityRequest
from attention_contract.schemas.gradients import GradientsRequest
from attention_contract.schemas.modules import CreateModule, ModuleConfig
from attention_contract.schemas.sessions import OpenSession, StepRequest
from attention_contract.schemas.weights import WeightsRequest
from attention_contract.validation import validate
from attention_service.cost import Rates, Roofline
from attention_service.engine import Engine
from attention_service.runtime.device.torch_device import Device

WIDTH, HEADS, HEAD, VALUE = 12, 3, 6, 5
SPEC = {"masks": [{"name": "causal", "align": "bottom_right"}], "position": {"name": "rope", "dim": 2}}
LATENTS = {
    "both": {"query": 7, "key_value": 8, "shared": 2, "bias": True, "eps": 0.1},
    "queries": {"query": 7},
    "keys": {"key_value": 8},
}


@pytest.fixture(scope="module")
def engine(run, tmp_path_factory):
    torch.set_num_threads(1)
    device = Device(torch.device("cpu"), "test", 2**32, Roofline(Rates(1e10, 1e10, 1e-5)))
    engine = Engine(tmp_path_factory.mktemp("repository"), device)
    run(engine.start())
    for name, latent in LATENTS.items():
        run(engine.modules.create(created(name, latent)))
    yield engine
    run(engine.stop())


def config(latent, **more):
    sizes = {"d_model": WIDTH, "num_heads": HEADS, "head_dim": HEAD, "value_dim": VALUE}
    return sizes | {"bias": False, "dtype": "float64", "latent": latent, "spec": SPEC} | more


def created(name, latent, **more):
    return validate(CreateModule, {"name": name, "config": config(latent), "seed": 3} | more)


def normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def down(p, role, x, latent):
    """A latent and what of it is not normed."""
    x = x @ p[f"{role}_down.weight"].T + p.get(f"{role}_down.bias", 0)
    weight = p[f"{role}_down_norm.weight"]
    return normed(x[:, : len(weight)], weight, latent.get("eps", 1e-6)), x[:, len(weight) :]


def turned(x):
    """The first pair of dimensions of x ``[L, H, D]``, turned by its place."""
    angle = np.arange(len(x))[:, None]
    a, b = x[..., 0], x[..., 1]
    parts = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate([np.stack(parts, -1), x[..., 2:]], -1)


def expected(p, x, latent, source=None):
    """Output and weights of tokens ``[L, d_model]`` that look at themselves, or at a source without masks."""
    source = x if source is None else source
    query = down(p, "q", x, latent)[0] if "query" in latent else x
    keys, shared = down(p, "kv", source, latent) if "key_value" in latent else (source, source[:, :0])
    q = (query @ p["q_proj.weight"].T).reshape(len(x), HEADS, HEAD)
    k = (keys @ p["k_proj.weight"].T).reshape(len(source), HEADS, -1)
    v = (keys @ p["v_proj.weight"].T).reshape(len(source), HEADS, VALUE)
    k = np.concatenate([shared[:, None].repeat(HEADS, 1), k], -1)
    scores = np.einsum("ihd,jhd->hij", turned(q), turned(k)) / np.sqrt(HEAD)
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    context = np.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
    return context @ p["o_proj.weight"].T, weights


def parameters(engine, name):
    return {key: value.numpy() for key, value in engine.library.get(name).parameters.items()}


@pytest.fixture
def inputs(rng):
    return rng.standard_normal((5, WIDTH)), rng.standard_normal((5, WIDTH))


@pytest.mark.parametrize("name", LATENTS)
def test_the_numbers_are_those_of_the_equations(name, run, engine, inputs):
    x, source = inputs
    p, latent = parameters(engine, name), LATENTS[name]
    taps = {"return": ["output", "weights", "k"]}
    reply = run(engine.forward(name, ForwardRequest(query=x, **taps)))
    output, weights = expected(p, x, latent)
    np.testing.assert_allclose(reply.output, output, atol=1e-12)
    np.testing.assert_allclose(reply.weights, weights, atol=1e-12)
    found = run(engine.ask("weights", name, validate(WeightsRequest, {"query": x, "top_k": 1})))
    np.testing.assert_array_equal(np.asarray(found.top.keys)[..., 0], weights.argmax(-1))
    across = run(engine.forward(name, ForwardRequest(query=x, key=source, **taps)))
    np.testing.assert_allclose(across.output, expected(p, x, latent, source)[0], atol=1e-12)
    apart = run(engine.forward(name, ForwardRequest(query=x, key=source, value=source.copy(), **taps)))
    np.testing.assert_array_equal(apart.output, across.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "both" else pytest.param(name, marks=pytest.mark.slow) for name in LATENTS]
)
def test_gradients_of_every_parameter_are_those_of_differences(name, run, engine, inputs):
    request = GradientsRequest(query=inputs[0], key=inputs[1], wrt=["query", "key", "parameters"], check=True)
    reply = run(engine.ask("gradients", name, request))
    assert set(reply.gradients) == {"query", "key", *parameters(engine, name)}
    assert all(np.any(np.asarray(value)) for value in reply.gradients.values())
    assert max(each.max_relative_error for each in reply.check.values()) < 1e-6


@pytest.mark.parametrize("name", LATENTS)
def test_a_session_gives_the_numbers_of_the_whole_sequence(name, run, engine, inputs):
    whole = run(engine.forward(name, ForwardRequest(query=inputs[0])))
    session = run(engine.sessions.open(name, OpenSession())).session
    steps = [
        run(engine.sessions.step(session, validate(StepRequest, {"query": part})))
        for part in np.split(inputs[0], [2, 3])
    ]
    np.testing.assert_allclose(np.concatenate([step.output for step in steps]), whole.output, atol=1e-12)


@pytest.mark.parametrize("name", LATENTS)
def test_a_module_of_its_config_and_parameters_is_the_same(name, run, engine):
    module = engine.library.get(name)
    sent = {key: value.numpy() for key, value in module.parameters.items()}
    fields = {"name": f"{name}-again", "config": module.config.model_dump(mode="json"), "parameters": sent}
    assert run(engine.modules.create(validate(CreateModule, fields))).version == module.version


@pytest.mark.sampled(name=1)
@pytest.mark.parametrize("name", LATENTS)
def test_its_costs_count_the_latents(name, run, engine):
    body = {
        "shape": {"queries": 64},
        "sweep": {"dimension": "head_dim", "values": [HEAD, 2 * HEAD]},
        "memory_bytes": 2**20,
    }
    reply = run(engine.complexity(name, validate(ComplexityRequest, body)))
    p = parameters(engine, name)
    matrices = sum(value.size for key, value in p.items() if value.ndim == 2)
    assert reply.parameter_count == sum(value.size for value in p.values())
    stages = reply.costs[0].forward.dense
    assert stages.projections + stages.output_projection >= 2 * 64 * matrices
    assert reply.costs[1].parameter_bytes > reply.costs[0].parameter_bytes


def test_a_module_without_latents_says_nothing_of_them():
    assert "latent" not in ModuleConfig(d_model=8, num_heads=2).model_dump()


@pytest.mark.parametrize(
    ("latent", "more", "field"),
    [
        ({}, {}, "key_value"),
        ({"query": 4, "shared": 2}, {}, "shared"),
        ({"key_value": 4, "shared": HEAD}, {}, "latent"),
        ({"key_value": 4}, {"key_width": 7}, "latent"),
    ],
)
def test_an_impossible_latent_is_refused_by_its_field(latent, more, field):
    with pytest.raises(ValidationError) as fault:
        ModuleConfig.model_validate(config(latent, **more))
    assert fault.value.errors()[0]["ctx"]["field"] == field


def test_a_head_that_is_no_wider_than_its_shared_part_is_no_size(run, engine):
    body = {"shape": {"queries": 4}, "sweep": {"dimension": "head_dim", "values": [2, 6]}}
    with pytest.raises(InvalidRequest, match="shared"):
        run(engine.complexity("both", validate(ComplexityRequest, body)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "parts"), ({"parts": ["ov"]}, "parts"), ({"parts": ["spectra"], "with": "keys"}, "parts")],
)
def test_there_are_no_circuits_through_a_norm(fields, param, run, engine):
    with pytest.raises(InvalidRequest, match="latents") as fault:
        run(engine.analyses.circuits("both", validate(CircuitsRequest, fields)))
    assert fault.value.param == param


def test_the_spectra_of_its_parameters_are_reported(run, engine):
    reply = run(engine.analyses.circuits("both", CircuitsRequest(parts=["spectra"])))
    assert {each.name for each in reply.spectra} == set(parameters(engine, "both"))
