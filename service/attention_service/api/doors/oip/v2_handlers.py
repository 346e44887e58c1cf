"""The answers of the Open Inference Protocol. Each is that of a native operation, translated."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope

from attention_contract.errors import AttentionError, InvalidRequest, ModuleNotFound
from attention_contract.schemas.modules import ImportModule
from attention_contract.wire import JSON, to_json
from attention_service import __version__
from attention_service.api.doors.oip.inference_body import read_inference, read_small
from attention_service.api.doors.oip.inference_reply import write
from attention_service.api.doors.oip.model_metadata import configuration, metadata
from attention_service.api.doors.oip.model_questions import QUESTIONS, Model, model_of, pin_of, unknown
from attention_service.api.doors.oip.model_statistics import ModelStatistics
from attention_service.api.doors.oip.module_repository import (
    IndexRequest,
    LoadRequest,
    check_is_module,
    check_may_go,
    index,
    model_names,
    module_request,
)
from attention_service.api.doors.oip.v2_errors import NotSupported
from attention_service.api.handlers import HANDLERS, Handler, RequestContext, call_of, following, unless_gone
from attention_service.modules.resident import Module
from attention_service.runtime.scheduling.budget import BodyMemory

EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "model_repository", "parameters", "statistics")


class V2Handlers:
    """Answers the requests of the protocol, each by the handler of a native operation."""

    def __init__(self, *, siblings: bool) -> None:
        """``siblings``: other processes change the modules too."""
        names = [operation.name for pair in QUESTIONS.values() for operation in pair]
        self._ask = {name: following(HANDLERS[name]) if siblings else HANDLERS[name] for name in names}
        self._module: Handler = following(_module) if siblings else _module
        self._statistics: dict[str, ModelStatistics] = {}

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def live(self, scope: Scope, _: Receive, __: BodyMemory) -> Response:
        """The health of a server that makes progress."""
        with _state_in_error("live"):
            await HANDLERS["health_live"](call_of(scope), None)
        return _json({"live": True})

    async def ready(self, scope: Scope, _: Receive, __: BodyMemory) -> Response:
        """The health of a server that takes work."""
        with _state_in_error("ready"):
            await HANDLERS["health_ready"](call_of(scope), None)
        return _json({"ready": True})

    async def server(self, _: Scope, __: Receive, ___: BodyMemory) -> Response:
        """The server's name, version and extensions."""
        return _json({"name": "attention-service", "version": __version__, "extensions": EXTENSIONS})

    async def not_supported(self, _: Scope, __: Receive, ___: BodyMemory) -> Response:
        """The refusal of an extension that this server leaves out."""
        raise NotSupported(
            f"this server has no traces, log settings, shared memory and text generation under /v2; its extensions are "
            f"{', '.join(EXTENSIONS)}"
        )

    # ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def model_ready(self, scope: Scope, _: Receive, __: BodyMemory) -> Response:
        """The readiness of a model: each that is known is ready."""
        model, _module, _call = await self._found(scope)
        return _json({"name": model.name, "ready": True})

    async def metadata(self, scope: Scope, _: Receive, __: BodyMemory) -> Response:
        """The inputs and outputs of a model."""
        model, module, _call = await self._found(scope)
        return _json(metadata(model, module))

    async def config(self, scope: Scope, _: Receive, __: BodyMemory) -> Response:
        """The configuration of a model."""
        model, module, _call = await self._found(scope)
        return _json(configuration(model, module))

    async def statistics(self, scope: Scope, _: Receive, __: BodyMemory) -> Response:
        """The statistics of one model, or of all."""
        if "model" in scope["path_params"]:
            model, _module, _call = await self._found(scope)
            names = [model.name]
        else:
            names = model_names(call_of(scope))
        return _json({"model_stats": [self._statistics.get(name, ModelStatistics()).report(name) for name in names]})

    async def infer(self, scope: Scope, receive: Receive, memory: BodyMemory) -> Response:
        """The outputs of a model."""
        began = time.monotonic()
        model, module, call = await self._found(scope)
        statistics = self._statistics.get(model.name)
        if statistics is None:
            known = set(model_names(call))
            self._statistics = {name: statistic for name, statistic in self._statistics.items() if name in known}
            statistics = self._statistics[model.name] = ModelStatistics()
        try:
            envelope, request = await read_inference(scope, receive, memory, call, model, module)
            read_s = time.monotonic() - began
            if (timeout := envelope.timeout_s) is not None:
                until = call.came + timeout
                call.deadline = until if call.deadline is None else min(until, call.deadline)
            form = envelope.id, envelope.wanted, envelope.binary_by_default
            del envelope
            work = self._ask[model.operation.name](call, request)
            reply = await unless_gone(receive, work, call.deadline)
            del request, work  # the reply may take their memory
            memory.give_back()
            writing = time.monotonic()
            response = await write(model, reply, *form, memory)
        except AttentionError as error:
            statistics.fail(time.monotonic() - began)
            if isinstance(error, ModuleNotFound):  # deleted since it was found
                raise unknown(model.name) from None
            raise
        statistics.add(reply.ran, read_s, time.monotonic() - writing)
        return response

    # ── the repository ───────────────────────────────────────────────────────────────────────────────────────────────

    async def index(self, scope: Scope, receive: Receive, memory: BodyMemory) -> Response:
        """Every model."""
        call = call_of(scope)
        await read_small(IndexRequest, scope, receive, memory, call)
        return _json(index(call))

    async def load(self, scope: Scope, receive: Receive, memory: BodyMemory) -> Response:
        """Make a module by its config; without one, look whether it is there."""
        model, call = model_of(scope["path_params"]["model"]), call_of(scope)
        check_is_module(model)
        config = (await read_small(LoadRequest, scope, receive, memory, call)).parameter("config")
        if config is None:
            await self._found(scope)
        else:
            request = module_request(model, config)
            made = HANDLERS["import_module" if isinstance(request, ImportModule) else "create_module"]
            await unless_gone(receive, made(call, request), call.deadline)
        return Response()

    async def unload(self, scope: Scope, receive: Receive, memory: BodyMemory) -> Response:
        """Remove a module that is in memory alone."""
        check_is_module(model_of(scope["path_params"]["model"]))
        body = await read_small(LoadRequest, scope, receive, memory, call_of(scope))
        if type(body.parameter("unload_dependents") or False) is not bool:
            raise InvalidRequest.at("parameters.unload_dependents", "expected true or false")
        _, module, call = await self._found(scope)
        check_may_go(module)
        await unless_gone(receive, HANDLERS["delete_module"](call, None), call.deadline)
        return Response()

    async def _found(self, scope: Scope) -> tuple[Model, Module | None, RequestContext]:
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


async def _module(call: RequestContext, _: None) -> Module:
    return call.engine.modules.get(call.name, call.pin)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type=JSON)


@contextmanager
def _state_in_error(state: str) -> Iterator[None]:
    """Say in an error that the server is not in this state."""
    try:
        yield
    except AttentionError as error:
        error.facts[state] = False
        raise
