"""The operations of decode sessions. Each handler translates one into a call of ``engine.sessions``."""

from typing import Annotated

from fastapi import Depends, Query

from attention_contract import operations
from attention_contract.schemas.attribution import AttributionReply
from attention_contract.schemas.effects import EffectsReply
from attention_contract.schemas.gradients import GradientsReply
from attention_contract.schemas.sessions import (
    ForkSession,
    ListSessions,
    OpenSession,
    ReorderSession,
    ReplaceCache,
    SessionAttributionRequest,
    SessionCache,
    SessionEffectsRequest,
    SessionGradientsRequest,
    SessionInfo,
    SessionList,
    SessionWeightsRequest,
    StepReply,
    StepRequest,
    StepsReply,
    StepsRequest,
    TruncateSession,
)
from attention_contract.schemas.weights import WeightsReply
from attention_service.api.endpoint import CallDep
from attention_service.api.handlers import serve

# ruff: noqa: A002 - `id` is the name in the path

NoBody = Annotated[None, Depends(lambda: None)]
"""The body of a GET whose reply has tensors. FastAPI would document a plain None as a parameter of the query."""

# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@serve(operations.step_session)
async def step_session(id: str, body: StepRequest, call: CallDep) -> StepReply:
    return await call.engine.sessions.step(id, body, call.deadline)


@serve(operations.step_sessions)
async def step_sessions(body: StepsRequest, call: CallDep) -> StepsReply:
    return await call.engine.sessions.steps(body, call.deadline)


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@serve(operations.list_sessions)
async def list_sessions(body: Annotated[ListSessions, Query()], call: CallDep) -> SessionList:
    return call.engine.sessions.listing(body)


@serve(operations.open_session)
async def open_session(name: str, body: OpenSession, call: CallDep) -> SessionInfo:
    return await call.engine.sessions.open(name, body)


@serve(operations.get_session)
async def get_session(id: str, call: CallDep) -> SessionInfo:
    return call.engine.sessions.info(id)


@serve(operations.delete_session)
async def delete_session(id: str, call: CallDep) -> None:
    await call.engine.sessions.delete(id)


@serve(operations.fork_session)
async def fork_session(id: str, body: ForkSession, call: CallDep) -> SessionInfo:
    return await call.engine.sessions.fork(id, body)


@serve(operations.truncate_session)
async def truncate_session(id: str, body: TruncateSession, call: CallDep) -> SessionInfo:
    return await call.engine.sessions.truncate(id, body)


@serve(operations.reorder_session)
async def reorder_session(id: str, body: ReorderSession, call: CallDep) -> SessionInfo:
    return await call.engine.sessions.reorder(id, body)


# ── the past ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@serve(operations.session_weights)
async def session_weights(id: str, body: SessionWeightsRequest, call: CallDep) -> WeightsReply:
    return await call.engine.sessions.weights(id, body, call.deadline)


@serve(operations.session_effects)
async def session_effects(id: str, body: SessionEffectsRequest, call: CallDep) -> EffectsReply:
    return await call.engine.sessions.effects(id, body, call.deadline)


@serve(operations.session_attribution)
async def session_attribution(id: str, body: SessionAttributionRequest, call: CallDep) -> AttributionReply:
    return await call.engine.sessions.attribution(id, body, call.deadline)


@serve(operations.session_gradients)
async def session_gradients(id: str, body: SessionGradientsRequest, call: CallDep) -> GradientsReply:
    return await call.engine.sessions.gradients(id, body, call.deadline)


@serve(operations.get_session_cache)
async def get_session_cache(id: str, body: NoBody, call: CallDep) -> SessionCache:
    return await call.engine.sessions.cache(id)


@serve(operations.put_session_cache)
async def put_session_cache(id: str, body: ReplaceCache, call: CallDep) -> SessionInfo:
    return await call.engine.sessions.replace_cache(id, body)
