"""A typed client of the attention service.

    import numpy as np
    from attention_client import Client

    with Client("http://127.0.0.1:8000") as client:
        client.modules.create("demo", {"d_model": 8, "num_heads": 2}, seed=0)
        reply = client.forward("demo", np.ones((1, 4, 8), np.float32), return_=["output", "weights"])
        print(reply.output.shape, reply.ran.compute_ms)

``AsyncClient`` has the same methods, awaited. Tensors are numpy arrays (bfloat16 by way of ml_dtypes), torch tensors or
nested lists; replies are the typed models of ``attention_contract.schemas`` and hold numpy arrays.
"""

from attention_client.array_likes import TensorLike
from attention_client.async_client import AsyncClient
from attention_client.client import Client
from attention_client.errors import ConnectionFailed, DeadlineExceeded, UnexpectedReply
from attention_client.sessions.live_session import AsyncSession, Session
from attention_contract.errors import (
    AttentionError,
    BodyTooLarge,
    CallerLimit,
    Cancelled,
    CheckpointNotFound,
    Conflict,
    ConnectionsExhausted,
    Draining,
    Forbidden,
    HeadTooLarge,
    InternalError,
    InvalidCheckpoint,
    InvalidRequest,
    InvalidTensor,
    KernelUnsuitable,
    LengthMismatch,
    Loading,
    MethodNotAllowed,
    Misdirected,
    ModuleExists,
    ModuleNotFound,
    NeverFits,
    NoRoom,
    NotAcceptable,
    NotFound,
    OverBudget,
    Overloaded,
    ParameterNotFound,
    PassNotFound,
    RecordingNotFound,
    SessionGone,
    SessionNotFound,
    ShapeMismatch,
    StoreFull,
    StoreReadOnly,
    Stuck,
    TooLarge,
    TooLong,
    TooManyConnections,
    TooSlow,
    Unauthorized,
    Unavailable,
    Unreadable,
    UnsupportedMediaType,
    VersionMismatch,
)
from attention_contract.spec import AttentionSpec

__all__ = [
    "AsyncClient", "AsyncSession", "AttentionError", "AttentionSpec", "BodyTooLarge", "CallerLimit", "Cancelled",
    "CheckpointNotFound", "Client", "Conflict", "ConnectionFailed", "ConnectionsExhausted", "DeadlineExceeded",
    "Draining", "Forbidden", "HeadTooLarge", "InternalError", "InvalidCheckpoint", "InvalidRequest", "InvalidTensor",
    "KernelUnsuitable", "LengthMismatch", "Loading", "MethodNotAllowed", "Misdirected", "ModuleExists",
    "ModuleNotFound", "NeverFits", "NoRoom", "NotAcceptable", "NotFound", "OverBudget", "Overloaded",
    "ParameterNotFound", "PassNotFound", "RecordingNotFound", "Session", "SessionGone", "SessionNotFound",
    "ShapeMismatch", "StoreFull", "StoreReadOnly", "Stuck", "TensorLike", "TooLarge", "TooLong", "TooManyConnections",
    "TooSlow", "Unauthorized", "Unavailable", "UnexpectedReply", "Unreadable", "UnsupportedMediaType",
    "VersionMismatch",
]  # fmt: skip
