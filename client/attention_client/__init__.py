"""A typed client of the attention service.

    import numpy as np
    from attention_client import Client

    with Client("http://127.0.0.1:8000") as client:
        client.modules.create("demo", {"d_model": 8, "num_heads": 2}, seed=0)
        reply = client.forward("demo", np.ones((1, 4, 8), np.float32), return_=["output", "weights"])
        print(reply.output.shape, reply.ran.compute_ms)

``local()`` starts a server for this program, and returns a client of it. ``look("tiny", "the cat sat")`` shows the
heads of a whole model.

``AsyncClient`` has the same methods, awaited. Tensors are numpy arrays (bfloat16 by way of ml_dtypes), torch tensors or
nested lists; replies are the typed models of ``attention_contract.schemas`` and hold numpy arrays.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attention_client.array_likes import TensorLike as TensorLike
    from attention_client.async_client import AsyncClient as AsyncClient
    from attention_client.client import Client as Client
    from attention_client.errors import ConnectionFailed as ConnectionFailed
    from attention_client.errors import ServerNotStarted as ServerNotStarted
    from attention_client.errors import UnexpectedReply as UnexpectedReply
    from attention_client.servers.local_clients import async_local as async_local
    from attention_client.servers.local_clients import local as local
    from attention_client.servers.looks import look as look
    from attention_client.sessions.live_session import AsyncSession as AsyncSession
    from attention_client.sessions.live_session import Session as Session
    from attention_contract.errors import *  # noqa: F403 - every class of errors
    from attention_contract.spec import AttentionSpec as AttentionSpec

_PLACES: Final = {
    "AsyncClient": "attention_client.async_client",
    "AsyncSession": "attention_client.sessions.live_session",
    "AttentionSpec": "attention_contract.spec",
    "Client": "attention_client.client",
    "ConnectionFailed": "attention_client.errors",
    "ServerNotStarted": "attention_client.errors",
    "Session": "attention_client.sessions.live_session",
    "TensorLike": "attention_client.array_likes",
    "UnexpectedReply": "attention_client.errors",
    "async_local": "attention_client.servers.local_clients",
    "local": "attention_client.servers.local_clients",
    "look": "attention_client.servers.looks",
}
"""The modules of the names, imported when one is used. The other names are the contract's errors."""
_ERRORS: Final = "attention_contract.errors"


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*_PLACES, *import_module(_ERRORS).__all__]
    if name not in _PLACES and (name.startswith("_") or name not in import_module(_ERRORS).__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(_PLACES.get(name, _ERRORS)), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
