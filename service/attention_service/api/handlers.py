"""The handlers: the functions that answer the operations of the contract, for its routes and for every door.

A handler takes the call and the body, and returns the reply. Most are a call of the engine, and stand in the table.
A door imports from here whatever it uses of the API: handlers, calls, bodies, replies and errors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from starlette.responses import FileResponse, Response

from attention_contract import operations
from attention_contract.base import WireModel
from attention_contract.errors import Forbidden, InvalidRequest
from attention_contract.schemas.analyses.lenses import LensInfo, ModelLensRequest
from attention_contract.schemas.analyses.vectors import VectorInfo
from attention_contract.schemas.checkpoints import CheckpointReply, FetchCheckpoint
from attention_contract.schemas.costs.complexity import ComplexityReply, ComplexityRequest
from attention_contract.schemas.recordings import RecordingInfo, RecordingQuery
from attention_contract.schemas.server import Health
from attention_contract.tensor_files import from_pieces
from attention_contract.wire import GGUF, JSON, SAFETENSORS
from attention_service.api.bodies.negotiation import Reply, accepted, pieces_of, render
from attention_service.api.bodies.request_body import parsed, read_body
from attention_service.api.disconnection import unless_gone
from attention_service.api.endpoint import Handler, RequestContext, call_of, pinned, serve
from attention_service.api.problems import ErrorForm, request_id, status_elsewhere, unexpected
from attention_service.api.problems import render as refusal
from attention_service.api.replicas import following
from attention_service.api.request_head import Headers
from attention_service.api.server_facts import list_variants, server_info
from attention_service.cost.datasheet import HARDWARE
from attention_service.models.server.model_question import WrittenReply
from attention_service.modules.checkpoints import hub
from attention_service.runtime.operations.questions import QUESTIONS

__all__ = [
    "HANDLERS",
    "ErrorForm",
    "Handler",
    "Headers",
    "Reply",
    "RequestContext",
    "call_of",
    "following",
    "parsed",
    "pieces_of",
    "pinned",
    "read_body",
    "refusal",
    "render",
    "request_id",
    "serve",
    "status_elsewhere",
    "unexpected",
    "unless_gone",
]  # fmt: skip

ReplyT = TypeVar("ReplyT")

_OF_MODELS: Final = "model_"
"""The beginning of the names of questions about whole models; the rest is the name that the model's process knows."""


async def complexity(call: RequestContext, body: ComplexityRequest) -> ComplexityReply:
    """The cost of a shape or of a sweep that is not too long."""
    if body.sweep is not None and len(body.sweep.values) > call.settings.max_sweep:
        raise InvalidRequest.at(
            "sweep.values",
            f"it has {len(body.sweep.values)} sizes; max_sweep allows {call.settings.max_sweep}",
            limit=call.settings.max_sweep,
            actual=len(body.sweep.values),
        )
    return await call.engine.complexity(call.path.get("name"), body, call.deadline)


async def fetch_checkpoint(call: RequestContext, body: FetchCheckpoint) -> CheckpointReply:
    """A checkpoint of the hub, if the operator allows it."""
    if not call.settings.hub:
        raise Forbidden(
            f"{hub.unreachable(allowed=False)}, or puts the checkpoint into the model repository by: "
            f"attention fetch {body.repository}",
            param="repository",
            setting="ATTENTION_HUB",
        )
    return await call.engine.modules.fetch_checkpoint(body)


async def cancel_fetch(call: RequestContext, _: None) -> None:
    """Stop a fetch."""
    call.engine.modules.fetches.cancel(call.path["path"])


async def get_recording(call: RequestContext, body: RecordingQuery) -> RecordingInfo | Response:
    """A recording's description, one of its tensors, or its whole file."""
    if body.tensor_name() is None and accepted(call.headers, operations.get_recording) == SAFETENSORS:
        return _stored_file(call.id, await call.engine.recordings.path(call.id))
    return await call.engine.recordings.get(call.id, body)


