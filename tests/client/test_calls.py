"""Every operation of the contract is one call, and both clients have it."""

import inspect
from typing import get_type_hints

import numpy as np
import pytest

import attention_client
from attention_client import AsyncClient, AttentionSpec, Client, InvalidRequest, InvalidTensor, calls, options
from attention_contract import errors
from attention_contract.operations import OPERATIONS
from attention_contract.schemas import attention as a
from attention_contract.schemas import complexity as c
from attention_contract.schemas.gradients import GradientsRequest, RawGradientsRequest
from attention_contract.schemas.hopfield import HopfieldRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.weights import RawWeightsRequest, WeightsRequest
from tests.client.service import CONFIG, EXAMPLES, X, ask


@pytest.mark.parametrize("media_type", ["safetensors", "json"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_both_clients_have_every_operation(kind, played, operation, media_type):
    args, kwargs, path = EXAMPLES[operation.name]
    reply = ask(kind, played, operation.name, *args, **kwargs, media_type=media_type)
    (request,) = played.requests
    expected = f"{path}{'&' if '?' in path else '?'}encoding=base64" if "?" in path and media_type == "json" else path
    assert (request.method, request.url.raw_path.decode()) == (operation.method, expected)
    assert isinstance(reply, operation.reply or type(None))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_method_has_the_name_the_text_and_the_arguments_of_its_call(operation):
    call = getattr(calls, operation.name)
    assert call.__doc__
    for client in (Client, AsyncClient):
        method = getattr(client, operation.name)
        assert (method.__name__, method.__doc__) == (operation.name, call.__doc__)
        assert list(inspect.signature(method).parameters) == ["self", *inspect.signature(call).parameters]


def test_raw_attention_is_attend_as_well():
    assert Client.attend is Client.raw_forward
    assert AsyncClient.attend is AsyncClient.raw_forward


@pytest.mark.parametrize(
    ("typed", "model", "beside"),
    [
        (options.ForwardOptions, a.ForwardRequest, {"query", "key", "value"}),
        (options.WeightsOptions, WeightsRequest, {"query", "key", "value"}),
        (options.GradientsOptions, GradientsRequest, {"query", "key", "value"}),
        (options.RawForwardOptions, a.RawForwardRequest, {"query", "key", "value"}),
        (options.RawWeightsOptions, RawWeightsRequest, {"query", "key", "value"}),
        (options.RawGradientsOptions, RawGradientsRequest, {"query", "key", "value"}),
        (options.CostOptions, c.ComplexityRequest, {"shape", "sweep"}),
        (options.RawCostOptions, c.RawComplexityRequest, {"shape", "sweep", "num_heads", "head_dim"}),
        (options.HopfieldOptions, HopfieldRequest, {"stored", "states"}),
    ],
)
def test_keyword_arguments_are_the_fields_of_the_request(typed, model, beside):
    assert set(get_type_hints(typed)) == set(model.model_fields) - beside - {"encoding"}


def test_models_and_plain_values_make_the_same_call():
    assert calls.create_module("demo", CONFIG).request == calls.create_module("demo", ModuleConfig(**CONFIG)).request
    shape, sweep = c.Shape(queries=4), c.Sweep(values=[4, 8])
    assert calls.complexity("demo", 4, [4, 8]).request == calls.complexity("demo", shape, sweep).request
    assert calls.complexity("demo", {"queries": 4}, {"values": [4, 8]}).request.sweep == sweep
    spec = {"masks": [{"name": "causal"}]}
    assert calls.raw_forward(X, spec=spec).request.spec == AttentionSpec(**spec)
    edit = {"tap": "weights", "heads": [np.int64(0)], "value": np.ones(3, np.float32)}
    assert calls.forward("demo", X, edits=[edit]).request.edits[0].heads == [0]


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "param"),
    [
        ("create_module", ("demo", {"d_model": 8, "num_heads": 3}), {}, "config.d_model"),
        ("create_module", ("no name", CONFIG), {}, "name"),
        ("get_module", ("",), {}, "name"),
        ("get_module", ("..",), {}, "name"),
        ("forward", ("demo", X), {"return_": ["nothing"]}, "return_.0"),
        ("forward", ("demo", X), {"masks": X}, "masks"),
        ("hopfield_retrieve", (X, X), {"steps": 0}, "steps"),
    ],
)
def test_what_cannot_be_asked_is_refused_without_a_request(call, args, kwargs, param):
    with pytest.raises(InvalidRequest) as caught:
        getattr(calls, call)(*args, **kwargs)
    assert caught.value.param == param


def test_a_ragged_list_is_refused_without_a_request():
    with pytest.raises(InvalidTensor, match="ragged"):
        calls.forward("demo", [[1.0, 2.0], [3.0]])


def test_the_public_names_hold_every_error():
    assert set(attention_client.__all__) >= {error.__name__ for error in errors.error_classes().values()}
    assert all(hasattr(attention_client, name) for name in attention_client.__all__)


@pytest.mark.parametrize(
    "wrong", [{"base_url": "localhost:8000"}, {"base_url": "http://a:b"}, {"timeout": 0}, {"retries": -1}]
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_client_that_could_never_work_is_refused(client, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        client(**wrong)
