"""The OpenAPI document, made from the contract's table of operations."""

import json
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from attention_contract.errors import PROBLEM_MEDIA_TYPE, AttentionError, error_classes
from attention_contract.operations import OPERATIONS, Operation
from attention_contract.tensors import TENSOR_SCHEMA
from attention_contract.wire import JSON, PICTURES, SAFETENSORS
from attention_service import __version__
from attention_service.api.serving import VERSIONED

_REF = "#/components/schemas/"
_REPLIES: dict[str, Any] = json.loads(files(__package__).joinpath("replies.json").read_text("utf-8"))
"""A reply of each operation, to its example where it has one; a test holds them against a live server."""
_DESCRIPTION = """
Keeps attention modules resident and answers four questions about them: what they output (**forward**), what they look
at and are made of (**weights**, **parameters**), how they change (**gradients**) and what they cost (**complexity**).

Tensors travel as JSON (nested lists, or objects with dtype, shape and flat data or base64) or as a safetensors file
whose tensors are named by their request field, with the rest of the request as JSON text in the metadata entry
`request` (`reply` in replies). Errors are problem documents (RFC 9457).
"""


def document() -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Attention service", "version": __version__, "description": _DESCRIPTION.strip()},
        "paths": paths | _PLAIN_PATHS,
        "components": {"schemas": _schemas(), "headers": _HEADERS},
    }


def _operation(operation: Operation[Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [_tag(operation.path)],
        "parameters": [*_path_parameters(operation), *_query_parameters(operation), *_conditions(operation)],
        "responses": {str(operation.status): _success(operation)} | _failures(operation.errors),
    }
    if operation.method == "GET" and _versioned(operation):
        described["responses"]["304"] = {"description": "Not changed since", "headers": _headers("ETag")}
    if operation.request is not None and operation.method != "GET":
        described["requestBody"] = {
            "required": True,
            "content": _content(operation, operation.request, operation.example),
        }
    return described


def _tag(path: str) -> str:
    for prefix, tag in (
        ("/v1/modules", "modules"),
        ("/v1/attention", "raw attention"),
        ("/v1/hopfield", "hopfield"),
        ("/health", "health"),
    ):
        if path.startswith(prefix):
            return tag
    return "server"


def _content(operation: Operation[Any], model: type[BaseModel], example: Any) -> dict[str, Any]:
    media: dict[str, Any] = {JSON: {"schema": {"$ref": _REF + model.__name__}}}
    if example is not None:
        media[JSON]["example"] = example
    if operation.tensors:
        media[SAFETENSORS] = {"schema": {"type": "string", "format": "binary", "contentMediaType": SAFETENSORS}}
    return media


def _path_parameters(operation: Operation[Any]) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", operation.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(operation: Operation[Any]) -> list[dict[str, Any]]:
    if operation.request is None or operation.method != "GET":
        return []
    properties = operation.request.model_json_schema()["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": schema.get("description", "")}
        for name, schema in properties.items()
    ]


def _conditions(operation: Operation[Any]) -> list[dict[str, Any]]:
    told = {}
    if operation.reply is not None and "ran" in operation.reply.model_fields:
        told["Prefer"] = "`wait=S`: refuse with 503 what cannot begin within S seconds of its arrival (RFC 7240)."
    if operation.path.startswith("/v1/modules/{name}"):
        told["If-Match"] = "A version in quotation marks, as the ETag has it; another one is answered with 409."
    if operation.method == "GET" and _versioned(operation):
        told["If-None-Match"] = "Versions in quotation marks; at one of them, the answer is 304 without a body."
    return [
        {"name": name, "in": "header", "required": False, "description": text} | _TEXT for name, text in told.items()
    ]


def _success(operation: Operation[Any]) -> dict[str, Any]:
    names = ["X-Request-ID", *(["ETag"] if _versioned(operation) else [])]
    names += ["Location"] if operation.status == 201 else []
    answer: dict[str, Any] = {"description": operation.summary, "headers": _headers(*names)}
    if operation.reply is not None:
        answer["content"] = _content(operation, operation.reply, _REPLIES.get(operation.name))
        if operation.pictures:
            answer["content"] |= {kind: {"schema": {"type": "string", "contentMediaType": kind}} for kind in PICTURES}
    return answer


def _versioned(operation: Operation[Any]) -> bool:
    return operation.reply in VERSIONED


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _failures(errors: Iterable[type[AttentionError]]) -> dict[str, Any]:
    by_status: dict[int, list[type[AttentionError]]] = {}
    for error in errors:
        by_status.setdefault(error.status, []).append(error)
    return {
        str(status): {
            "description": "; ".join(f"{error.title} (`{error.code}`)" for error in group),
            "headers": _headers("X-Request-ID", *(["Retry-After"] if any(e.retry_after for e in group) else [])),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": _REF + "Problem"}}},
        }
        for status, group in sorted(by_status.items())
    }


def _schemas() -> dict[str, Any]:
    models: list[type[BaseModel]] = []
    for operation in OPERATIONS:
        models += [model for model in (operation.request, operation.reply) if model is not None]
    unique = dict.fromkeys(models)
    _, defined = models_json_schema([(model, "validation") for model in unique], ref_template=_REF + "{model}")
    schemas: dict[str, Any] = _with_tensors(defined["$defs"])
    return schemas | {"Tensor": TENSOR_SCHEMA, "Problem": _PROBLEM}


def _with_tensors(schema: Any) -> Any:
    """The schema with a reference to Tensor wherever the contract marks one."""
    if isinstance(schema, dict):
        if "x-tensor" in schema:
            rest = {key: value for key, value in schema.items() if key not in {"x-tensor", "title"}}
            return {"$ref": _REF + "Tensor"} | rest
        return {key: _with_tensors(value) for key, value in schema.items()}
    return [_with_tensors(item) for item in schema] if isinstance(schema, list) else schema


_PROBLEM = {
    "title": "Problem",
    "description": "RFC 9457. The numbers behind the sentence are further fields.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What was expected, what came, and what to do."},
        "code": {"enum": sorted(error_classes())},
        "param": {"type": "string", "description": "The request field at fault, dotted when nested."},
        "request_id": {"type": "string"},
    },
}
_TEXT = {"schema": {"type": "string"}}
_HEADERS = {
    "X-Request-ID": _TEXT | {"description": "The request's id: the one that was sent, or a new one."},
    "ETag": _TEXT | {"description": "The module's version, in quotation marks."},
    "Location": _TEXT | {"description": "The path of what was made."},
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds after which to try again."},
}
_PLAIN_PATHS = {
    "/metrics": {
        "get": {
            "operationId": "metrics",
            "summary": "Metrics in Prometheus' text format",
            "tags": ["server"],
            "responses": {"200": {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}},
        }
    },
    "/": {
        "get": {
            "operationId": "page",
            "summary": "The built-in page",
            "tags": ["server"],
            "responses": {"200": {"description": "A page", "content": {"text/html": {"schema": {"type": "string"}}}}},
        }
    },
}
