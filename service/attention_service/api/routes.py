"""The routes: each one translates a call of the contract into a call of the engine."""

import torch
from fastapi import APIRouter

from attention_contract import operations
from attention_contract.schemas.accuracy import AccuracyReply
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.schemas.complexity import ComplexityReply, ComplexityRequest
from attention_contract.schemas.gradients import GradientsReply, GradientsRequest
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
from attention_contract.schemas.server import Health, Limits, Memory, ServerInfo, Variant, VariantList
from attention_contract.schemas.weights import WeightsReply, WeightsRequest
from attention_contract.tensors import DTYPES
from attention_contract.wire import MEDIA_TYPES
from attention_service import __version__
from attention_service.api.serving import Call, serve
from attention_service.core.registry import variants
from attention_service.cost import hardware
from attention_service.settings import Settings


def make_router(settings: Settings) -> APIRouter:
    """Every operation of the contract."""
    router = APIRouter()

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    @serve(router, operations.server_info)
    async def server_info(call: Call[None]) -> ServerInfo:
        engine = call.engine
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
                memory_budget_bytes=engine.budget.total,
                max_queue=settings.max_queue,
            ),
            memory=Memory(
                resident_bytes=engine.library.resident_bytes,
                in_flight_bytes=engine.budget.in_flight,
                free_bytes=engine.budget.free,
            ),
            modules=len(engine.library.list()),
        )

    @serve(router, operations.list_variants)
    async def list_variants(call: Call[None]) -> VariantList:
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

    @serve(router, operations.health_live)
    async def health_live(call: Call[None]) -> Health:
        return Health(status="live", modules=len(call.engine.library.list()))

    @serve(router, operations.health_ready)
    async def health_ready(call: Call[None]) -> Health:
        call.engine.check_ready()
        return Health(status="ready", modules=len(call.engine.library.list()))

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @serve(router, operations.list_modules)
    async def list_modules(call: Call[None]) -> ModuleList:
        return call.engine.modules()

    @serve(router, operations.create_module)
    async def create_module(call: Call[CreateModule]) -> ModuleInfo:
        return await call.engine.create(call.body)

    @serve(router, operations.import_module)
    async def import_module(call: Call[ImportModule]) -> ModuleInfo:
        return await call.engine.import_checkpoint(call.body)

    @serve(router, operations.get_module)
    async def get_module(call: Call[None]) -> ModuleInfo:
        return call.engine.module(call.name, call.pin).info()

    @serve(router, operations.delete_module)
    async def delete_module(call: Call[None]) -> None:
        await call.engine.delete(call.name, call.pin)

    @serve(router, operations.list_parameters)
    async def list_parameters(call: Call[None]) -> ParameterList:
        return await call.engine.parameters(call.name, call.pin)

    @serve(router, operations.replace_parameters)
    async def replace_parameters(call: Call[ReplaceParameters]) -> ModuleInfo:
        return await call.engine.replace(call.name, call.body)

    @serve(router, operations.get_parameter)
    async def get_parameter(call: Call[ParameterQuery]) -> Parameter:
        return await call.engine.parameter(call.name, call.path["parameter"], call.body)

    # ── the four questions, of a module and of raw attention ─────────────────────────────────────────────────────────

    @serve(router, operations.raw_forward)
    @serve(router, operations.forward)
    async def forward(call: Call[ForwardRequest]) -> ForwardReply:
        return await call.engine.forward(call.path.get("name"), call.body, call.deadline)

    @serve(router, operations.raw_weights)
    @serve(router, operations.weights)
    async def weights(call: Call[WeightsRequest]) -> WeightsReply:
        return await call.engine.weights(call.path.get("name"), call.body, call.deadline)

    @serve(router, operations.raw_gradients)
    @serve(router, operations.gradients)
    async def gradients(call: Call[GradientsRequest]) -> GradientsReply:
        return await call.engine.gradients(call.path.get("name"), call.body, call.deadline)

    @serve(router, operations.raw_complexity)
    @serve(router, operations.complexity)
    async def complexity(call: Call[ComplexityRequest]) -> ComplexityReply:
        return await call.engine.complexity(call.path.get("name"), call.body)

    @serve(router, operations.accuracy)
    async def accuracy(call: Call[None]) -> AccuracyReply:
        return call.engine.accuracy_report()

    @serve(router, operations.list_hardware)
    async def list_hardware(call: Call[None]) -> HardwareList:
        return hardware.listed()

    # ── Hopfield ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @serve(router, operations.hopfield_retrieve)
    async def hopfield_retrieve(call: Call[HopfieldRequest]) -> HopfieldReply:
        return await call.engine.retrieve(call.body, call.deadline)

    return router
