"""Every operation of the contract is a method of both clients."""

import inspect
import re
from collections.abc import Generator
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack, get_origin, get_type_hints

import numpy as np
import pytest

import attention_client
from attention_client import AsyncClient, AttentionSpec, Client, DeadlineExceeded, InvalidRequest, InvalidTensor
from attention_client.calls import Call, CallOptions
from attention_contract import errors, operations
from attention_contract.operations import OPERATIONS
from attention_contract.schemas.attention import AttentionInputs
from attention_contract.schemas.costs import complexity as c
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.schemas.openai import OpenAIRequest
from tests.client.service import CALLS, CONFIG, EXAMPLES, URL, X, ask, call_of


@pytest.mark.sampled
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_both_clients_have_every_operation(kind, played, operation):
    """In one form each, which the call itself has, whichever client sends it."""
    media_type = {"sync": "json", "async": "safetensors"}[kind]
    args, kwargs, path = EXAMPLES[operation.name]
    reply = ask(kind, played, operation.name, *args, **kwargs, media_type=media_type)
    (request,) = played.requests
    expected = f"{path}{'&' if '?' in path else '?'}encoding=base64" if "?" in path and media_type == "json" else path
    assert (request.method, request.url.raw_path.decode()) == (operation.method, expected)
    assert isinstance(reply, operation.reply or type(None))


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_method_shows_the_signature_and_the_documentation_of_its_call(kind, name):
    """Of both clients; the awaited one has coroutine functions."""
    method = attrgetter(name)({"sync": Client, "async": AsyncClient}[kind](URL))
    assert inspect.iscoroutinefunction(method) == (kind == "async" and name not in STREAMED)
    assert inspect.getdoc(method) == inspect.getdoc(CALLS[name])
    shown = inspect.signature(method)
    assert list(shown.parameters)[-1] == "options"
    assert shown.parameters["options"].annotation == Unpack[CallOptions]
    assert shown.return_annotation not in {inspect.Signature.empty, Any}
    assert get_origin(shown.return_annotation) not in {Call, Generator}
    assert get_type_hints(method).keys() == {*shown.parameters, "return"}


WHOLE = {"recordings.create", "recordings.get", "recordings.download"}
"""Calls about a whole recording: they take it, or its id alone."""


FLOWS = {"checkpoints.fetch", "modules.import_all", "models.survey", "models.passages", "models.export_headvis"}
"""Methods that make several calls, whose arguments are their own."""
STREAMED = {"models.stream", "models.stream_chat", "models.stream_response", "models.stream_transcription"}
"""Calls whose replies come in pieces: an async iterator is not awaited."""
OF_OTHER_CLIENTS = {"stream", "stream_options", "max_completion_tokens", "encoding_format"}
"""Fields of OpenAI's API that this client sets itself, or has no need of."""
OF_THE_PAST = {"past_key", "past_value", "offsets"}
"""Fields that a request of a session refuses."""


@pytest.mark.parametrize("name", sorted(CALLS.keys() - FLOWS - WHOLE))
def test_the_arguments_are_the_fields_of_the_request_with_its_defaults(name):
    operation = getattr(operations, re.search(r"operations\.(\w+)", inspect.getsource(CALLS[name]))[1])
    fields = {} if operation.request is None else operation.request.model_fields
    in_path = set(re.findall(r"{(\w+)}", operation.path))
    arguments = dict(inspect.signature(CALLS[name]).parameters)
    if operation.request is not None and issubclass(operation.request, AttentionInputs) and "{id}" in operation.path:
        fields = {field: about for field, about in fields.items() if field not in OF_THE_PAST}
    for beside in {"self", "media_type", "options"} | in_path | ({"version"} if name == "modules.delete" else set()):
        arguments.pop(beside, None)
    # A session belongs to a module, and no picture draws its price.
    missing = {"encoding"} if name == "complexity" else {"encoding", "session"}
    if operation.request is not None and issubclass(operation.request, OpenAIRequest):
        missing |= {field for field, about in fields.items() if about.annotation is Any} | OF_OTHER_CLIENTS
    assert set(arguments) == set(fields) - missing
    for argument in arguments.values():
        field = fields[argument.name]
        if argument.default is inspect.Parameter.empty:
            assert field.is_required()
        elif argument.default is not None:  # None stands for the field's default
            default = list(argument.default) if isinstance(argument.default, tuple) else argument.default
            assert default == field.get_default(call_default_factory=True)


def test_models_and_plain_values_make_the_same_call():
    assert (
        call_of("create_module", "demo", CONFIG).request
        == call_of("create_module", "demo", ModuleConfig(**CONFIG)).request
    )
    shape, sweep = c.Shape(queries=4), Sweep(values=[4, 8])
    assert call_of("complexity", "demo", 4, [4, 8]).request == call_of("complexity", "demo", shape, sweep).request
    assert call_of("complexity", "demo", {"queries": 4}, {"values": [4, 8]}).request.sweep == sweep
    spec = {"masks": [{"name": "causal"}]}
    assert call_of("raw_forward", X, spec=spec).request.spec == AttentionSpec(**spec)
    edit = {"tap": "weights", "heads": [np.int64(0)], "value": np.ones(3, np.float32)}
    assert call_of("forward", "demo", X, edits=[edit]).request.edits[0].heads == [0]


@pytest.mark.parametrize(
    ("call", "args", "kwargs", "param"),
    [
        ("create_module", ("demo", {"d_model": 8, "num_heads": 3}), {}, "config.d_model"),
        ("create_module", ("no name", CONFIG), {}, "name"),
        ("get_module", ("",), {}, "name"),
        ("get_module", ("..",), {}, "name"),
        ("get_module", ("demo/parameters",), {}, "name"),
        ("get_module", ("\udcff",), {}, "name"),  # a byte of the command line that is not UTF-8
        ("forward", ("demo", X), {"return_": ["nothing"]}, "return.0"),
        ("hopfield_retrieve", (X, X), {"steps": 0}, "steps"),
    ],
)
def test_what_cannot_be_sent_is_refused_without_a_request(call, args, kwargs, param):
    with pytest.raises(InvalidRequest) as caught:
        call_of(call, *args, **kwargs)
    assert caught.value.param == param


def test_a_ragged_list_is_refused_without_a_request():
    with pytest.raises(InvalidTensor, match="ragged"):
        call_of("forward", "demo", [[1.0, 2.0], [3.0]])


def test_the_servers_deadline_is_caught_as_the_clients():
    assert DeadlineExceeded is errors.DeadlineExceeded


def test_the_public_names_hold_every_error():
    assert set(attention_client.__all__) >= {error.__name__ for error in errors.error_classes().values()}
    assert all(hasattr(attention_client, name) for name in attention_client.__all__)


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "localhost:8000"},
        {"base_url": "http://a:b"},
        {"base_url": "http://a?b=1"},
        {"timeout": 0},
        {"retries": -1},
    ],
)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_client_that_could_never_work_is_refused(client, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        client(**wrong)


@pytest.mark.parametrize("images", ["cat.png", Path("cat.png"), b"PNG"])
def test_one_image_in_place_of_a_list_is_refused(images):
    with Client() as client, pytest.raises(InvalidRequest, match="images: expected a list"):
        client.models.forward("vit", images=images)
