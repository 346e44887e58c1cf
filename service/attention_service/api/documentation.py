"""The parts of the OpenAPI document that FastAPI cannot find in routes and models.

FastAPI makes the document from the routes. ``documented`` gives each route the media types, errors, headers and example
of its operation; ``complete`` adds the schemas of tensors and problems, which are no models.
"""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache
from http import HTTPStatus
from inspect import Parameter as Argument
from inspect import Signature
from typing import Annotated, Any

from fastapi import Query

from attention_contract.errors import (
    PROBLEM_MEDIA_TYPE,
    AttentionError,
    Forbidden,
    Misdirected,
    Unauthorized,
    error_classes,
)
from attention_contract.operations import ANY_KEY, OPENAI_PATHS, OPERATIONS, Operation
from attention_contract.schemas.modules import ModuleInfo, Parameter, ParameterList
from attention_contract.schemas.picture_options import PictureOptions
from attention_contract.schemas.sessions import SessionInfo
from attention_contract.tensors import TENSOR_SCHEMAS
from attention_contract.wire import EVENTS, GGUF, JSON, PICTURES, SAFETENSORS, TABLES, to_json
from attention_service.api.problems import status_elsewhere

VERSIONED = (ModuleInfo, ParameterList, Parameter)
"""Replies with a module or a part of a module. Their version is their ETag."""
DESCRIPTION = """
Keeps attention modules resident and answers four questions about them: what they output (**forward**), what they look
at and are made of (**weights**, **parameters**), how they change (**gradients**) and what they cost (**complexity**).

Tensors travel as JSON (nested lists, or objects with dtype, shape and flat data or base64) or as a safetensors file
whose tensors are named by their request field, with the rest of the request as JSON text in the metadata entry
`request` (`reply` in replies). Errors are problem documents (RFC 9457).
""".strip()
_TAGS = {
    "/v1/modules/{name}/sessions": "sessions",
    "/v1/sessions": "sessions",
    "/v1/modules": "modules",
    "/v1/models": "models",
    "/v1/chat": "OpenAI's API",
    "/v1/completions": "OpenAI's API",
    "/v1/embeddings": "OpenAI's API",
    "/v1/rerank": "OpenAI's API",
    "/v1/score": "OpenAI's API",
    "/v1/responses": "OpenAI's API",
    "/v1/tokenize": "OpenAI's API",
    "/v1/audio": "OpenAI's API",
    "/v1/modules/{name}/passes": "kept passes",
    "/v1/attention/passes": "kept passes",
    "/v1/passes": "kept passes",
    "/v1/checkpoints": "checkpoints",
    "/v1/attention": "raw attention",
    "/v1/hopfield": "hopfield",
    "/v1/recordings": "recordings",
    "/health": "health",
}
_SCHEMAS = "#/components/schemas/"
_FORM = {
    "multipart/form-data": {
        "schema": {
            "type": "object", "required": ["file", "model"],
            "properties": {"file": {"type": "string", "format": "binary"}, "model": {"type": "string"}},
        },
    },
}  # fmt: skip
"""The form of a request with a file; its other fields are those of the JSON body."""


def documented(operation: Operation[Any]) -> dict[str, Any]:
    """The arguments of ``APIRoute`` that describe an operation."""
    return {
        "methods": [operation.method],
        "name": operation.name,
        "operation_id": operation.name,
        "summary": operation.summary,
        "tags": [_tag(operation.path)],
        "status_code": operation.status,
        "response_model": operation.reply,
        "response_description": operation.summary,
        "responses": _responses(operation),
        "openapi_extra": _request(operation),
    }


def _tag(path: str) -> str:
    """The tag of the longest prefix of a path."""
    return _TAGS.get(max((prefix for prefix in _TAGS if path.startswith(prefix)), key=len, default=""), "server")


