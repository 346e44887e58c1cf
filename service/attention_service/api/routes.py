"""The operations of the contract. Each handler translates one into a call of the engine."""

from typing import Annotated

import torch
from fastapi import Query
from starlette.responses import FileResponse, Response

from attention_contract import operations
from attention_contract.errors import Forbidden, InvalidRequest
from attention_contract.json_reading import MAX_DEPTH, MAX_LISTS
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.attention import MAX_TAPS, ForwardReply, ForwardRequest, RawForwardRequest
from attention_contract.schemas.attribution import AttributionReply, AttributionRequest, RawAttributionRequest
from attention_contract.schemas.backward_passes import BackwardRequest, PassReply, PassRequest, RawPassRequest
from attention_contract.schemas.checkpoints import CheckpointList, CheckpointReply, FetchCheckpoint
from attention_contract.schemas.circuits import CircuitsReply, CircuitsRequest
from attention_contract.schemas.complexity import (
    MAX_ALTERNATIVES,
    ComplexityReply,
    ComplexityRequest,
    RawComplexityRequest,
)
from attention_contract.schemas.effects import EffectsReply, EffectsRequest, RawEffectsRequest
from attention_contract.schemas.gradients import GradientsReply, GradientsRequest, RawGradientsRequest
from attention_contract.schemas.hardware import HardwareList
from attention_contract.schemas.hopfield import HopfieldReply, HopfieldRequest
from attention_contract.schemas.modules import (
    CreateModule,
    ImportModule,
    ModuleInfo,
    ModuleList,
    Parameter,
    ParameterList,
    ParameterQuery,
    ReplaceParameters,
)
from attention_contract.schemas.recording_statistics import RecordingStatistics, RecordingStatisticsRequest
from attention_contract.schemas.recordings import (
    RecordingFile,
    RecordingInfo,
    RecordingList,
    RecordingQuery,
    RecordText,
)
from attention_contract.schemas.rollout import RecordingRollout, RecordingRolloutRequest, RolloutReply, RolloutRequest
from attention_contract.schemas.server import Health, Limits, Memory, ServerInfo, Variant, VariantList
from attention_contract.schemas.sessions import MAX_SEQUENCES, MAX_STEPS
from attention_contract.schemas.similarity import (
    RecordingSimilarity,
    RecordingSimilarityRequest,
    SimilarityReply,
    SimilarityRequest,
)
from attention_contract.schemas.text_predictions import PredictText, TextPredictions
from attention_contract.schemas.weights import RawWeightsRequest, WeightsReply, WeightsRequest
from attention_contract.tensors import DTYPES, MAX_RANK
from attention_contract.wire import MEDIA_TYPES, SAFETENSORS
from attention_service import __version__
from attention_service.api.bodies.negotiation import MAX_HEADER_BYTES, accepted
from attention_service.api.endpoint import CallDep
from attention_service.api.handlers import serve
from attention_service.api.http_limits.descriptors import most_connections
from attention_service.core.registry import variants
from attention_service.cost.hardware import HARDWARE
from attention_service.runtime.callers import caller
from attention_service.settings import Settings

# ── the four questions, of a module and of raw attention ─────────────────────────────────────────────────────────────


@serve(operations.forward)
async def forward(name: str, body: ForwardRequest, call: CallDep) -> ForwardReply:
    return await call.engine.forward(name, body, call.deadline, call.outline)


@serve(operations.raw_forward)
async def raw_forward(body: RawForwardRequest, call: CallDep) -> ForwardReply:
    return await call.engine.forward(None, body, call.deadline, call.outline)


@serve(operations.weights)
async def weights(name: str, body: WeightsRequest, call: CallDep) -> WeightsReply:
    return await call.engine.weights(name, body, call.deadline, call.outline)


@serve(operations.raw_weights)
async def raw_weights(body: RawWeightsRequest, call: CallDep) -> WeightsReply:
    return await call.engine.weights(None, body, call.deadline, call.outline)


@serve(operations.attribution)
async def attribution(name: str, body: AttributionRequest, call: CallDep) -> AttributionReply:
    return await call.engine.attribution(name, body, call.deadline)


@serve(operations.raw_attribution)
async def raw_attribution(body: RawAttributionRequest, call: CallDep) -> AttributionReply:
    return await call.engine.attribution(None, body, call.deadline)


@serve(operations.gradients)
async def gradients(name: str, body: GradientsRequest, call: CallDep) -> GradientsReply:
    return await call.engine.gradients(name, body, call.deadline, call.outline)


@serve(operations.raw_gradients)
async def raw_gradients(body: RawGradientsRequest, call: CallDep) -> GradientsReply:
    return await call.engine.gradients(None, body, call.deadline, call.outline)


@serve(operations.effects)
async def effects(name: str, body: EffectsRequest, call: CallDep) -> EffectsReply:
    return await call.engine.effects(name, body, call.deadline)


