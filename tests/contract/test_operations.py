"""The table of operations says everything once, and its examples work as they stand."""

import re

import pytest

from attention_contract import operations, wire
from attention_contract.errors import AttentionError, InvalidRequest, VersionMismatch
from attention_contract.operations import OPENAI_PATHS, OPERATIONS, Operation
from attention_contract.tensors import Untyped
from attention_contract.validation import validate

DESIGN = {
    ("GET", "/v1"),
    ("GET", "/v1/variants"),
    ("GET", "/v1/modules"),
    ("POST", "/v1/modules"),
    ("POST", "/v1/modules/import"),
    ("GET", "/v1/modules/{name}"),
    ("DELETE", "/v1/modules/{name}"),
    ("GET", "/v1/modules/{name}/parameters"),
    ("PUT", "/v1/modules/{name}/parameters"),
    ("GET", "/v1/modules/{name}/parameters/{parameter}"),
    ("POST", "/v1/modules/{name}/forward"),
    ("POST", "/v1/modules/{name}/weights"),
    ("POST", "/v1/modules/{name}/gradients"),
    ("POST", "/v1/modules/{name}/complexity"),
    ("POST", "/v1/attention/forward"),
    ("POST", "/v1/attention/weights"),
    ("POST", "/v1/attention/gradients"),
    ("POST", "/v1/attention/complexity"),
    ("GET", "/v1/complexity/accuracy"),
    ("POST", "/v1/hopfield/retrieve"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
}

each = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
each_example = pytest.mark.parametrize(
    "operation", [op for op in OPERATIONS if op.example is not None], ids=lambda operation: operation.name
)


ASKS_A_MODEL = [
    each
    for each in OPERATIONS
    if each.path in OPENAI_PATHS or (each.path.startswith("/v1/models/{model}/") and each.method == "POST")
]
NO_PASS = {"model_complexity", "tokenize"}


@pytest.mark.parametrize("operation", ASKS_A_MODEL, ids=lambda operation: operation.name)
def test_every_request_to_a_model_has_its_common_fields(operation):
    if operation.name not in {
        "fit_lens",
        "fit_probe",
        "fit_vector",
    }:  # which read many texts, by a model under its own name
        assert {"adapter", "alone"} <= operation.request.model_fields.keys()
        assert ("ran" in operation.reply.model_fields) == (operation.name not in NO_PASS)


def test_names_and_routes_are_unique():
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)
    assert len({(operation.method, operation.path) for operation in OPERATIONS}) == len(OPERATIONS)


def test_every_path_of_the_design_is_there():
    assert {(operation.method, operation.path) for operation in OPERATIONS} >= DESIGN


def test_every_operation_of_the_file_is_in_the_table_under_its_own_name():
    declared = {name: item for name, item in vars(operations).items() if isinstance(item, Operation)}
    assert sorted(declared) == sorted(operation.name for operation in OPERATIONS)
    assert all(operation is declared[operation.name] for operation in OPERATIONS)


@each
def test_errors_belong_to_the_tree_and_are_named_once(operation):
    assert all(issubclass(error, AttentionError) for error in operation.errors)
    assert len(set(operation.errors)) == len(operation.errors)


@each
def test_an_operation_is_consistent(operation):
    assert re.fullmatch(r"(/[a-z0-9]+|/\{[a-z]+\})+", operation.path)
    assert operation.summary
    assert not operation.summary.endswith(".")
    if operation.method in {"POST", "PUT"}:
        assert operation.request is not None
        assert InvalidRequest in operation.errors
    if operation.request is not None and "version" in operation.request.model_fields and "{name}" in operation.path:
        assert VersionMismatch in operation.errors
    assert (operation.reply is None) == (operation.status == 204)


@each_example
def test_an_example_is_valid_and_survives_both_media_types(operation):
    request = validate(operation.request, operation.example)
    for media_type in wire.MEDIA_TYPES if operation.tensors else (wire.JSON,):
        for encoding in ("list", "base64"):
            body = b"".join(wire.to_body(request, media_type, "request", encoding))
            again = wire.from_body(operation.request, body, media_type, "request")
            assert wire.to_json(again) == wire.to_json(request)
            if operation.tensors and "query" in operation.example:
                assert isinstance(again.query, Untyped)


def test_every_post_has_an_example():
    assert all(operation.example is not None for operation in OPERATIONS if operation.method == "POST")
