"""The answers of the Open Inference Protocol. Each is that of a native operation, translated."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope

from attention_contract.base import WireModel
from attention_contract.errors import AttentionError, Conflict, InvalidRequest, ModuleNotFound, Unreadable
from attention_contract.json_reading import TextSize, check_objects, from_json
from attention_contract.schemas.modules import CreateModule, ImportModule
from attention_contract.tensors import DTYPES, Array
from attention_contract.validation import clip, validate
from attention_contract.wire import JSON, to_json
from attention_service import __version__
from attention_service.api.bodies.negotiation import Headers
from attention_service.api.bodies.request_body import parsed, read_body
from attention_service.api.disconnection import unless_gone
from attention_service.api.endpoint import Call, Handler, call_of, pinned
from attention_service.api.http_limits.connection_limits import CAME
from attention_service.api.oip.inference_envelope import InferenceRequest, tensors_of
from attention_service.api.oip.inference_reply import HEADER_LENGTH, write
from attention_service.api.oip.model_description import configuration, metadata
from attention_service.api.oip.model_questions import (
    QUESTIONS,
    RAW,
    VERSION,
    Model,
    model_of,
    models_of,
    pin_of,
    request_of,
    unknown,
)
from attention_service.api.oip.model_statistics import ModelStatistics
from attention_service.api.oip.v2_errors import NotSupported
from attention_service.api.replicas import following
from attention_service.api.routes import HANDLERS
from attention_service.modules.resident import Module
from attention_service.runtime.request_timing import note
from attention_service.runtime.scheduling.budget import Body

EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")
ModelT = TypeVar("ModelT", bound=WireModel)
_TINY_HEAD: Final = 1024
"""Bytes of a JSON object that has too few values for any limit, as that of most requests with binary tensors."""
_HEADER: Final = HEADER_LENGTH.lower().encode()


class IndexRequest(WireModel):
    """The body of a request for the repository's index."""

    ready: bool = False
    """Only the models that are ready: all are."""


class RepositoryRequest(WireModel):
    """The body of a request to load or to unload a model."""

    parameters: dict[str, Any] | None = Field(default=None, max_length=64)