def signature_of(operation: Operation[Any]) -> Callable[[], None]:
    """A function whose arguments are those of an operation: FastAPI documents them. It is never called."""

    def endpoint() -> None: ...

    arguments = [
        Argument(name, Argument.KEYWORD_ONLY, annotation=str) for name in re.findall(r"{(\w+)}", operation.path)
    ]
    if operation.request is not None:
        body = Annotated[operation.request, Query()] if operation.method == "GET" else operation.request
        arguments.append(Argument("body", Argument.KEYWORD_ONLY, annotation=body))
    endpoint.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    return endpoint


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with the schemas and headers that the operations refer to, in terms that generators know."""
    components = _plain(document["components"])
    for name, schema in components["schemas"].items():
        if name.endswith(("-Input", "-Output")):  # generators name a class by its title
            schema["title"] = name.replace("-", "")
    _require_tags(components["schemas"], components["schemas"])
    components["schemas"] |= TENSOR_SCHEMAS | {"Problem": _PROBLEM, "OpenAIError": _OPENAI_ERROR}
    components |= {"headers": _HEADERS, "securitySchemes": {"key": _KEY}}
    return document | {"components": components, "security": [{"key": []}, {}]}


def _request(operation: Operation[Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"parameters": _condition_headers(operation) + _picture_options(operation)}
    if scopes := sorted(operation.scopes):
        extra["security"] = [*({"key": [scope]} for scope in scopes), {}]
    else:
        extra["security"] = []
    if operation.request is not None and operation.method != "GET":
        content: dict[str, Any] = {} if operation.example is None else {JSON: {"example": operation.example}}
        extra["requestBody"] = {"content": content | _safetensors(operation) | (_FORM if operation.form else {})}
    return extra


def _condition_headers(operation: Operation[Any]) -> list[dict[str, Any]]:
    texts = {}
    if operation.reply is not None and "ran" in operation.reply.model_fields:
        texts["Prefer"] = "`wait=S`: refuse with 503 what cannot begin within S seconds of its arrival (RFC 7240)."
    if operation.path.startswith("/v1/modules/{name}"):
        texts["If-Match"] = "A version in quotation marks, as the ETag has it; another one is answered with 409."
    if operation.method == "GET" and operation.reply in VERSIONED:
        texts["If-None-Match"] = "Versions in quotation marks; at one of them, the answer is 304 without a body."
    return [
        {"name": name, "in": "header", "required": False, "description": text}
        | ({"schema": {"type": "string", "pattern": _ONE_VERSION}} if name == "If-Match" else _TEXT)
        for name, text in texts.items()
    ]


def _picture_options(operation: Operation[Any]) -> list[dict[str, Any]]:
    """The parameters of the query string, of an operation whose reply can be drawn."""
    if not operation.pictures:
        return []
    fields = deepcopy(_picture_fields())
    fields["view"] |= {"anyOf": [{"enum": list(operation.pictures), "type": "string"}]}
    return [
        {"name": name, "in": "query", "required": False, "description": f"Of a picture: {schema.pop('description')}"}
        | {"schema": {**_of_text(schema), "title": schema["title"]}}
        for name, schema in fields.items()
    ]


@cache  # twenty operations have pictures, and a schema takes 3 ms
def _picture_fields() -> dict[str, Any]:
    fields: dict[str, Any] = PictureOptions.model_json_schema()["properties"]
    return fields


def _of_text(schema: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without null, which no query string can state."""
    members = [member for member in schema.pop("anyOf", []) if member != {"type": "null"}]
    given = schema if schema.get("default") is not None else {k: v for k, v in schema.items() if k != "default"}
    return given | (members[0] if len(members) == 1 else {"anyOf": members} if members else {})


def _responses(operation: Operation[Any]) -> dict[int | str, dict[str, Any]]:
    versioned = operation.reply in VERSIONED
    names = ["X-Request-ID", *(["ETag"] if versioned else []), *(["Location"] if operation.status == 201 else [])]
    success: dict[str, Any] = {"description": operation.summary, "headers": _headers(*names)}
    if operation.reply is SessionInfo and operation.status == 201:
        success["links"] = _SESSION_LINKS
    if operation.reply is not None:
        shown = {} if operation.reply_example is None else {JSON: {"example": operation.reply_example}}
        events = {EVENTS: {"schema": _EVENT}} if EVENTS in operation.chosen else {}
        files = ([SAFETENSORS] if operation.tensors else []) + ([*PICTURES] if operation.pictures else [])
        files += [*TABLES] if operation.tables else []
        files += [GGUF] if GGUF in operation.chosen else []
        # Without a schema, as OpenAPI 3.1 describes bytes: with one, generators would join it to the type of the JSON.
        success["content"] = events | shown | {kind: {} for kind in files}
    responses: dict[int | str, dict[str, Any]] = {operation.status: success}
    if versioned and operation.method == "GET":
        responses[304] = {"description": "Not changed since", "headers": _headers("ETag")}
    errors = operation.errors + _refusals(operation)
    if operation.path in OPENAI_PATHS:
        return responses | _openai_failures(errors)
    return responses | _failures(errors) | {"default": _failure("Any other problem", [])}


def _refusals(operation: Operation[Any]) -> tuple[type[AttentionError], ...]:
    """The errors of callers who are not let in."""
    if not operation.scopes:
        return ()
    return tuple(error for error in (Unauthorized, Forbidden, Misdirected) if error not in operation.errors)


def _safetensors(operation: Operation[Any]) -> dict[str, Any]:
    schema = {"type": "string", "format": "binary", "contentMediaType": SAFETENSORS}
    return {SAFETENSORS: {"schema": schema}} if operation.tensors else {}


def _failures(errors: Iterable[type[AttentionError]]) -> dict[int | str, dict[str, Any]]:
    by_status: dict[int, list[type[AttentionError]]] = {}
    for error in dict.fromkeys(errors):
        by_status.setdefault(error.status, []).append(error)
    return {
        status: _failure("; ".join(f"{error.title} (`{error.code}`)" for error in group), group)
        for status, group in sorted(by_status.items())
    }


