"""The server's own facts: its version, device, limits and memory, and the entries of its registries."""

import torch

from attention_contract.json_reading import MAX_DEPTH, MAX_LISTS
from attention_contract.schemas.attention import MAX_TAPS
from attention_contract.schemas.costs.complexity import MAX_ALTERNATIVES
from attention_contract.schemas.server import HubInfo, Limits, Memory, ServerInfo, Variant, VariantList
from attention_contract.schemas.sessions import MAX_SEQUENCES, MAX_STEPS
from attention_contract.tensors import DTYPES, MAX_RANK
from attention_contract.wire import MEDIA_TYPES
from attention_service import __version__
from attention_service.api.endpoint import RequestContext
from attention_service.api.http_limits.descriptors import most_connections
from attention_service.api.request_head import MAX_HEADER_BYTES
from attention_service.core.registry import variants
from attention_service.modules.checkpoints import hub
from attention_service.runtime.callers import caller


async def server_info(call: RequestContext, _: None) -> ServerInfo:
    """The server's version, device, limits and memory."""
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
            host_budget_bytes=engine.host.total,
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
            models_bytes=engine.models.environment.memory.bytes,
            sessions_bytes=engine.sessions.pool.held,
            in_flight_bytes=engine.budget.in_flight,
            body_bytes=engine.host.bodies,
            reply_bytes=engine.host.replies,
            free_bytes=engine.budget.available,
        ),
        modules=len(engine.library.list()),
        session_kernel=engine.sessions.kernel,
        hub=HubInfo(
            problem=hub.unreachable(allowed=settings.hub),
            limit_bytes=settings.hub_limit,
            models=list(hub.SUGGESTED),
            fetching=[fetch.path for fetch in engine.modules.fetches.under_way()],
        ),
    )


async def list_variants(_: RequestContext, __: None) -> VariantList:
    """Every entry of the registries."""
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