class V2Handlers:
    """Answers the requests of the protocol, each by the handler of a native operation."""

    def __init__(self, *, siblings: bool) -> None:
        """``siblings``: other processes change the modules too."""
        names = [operation.name for pair in QUESTIONS.values() for operation in pair]
        self._ask = {name: following(HANDLERS[name]) if siblings else HANDLERS[name] for name in names}
        self._module: Handler = following(_module) if siblings else _module
        self._statistics: dict[str, ModelStatistics] = {}

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def live(self, scope: Scope, _: Receive, __: Body) -> Response:
        """The health of a server that makes progress."""
        with _told("live"):
            await HANDLERS["health_live"](call_of(scope), None)
        return _json({"live": True})

    async def ready(self, scope: Scope, _: Receive, __: Body) -> Response:
        """The health of a server that takes work."""
        with _told("ready"):
            await HANDLERS["health_ready"](call_of(scope), None)
        return _json({"ready": True})

    async def server(self, _: Scope, __: Receive, ___: Body) -> Response:
        """The server's name, version and extensions."""
        return _json({"name": "attention-service", "version": __version__, "extensions": EXTENSIONS})

    async def not_supported(self, _: Scope, __: Receive, ___: Body) -> Response:
        """The refusal of an extension that this server leaves out."""
        raise NotSupported(
            f"this server has no traces, log settings, shared memory and text generation under /v2; its extensions are "
            f"{', '.join(EXTENSIONS)}"
        )

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def model_ready(self, scope: Scope, _: Receive, __: Body) -> Response:
        """The readiness of a model: each that is known is ready."""
        model, _module, _call = await self._found(scope)
        return _json({"name": model.name, "ready": True})

    async def metadata(self, scope: Scope, _: Receive, __: Body) -> Response:
        """The inputs and outputs of a model."""
        model, module, _call = await self._found(scope)
        return _json(metadata(model, module))

    async def config(self, scope: Scope, _: Receive, __: Body) -> Response:
        """The configuration of a model."""
        model, module, _call = await self._found(scope)
        return _json(configuration(model, module))

    async def statistics(self, scope: Scope, _: Receive, __: Body) -> Response:
        """The statistics of one model, or of all."""
        if "model" in scope["path_params"]:
            model, _module, _call = await self._found(scope)
            names = [model.name]
        else:
            names = _names(call_of(scope))
        return _json({"model_stats": [self._statistics.get(name, ModelStatistics()).report(name) for name in names]})

    async def infer(self, scope: Scope, receive: Receive, memory: Body) -> Response:
        """The outputs of a model."""
        began = time.monotonic()
        model, module, call = await self._found(scope)
        statistics = self._statistics.get(model.name)
        if statistics is None:
            known = set(_names(call))
            self._statistics = {name: each for name, each in self._statistics.items() if name in known}
            statistics = self._statistics[model.name] = ModelStatistics()
        try:
            envelope, request = await _read(scope, receive, memory, call, model, module)
            if call.pin is not None:
                request = pinned(request, call.pin)
            read_s = time.monotonic() - began
            if (timeout := envelope.timeout_s) is not None:
                until = scope.get("state", {}).get(CAME, began) + timeout
                call.deadline = until if call.deadline is None else min(until, call.deadline)
            told = envelope.id, envelope.wanted, envelope.binary_by_default
            del envelope
            work = self._ask[model.operation.name](call, request)
            reply = await unless_gone(receive, work, call.deadline)
            del request, work  # the reply may take their memory
            memory.give_back()
            writing = time.monotonic()
            response = await write(model, reply, *told, memory)
        except AttentionError as error:
            statistics.fail(time.monotonic() - began)
            if isinstance(error, ModuleNotFound):  # deleted since it was found
                raise unknown(model.name) from None
            raise
        statistics.add(reply.ran, read_s, time.monotonic() - writing)
        return response

    # ── the repository ───────────────────────────────────────────────────────────────────────────────────────────────

    async def index(self, scope: Scope, receive: Receive, memory: Body) -> Response:
        """Every model."""
        call = call_of(scope)
        await _small(IndexRequest, scope, receive, memory, call)
        told = {"version": VERSION, "state": "READY", "reason": ""}
        return _json([{"name": name} | told for name in _names(call)])

    async def load(self, scope: Scope, receive: Receive, memory: Body) -> Response:
        """Make the module that ``config`` describes, in memory alone unless it says otherwise."""
        model, call = _of_repository(scope)
        body = await _small(RepositoryRequest, scope, receive, memory, call)
        config = _repository_parameters(body, "config").get("config")
        if config is None:
            await self._found(scope)
            return Response()
        if not isinstance(config, str) or model.module is None:
            expected = "the JSON text of a body of POST /v1/modules or /v1/modules/import, for a module"
            raise InvalidRequest.at("parameters.config", f"expected {expected}")
        try:
            data = {"durable": False} | from_json(config.encode(), "the text") | {"name": model.module}
        except Unreadable as fault:
            raise InvalidRequest.at("parameters.config", fault.detail) from None
        name, kind = ("import_module", ImportModule) if "checkpoint" in data else ("create_module", CreateModule)
        await unless_gone(receive, HANDLERS[name](call, validate(kind, data, by_name=False)), call.deadline)
        return Response()

    async def unload(self, scope: Scope, receive: Receive, memory: Body) -> Response:
        """Remove a module that is in memory alone."""
        _, call = _of_repository(scope)
        body = await _small(RepositoryRequest, scope, receive, memory, call)
        if not isinstance(_repository_parameters(body, "unload_dependents").get("unload_dependents", False), bool):
            raise InvalidRequest.at("parameters.unload_dependents", "expected true or false")
        _, module, call = await self._found(scope)
        if module is None or module.durable:
            kept = "raw attention is always there" if module is None else (
                f"the store keeps the module {module.name!r}, and unloading would lose it for good, which DELETE "
                f"/v1/modules/{module.name} does"
            )  # fmt: skip
            raise Conflict(f"{kept}; unload what was loaded with a config", param="name")
        await unless_gone(receive, HANDLERS["delete_module"](call, None), call.deadline)
        return Response()

    async def _found(self, scope: Scope) -> tuple[Model, Module | None, Call]:
        """The model and the module that a path names, and the request's call. Raises ModuleNotFound in V2's words."""
        path = scope["path_params"]
        model = model_of(path["model"])
        call = call_of(scope)
        if (pin := pin_of(path.get("version"), model)) is not None:
            if call.pin not in {None, pin}:
                raise InvalidRequest.at("If-Match", "it and the path name different versions; send one of them")
            call.pin = pin
        if model.module is None:
            call.engine.runner.check_ready()
            return model, None, call
        call.path = {"name": model.module}
        try:
            return model, await self._module(call, None), call
        except ModuleNotFound:
            raise unknown(model.name) from None


async def _module(call: Call, _: None) -> Module:
    return call.engine.modules.get(call.name, call.pin)