def _failure(description: str, errors: Iterable[type[AttentionError]]) -> dict[str, Any]:
    retried = any(error.retry_after for error in errors)
    return {
        "description": description,
        "headers": _headers("X-Request-ID", *(["Retry-After"] if retried else [])),
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMAS}Problem"}}},
    }


def _openai_failures(errors: Iterable[type[AttentionError]]) -> dict[int | str, dict[str, Any]]:
    """The same errors on the paths of OpenAI's API."""
    content = {JSON: {"schema": {"$ref": f"{_SCHEMAS}OpenAIError"}}}
    statuses = {status_elsewhere(error): _failure("", [error]) for error in errors}
    described = {status: response | {"description": HTTPStatus(status).phrase} for status, response in statuses.items()}
    failures: dict[int | str, dict[str, Any]] = {
        status: response | {"content": content} for status, response in described.items()
    }
    return failures | {"default": _failure("Any other error", []) | {"content": content}}


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _is_union(schema: dict[str, Any]) -> bool:
    """True for a model, and for a value of one of several types beside null."""
    members = [member for member in schema.get("anyOf", schema.get("oneOf", [])) if member != {"type": "null"}]
    return "$ref" in schema or len(members) > 1 or any("$ref" in member for member in members)


def _plain(schema: Any) -> Any:
    """The schema with a reference to Tensor wherever the contract marks one, and without what few generators read.

    A ``oneOf`` has a discriminator, or is an ``anyOf``; a constant number is a range of one number; a field that is
    always null is a nullable string; the default of a union or a model stands in its description. Numbers have the
    format that keeps them whole: some generators take 32 bits where none is stated.
    """
    if isinstance(schema, dict):
        if "x-tensor" in schema:
            rest = {key: value for key, value in schema.items() if key not in {"x-tensor", "title"}}
            return {"$ref": f"{_SCHEMAS}Tensor"} | rest
        schema = _with_non_finite(schema)
        if schema.get("type") == "null" and "title" in schema:  # a field, not a member of a union
            return schema | {"type": ["string", "null"], "maxLength": 0}
        if schema.get("type") == "integer" and "const" in schema:
            number = schema["const"]
            schema = {key: value for key, value in schema.items() if key != "const"}
            schema |= {"minimum": number, "maximum": number}
        if width := _WIDTHS.get(str(schema.get("type"))):
            schema = schema | {"format": width}
        if "default" in schema and _is_union(schema):
            default = f"Default: `{to_json(schema['default']).decode()}`."
            schema = {key: value for key, value in schema.items() if key != "default"}
            schema["description"] = f"{schema.get('description', '')} {default}".strip()
        if isinstance(schema.get("oneOf"), list) and "discriminator" not in schema:
            schema = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
        return {key: _plain(value) for key, value in schema.items()}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def _with_non_finite(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a reference to NonFinite beside each number that the contract marks so."""
    members = schema.get("anyOf", [schema])
    if not any("x-non-finite" in member for member in members):
        return schema
    alternatives: list[Any] = []
    for member in members:
        alternatives += [{"type": "number"}, {"$ref": f"{_SCHEMAS}NonFinite"}] if "x-non-finite" in member else [member]
    return {key: value for key, value in schema.items() if key not in {"type", "x-non-finite"}} | {
        "anyOf": alternatives
    }


_WIDTHS = {"integer": "int64", "number": "double"}


def _require_tags(part: Any, schemas: dict[str, Any]) -> None:
    """Require the tag in every schema of a union that is told apart by it, as pydantic does where it has no default."""
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _require_tags(inner, schemas)
    if isinstance(part, dict) and "discriminator" in part:
        tag = part["discriminator"]["propertyName"]
        members = [schemas[choice["$ref"].removeprefix(_SCHEMAS)] for choice in part["oneOf"]]
        if all(tag not in member.get("required", []) for member in members):  # else one is the default
            for member in members:
                member["required"] = [tag, *member.get("required", [])]


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
_OPENAI_ERROR = {
    "title": "OpenAIError",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"enum": sorted(error_classes())},
            },
        }
    },
}
_EVENT = {
    "type": "object",
    "description": "One server-sent event.",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "A chunk as JSON; `[DONE]` in the last event."}},
}
_KEY = {
    "type": "http",
    "scheme": "bearer",
    "description": f"An API key, if the server needs one. Its scopes are of {', '.join(sorted(ANY_KEY))}.",
}
_TEXT = {"schema": {"type": "string"}}
_ONE_VERSION = r'^(\*|(W/)?"[^",]*")$'
_SESSION_LINKS = {
    operation.name: {"operationId": operation.name, "parameters": {"id": "$response.body#/session"}}
    for operation in OPERATIONS
    if operation.path.startswith("/v1/sessions/{id}")
}
"""Links from the reply that opens a session to the operations of that session."""
_HEADERS = {
    "X-Request-ID": _TEXT | {"description": "The request's id: the one that was sent, or a new one."},
    "ETag": _TEXT | {"description": "The module's version, in quotation marks."},
    "Location": _TEXT | {"description": "The path of what was made."},
    "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds after which to try again."},
}