@serve(operations.raw_effects)
async def raw_effects(body: RawEffectsRequest, call: CallDep) -> EffectsReply:
    return await call.engine.effects(None, body, call.deadline)


@serve(operations.create_pass)
async def create_pass(name: str, body: PassRequest, call: CallDep) -> PassReply:
    return await call.engine.create_pass(name, body, call.deadline)


@serve(operations.create_raw_pass)
async def create_raw_pass(body: RawPassRequest, call: CallDep) -> PassReply:
    return await call.engine.create_pass(None, body, call.deadline)


@serve(operations.backward)
async def backward(id: str, body: BackwardRequest, call: CallDep) -> GradientsReply:  # noqa: A002 - the path's name
    return await call.engine.backward(id, body, call.deadline)


@serve(operations.complexity)
async def complexity(name: str, body: ComplexityRequest, call: CallDep) -> ComplexityReply:
    _check_sweep(body, call.settings)
    return await call.engine.complexity(name, body, call.deadline)


@serve(operations.raw_complexity)
async def raw_complexity(body: RawComplexityRequest, call: CallDep) -> ComplexityReply:
    _check_sweep(body, call.settings)
    return await call.engine.complexity(None, body, call.deadline)


def _check_sweep(body: ComplexityRequest, settings: Settings) -> None:
    if body.sweep is not None and len(body.sweep.values) > settings.max_sweep:
        raise InvalidRequest(
            f"sweep.values: it has {len(body.sweep.values)} sizes; max_sweep allows {settings.max_sweep}",
            param="sweep.values",
            limit=settings.max_sweep,
            actual=len(body.sweep.values),
        )


@serve(operations.circuits)
async def circuits(name: str, body: CircuitsRequest, call: CallDep) -> CircuitsReply:
    return await call.engine.circuits(name, body, call.deadline)


@serve(operations.rollout)
async def rollout(body: RolloutRequest, call: CallDep) -> RolloutReply:
    return await call.engine.rollout(body, call.deadline)


@serve(operations.similarity)
async def similarity(body: SimilarityRequest, call: CallDep) -> SimilarityReply:
    return await call.engine.similarity(body, call.deadline)


@serve(operations.hopfield_retrieve)
async def hopfield_retrieve(body: HopfieldRequest, call: CallDep) -> HopfieldReply:
    return await call.engine.retrieve(body, call.deadline)


# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@serve(operations.list_modules)
async def list_modules(call: CallDep) -> ModuleList:
    return call.engine.modules.list()


@serve(operations.create_module)
async def create_module(body: CreateModule, call: CallDep) -> ModuleInfo:
    return await call.engine.modules.create(body)


@serve(operations.import_module)
async def import_module(body: ImportModule, call: CallDep) -> ModuleInfo:
    return await call.engine.modules.import_checkpoint(body)


@serve(operations.list_checkpoints)
async def list_checkpoints(call: CallDep) -> CheckpointList:
    return await call.engine.modules.checkpoints()


@serve(operations.fetch_checkpoint)
async def fetch_checkpoint(body: FetchCheckpoint, call: CallDep) -> CheckpointReply:
    if not call.settings.hub:
        raise Forbidden(
            "this server fetches nothing from the hub; its operator allows it by ATTENTION_HUB=true (--hub), or puts "
            "the checkpoint into the model repository by: attention fetch " + body.repository,
            param="repository",
            setting="ATTENTION_HUB",
        )
    return await call.engine.modules.fetch_checkpoint(body)


@serve(operations.get_checkpoint)
async def get_checkpoint(path: str, call: CallDep) -> CheckpointReply:
    return await call.engine.modules.checkpoint(path)


@serve(operations.get_module)
async def get_module(name: str, call: CallDep) -> ModuleInfo:
    return call.engine.modules.get(name, call.pin).info()


@serve(operations.delete_module)
async def delete_module(name: str, call: CallDep) -> None:
    await call.engine.modules.delete(name, call.pin)


@serve(operations.list_parameters)
async def list_parameters(name: str, call: CallDep) -> ParameterList:
    return await call.engine.modules.parameters(name, call.pin)


@serve(operations.replace_parameters)
async def replace_parameters(name: str, body: ReplaceParameters, call: CallDep) -> ModuleInfo:
    return await call.engine.modules.replace(name, body)


@serve(operations.get_parameter)
async def get_parameter(
    name: str, parameter: str, body: Annotated[ParameterQuery, Query()], call: CallDep
) -> Parameter:
    return await call.engine.modules.parameter(name, parameter, body)


# ── recordings ───────────────────────────────────────────────────────────────────────────────────────────────────────


@serve(operations.list_recordings)
async def list_recordings(call: CallDep) -> RecordingList:
    return await call.engine.recordings.list()


@serve(operations.create_recording)
async def create_recording(body: RecordingFile, call: CallDep) -> RecordingInfo:
    return await call.engine.recordings.add(body)