async def _read(
    scope: Scope, receive: Receive, memory: Body, call: Call, model: Model, module: Module | None
) -> tuple[InferenceRequest, WireModel]:
    """The envelope in a body, and the native request that it stands for."""
    settings, length = call.settings, _header_length(call.headers)
    limit = settings.max_body_bytes if length is not None else min(settings.max_body_bytes, settings.max_json_bytes)
    ratio, state = settings.max_compression_ratio, scope.get("state", {})
    body = await read_body(call.headers, receive, limit, memory, ratio, state)
    if length is not None and length > len(body):
        raise InvalidRequest.at(HEADER_LENGTH, f"it says {length} bytes; the body has {len(body)}, decompressed")
    if length == 0:
        envelope = InferenceRequest(inputs=[], parameters={"binary_data_output": True})
        return envelope, request_of(model, {}, (), {"query": _raw_input(module, body)})
    head, behind = (body, body[:0]) if length is None else (body[:length], body[length:])

    def read(text: memoryview, size: TextSize | None) -> tuple[InferenceRequest, WireModel]:
        envelope = _model(InferenceRequest, text, size)
        envelope.check()
        request = request_of(model, envelope.options, envelope.wanted, tensors_of(envelope, behind))
        pin = pin_of(envelope.model_version, model)
        return envelope, request if pin is None else pinned(request, pin)

    if len(head) <= _TINY_HEAD:
        began = time.monotonic()
        found = read(head, None)
        note("decode", began)
        return found
    return await parsed(head, read, JSON, settings, memory)


def _header_length(headers: Headers) -> int | None:
    """The bytes of the JSON object, uncompressed, if others follow it. Raises InvalidRequest for no number."""
    text = headers.get(_HEADER)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise InvalidRequest.at(HEADER_LENGTH, "expected the number of bytes of the JSON object, or 0 for none")
    return int(text)


def _raw_input(module: Module | None, body: memoryview) -> Array:
    """The query in a body that is nothing else: tokens of a module, in its dtype."""
    if module is None:
        raise InvalidRequest.at(HEADER_LENGTH, f"{RAW} has inputs of any width; describe them in a JSON object")
    dtype, width = DTYPES[module.config.dtype or "float32"], module.sizes.d_model
    if not body or len(body) % (width * dtype.itemsize):
        raise InvalidRequest.at(
            "query",
            f"the body has {len(body)} bytes; expected a multiple of {width * dtype.itemsize}, the bytes of a token",
        )
    array = np.frombuffer(body, dtype).reshape(-1, width)
    return array if array.flags.aligned else array.copy()


async def _small(kind: type[WireModel], scope: Scope, receive: Receive, memory: Body, call: Call) -> Any:
    """A body that may be empty, as a model."""
    settings, state = call.settings, scope.get("state", {})
    ratio = settings.max_compression_ratio
    body = await read_body(call.headers, receive, settings.max_json_bytes, memory, ratio, state)
    return await parsed(body, partial(_model, kind), JSON, settings, memory) if body else kind()


def _model(kind: type[ModelT], text: memoryview, size: TextSize | None) -> ModelT:
    """A JSON text of this measured size as a model."""
    if size is not None:
        check_objects(size.items)
    return validate(kind, from_json(text), by_name=False)


def _of_repository(scope: Scope) -> tuple[Model, Call]:
    """The module that a path of the repository names, and the request's call."""
    model = model_of(scope["path_params"]["model"])
    if model.question:
        raise InvalidRequest.at("name", f"{clip(model.name)!r} is a question about a module; name the module alone")
    return model, call_of(scope)


def _repository_parameters(body: RepositoryRequest, known: str) -> Mapping[str, Any]:
    """The parameters of a request to load or unload. Raises InvalidRequest for another one, a file among them."""
    given = body.parameters or {}
    for name in given:
        if name != known:
            advice = "files are not taken from requests; put them into the model repository" if name.startswith(
                "file:"
            ) else f"there is no such parameter; expected {known}"  # fmt: skip
            raise InvalidRequest.at(f"parameters.{clip(name)}", advice)
    return given


def _names(call: Call) -> list[str]:
    """The names of all models."""
    modules = [module.name for module in call.engine.modules.list().modules]
    return [model.name for module in (*modules, RAW) for model in models_of(module)]


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type=JSON)


@contextmanager
def _told(state: str) -> Iterator[None]:
    """Say in an error that the server is not in this state."""
    try:
        yield
    except AttentionError as error:
        error.facts[state] = False
        raise