async def get_vector(call: RequestContext, _: None) -> VectorInfo | Response:
    """A steering vector with its directions, or its GGUF file."""
    if call.media_type != GGUF:
        return await call.engine.fits.vectors.get(call.id)
    headers = {"Vary": "Accept", "Content-Disposition": f'attachment; filename="{call.id}.gguf"'}
    return Response(await call.engine.fits.vectors.gguf(call.id), media_type=GGUF, headers=headers)


async def get_lens(call: RequestContext, _: None) -> LensInfo | Response:
    """A lens's description, or its whole file."""
    fits = call.engine.fits.lenses
    return (
        _stored_file(call.id, await fits.path(call.id)) if call.media_type == SAFETENSORS else await fits.get(call.id)
    )


def _stored_file(name: str, path: Path) -> Response:
    return FileResponse(path, media_type=SAFETENSORS, headers={"Vary": "Accept"}, filename=f"{name}.safetensors")


async def health_live(call: RequestContext, _: None) -> Health:
    """The health of a server that makes progress."""
    call.engine.runner.check_live()
    return call.engine.health("live")


async def health_ready(call: RequestContext, _: None) -> Health:
    """The health of a server that takes work."""
    call.engine.check_ready()
    return call.engine.health("ready")


def _model_handler(question: str, kind: type[WireModel]) -> Handler:
    """The handler of a question about a whole model, whose process writes the reply."""

    async def answer(call: RequestContext, body: WireModel) -> WireModel | WrittenReply:
        form, lens = JSON if call.media_type == JSON else SAFETENSORS, None
        if isinstance(body, ModelLensRequest) and body.lens is not None:
            lens = await call.engine.fits.lenses.path(body.lens)
        reply = await call.engine.models.ask(call.model, question, body, form, lens)
        # It is read only to be drawn, or to become a JSON text that is too long to be made at once.
        return reply if reply.media_type == call.media_type else from_pieces(reply.pieces, "reply", kind)

    return answer


async def _known(reply: ReplyT) -> ReplyT:
    """A reply that is known at once."""
    return reply


def _question_handler(question: str) -> Handler:
    """The handler of a question about a module, or about raw attention if the path names none."""
    return lambda call, body: call.engine.ask(question, call.path.get("name"), body, call.deadline)


def _past_question_handler(question: str) -> Handler:
    """The handler of a question about new tokens over the past of a session."""
    return lambda call, body: call.engine.sessions.ask(question, call.id, body, call.deadline)