@serve(operations.record_text)
async def record_text(body: RecordText, call: CallDep) -> RecordingInfo:
    return await call.engine.recordings.record_text(body, call.deadline)


@serve(operations.predict_text)
async def predict_text(body: PredictText, call: CallDep) -> TextPredictions:
    return await call.engine.recordings.predict_text(body, call.deadline)


@serve(operations.get_recording)
async def get_recording(
    id: str,  # noqa: A002 - the path's name
    body: Annotated[RecordingQuery, Query()],
    call: CallDep,
) -> RecordingInfo | Response:
    if body.tensor_name() is None and accepted(call.headers, operations.get_recording) == SAFETENSORS:
        path = await call.engine.recordings.path(id)
        return FileResponse(path, media_type=SAFETENSORS, headers={"Vary": "Accept"}, filename=f"{id}.safetensors")
    return await call.engine.recordings.get(id, body)


@serve(operations.recording_statistics)
async def recording_statistics(
    id: str,  # noqa: A002 - the path's name
    body: RecordingStatisticsRequest,
    call: CallDep,
) -> RecordingStatistics:
    return await call.engine.recordings.statistics(id, body)


@serve(operations.recording_similarity)
async def recording_similarity(
    id: str,  # noqa: A002
    body: RecordingSimilarityRequest,
    call: CallDep,
) -> RecordingSimilarity:
    return await call.engine.recordings.similarity(id, body, call.deadline)


@serve(operations.recording_rollout)
async def recording_rollout(
    id: str,  # noqa: A002
    body: RecordingRolloutRequest,
    call: CallDep,
) -> RecordingRollout:
    return await call.engine.recordings.rollout(id, body, call.deadline)


@serve(operations.delete_recording)
async def delete_recording(id: str, call: CallDep) -> None:  # noqa: A002 - the path's name
    await call.engine.recordings.delete(id)


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


@serve(operations.server_info)
async def server_info(call: CallDep) -> ServerInfo:
    engine, settings = call.engine, call.settings
    return ServerInfo(
        name="attention-service",
        version=__version__,
        torch=str(torch.__version__),
        device=engine.device.place,
        device_name=engine.device.name,
        dtypes=list(DTYPES),
        media_types=list(MEDIA_TYPES),
        limits=Limits(
            max_body_bytes=settings.max_body_bytes,
            max_json_bytes=settings.max_json_bytes,
            memory_budget_bytes=engine.budget.total,
            max_queue=settings.max_queue,
            max_json_values=settings.max_json_values,
            max_json_lists=MAX_LISTS,
            max_json_depth=MAX_DEPTH,
            max_tensor_rank=MAX_RANK,
            max_compression_ratio=settings.max_compression_ratio,
            max_head_bytes=settings.max_head_bytes,
            max_header_bytes=MAX_HEADER_BYTES,
            max_headers=settings.max_headers,
            max_connections=most_connections(settings.max_connections),
            max_connections_per_address=settings.max_connections_per_address,
            head_timeout_s=settings.head_timeout_s,
            body_timeout_s=settings.body_timeout_s,
            write_timeout_s=settings.write_timeout_s,
            idle_timeout_s=settings.idle_timeout_s,
            least_rate=settings.least_rate,
            max_modules=settings.max_modules,
            max_sessions=settings.max_sessions,
            recordings_bytes=settings.recordings_limit,
            max_sweep=settings.max_sweep,
            max_alternatives=MAX_ALTERNATIVES,
            max_taps=MAX_TAPS,
            max_steps=MAX_STEPS,
            max_sequences=MAX_SEQUENCES,
            max_predicted_s=settings.max_predicted_s,
            default_wait_s=settings.default_wait_s,
            caller=caller.get().limits,
        ),
        memory=Memory(
            resident_bytes=engine.library.resident_bytes,
            in_flight_bytes=engine.budget.in_flight,
            body_bytes=engine.budget.bodies,
            reply_bytes=engine.budget.replies,
            free_bytes=engine.budget.available,
        ),
        modules=len(engine.library.list()),
    )


@serve(operations.list_variants)
async def list_variants(call: CallDep) -> VariantList:
    return VariantList(
        variants=[
            Variant(
                kind=entry.kind,
                name=entry.name,
                summary=entry.summary,
                formula=entry.formula,
                gradient=entry.gradient,
                cost=entry.cost,
                source=entry.source,
                options=entry.schema,
            )
            for entry in variants()
        ]
    )


@serve(operations.accuracy)
async def accuracy(call: CallDep) -> AccuracyReply:
    return call.engine.accuracy_report()


@serve(operations.list_hardware)
async def list_hardware(call: CallDep) -> HardwareList:
    return HARDWARE


@serve(operations.health_live)
async def health_live(call: CallDep) -> Health:
    call.engine.runner.check_live()
    return call.engine.health("live")


@serve(operations.health_ready)
async def health_ready(call: CallDep) -> Health:
    call.engine.runner.check_ready()
    call.engine.runner.check_live()
    return call.engine.health("ready")