# A router tries its routes in this order, so the most frequent operations come first.
HANDLERS: Final[Mapping[str, Handler]] = {
    "forward": lambda call, body: call.engine.forward(call.name, body, call.deadline),
    "step_session": lambda call, body: call.engine.sessions.step(call.id, body, call.deadline),
    "raw_forward": lambda call, body: call.engine.forward(None, body, call.deadline),
    "step_sessions": lambda call, body: call.engine.sessions.steps(body, call.deadline),
    "create_pass": lambda call, body: call.engine.create_pass(call.name, body, call.deadline),
    "create_raw_pass": lambda call, body: call.engine.create_pass(None, body, call.deadline),
    "backward": lambda call, body: call.engine.backward(call.id, body, call.deadline),
    **{
        operation.name: _model_handler(operation.name.removeprefix(_OF_MODELS), operation.reply)
        for operation in operations.OPERATIONS
        if operation.name.startswith(_OF_MODELS) and operation.reply is not None
    },
    "fit_lens": lambda call, body: call.engine.fits.lenses.create(call.model, body),
    "list_lenses": lambda call, _: call.engine.fits.lenses.list(call.model),
    "get_lens": get_lens,
    "delete_lens": lambda call, _: call.engine.fits.lenses.delete(call.id),
    # the other questions about a module, and about raw attention
    **{f"{prefix}{question}": _question_handler(question) for question in QUESTIONS for prefix in ("", "raw_")},
    "complexity": complexity,
    "raw_complexity": complexity,
    "circuits": lambda call, body: call.engine.analyses.circuits(call.name, body, call.deadline),
    "rollout": lambda call, body: call.engine.analyses.rollout(body, call.deadline),
    "similarity": lambda call, body: call.engine.analyses.similarity(body, call.deadline),
    "hopfield_retrieve": lambda call, body: call.engine.analyses.retrieve(body, call.deadline),
    # sessions
    "list_sessions": lambda call, body: _known(call.engine.sessions.listing(body)),
    "open_session": lambda call, body: call.engine.sessions.open(call.name, body),
    "get_session": lambda call, _: _known(call.engine.sessions.info(call.id)),
    "delete_session": lambda call, _: call.engine.sessions.delete(call.id),
    "fork_session": lambda call, body: call.engine.sessions.fork(call.id, body),
    "truncate_session": lambda call, body: call.engine.sessions.truncate(call.id, body),
    "reorder_session": lambda call, body: call.engine.sessions.reorder(call.id, body),
    **{
        f"session_{question}": _past_question_handler(question)
        for question in QUESTIONS
        if hasattr(operations, f"session_{question}")
    },
    "get_session_cache": lambda call, _: call.engine.sessions.cache(call.id),
    "put_session_cache": lambda call, body: call.engine.sessions.replace_cache(call.id, body),
    # modules
    "list_modules": lambda call, _: _known(call.engine.modules.list()),
    "create_module": lambda call, body: call.engine.modules.create(body),
    "import_module": lambda call, body: call.engine.modules.import_checkpoint(body),
    "list_checkpoints": lambda call, _: call.engine.modules.checkpoints(),
    "fetch_checkpoint": fetch_checkpoint,
    "cancel_fetch": cancel_fetch,
    "get_checkpoint": lambda call, _: call.engine.modules.checkpoint(call.path["path"]),
    "get_module": lambda call, _: _known(call.engine.modules.get(call.name, call.pin).info()),
    "delete_module": lambda call, _: call.engine.modules.delete(call.name, call.pin),
    "list_parameters": lambda call, _: call.engine.modules.parameters(call.name, call.pin),
    "replace_parameters": lambda call, body: call.engine.modules.replace(call.name, body),
    "get_parameter": lambda call, body: call.engine.modules.parameter(call.name, call.path["parameter"], body),
    # whole models
    "list_models": lambda call, _: call.engine.models.list(),
    "load_model": lambda call, body: call.engine.models.load(body),
    "get_model": lambda call, _: call.engine.models.get(call.model),
    "unload_model": lambda call, _: call.engine.models.unload(call.model),
    "fit_probe": lambda call, body: call.engine.fits.probes.create(call.model, body),
    "list_probes": lambda call, _: call.engine.fits.probes.list(call.model),
    "get_probe": lambda call, _: call.engine.fits.probes.get(call.id),
    "delete_probe": lambda call, _: call.engine.fits.probes.delete(call.id),
    "fit_vector": lambda call, body: call.engine.fits.vectors.create(call.model, body),
    "list_vectors": lambda call, _: call.engine.fits.vectors.list(call.model),
    "get_vector": get_vector,
    "delete_vector": lambda call, _: call.engine.fits.vectors.delete(call.id),
    # recordings
    "list_recordings": lambda call, _: call.engine.recordings.list(),
    "create_recording": lambda call, body: call.engine.recordings.add(body),
    "get_recording": get_recording,
    "recording_statistics": lambda call, body: call.engine.recordings.statistics(call.id, body),
    "recording_similarity": lambda call, body: call.engine.recordings.similarity(call.id, body, call.deadline),
    "recording_rollout": lambda call, body: call.engine.recordings.rollout(call.id, body, call.deadline),
    "delete_recording": lambda call, _: call.engine.recordings.delete(call.id),
    # the server
    "server_info": server_info,
    "list_variants": list_variants,
    "accuracy": lambda call, _: _known(call.engine.accuracy_report()),
    "list_hardware": lambda _, __: _known(HARDWARE),
    "health_live": health_live,
    "health_ready": health_ready,
}
"""The handler of each native operation by its name."""
