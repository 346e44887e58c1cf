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
from attention_client.errors import ConnectionFailed, UnexpectedReply
from attention_client.sessions.live_session import AsyncSession, Session
from attention_contract import errors as _errors
from attention_contract.errors import *  # noqa: F403 - every class of errors
from attention_contract.spec import AttentionSpec

__all__ = [
    "AsyncClient", "AsyncSession", "AttentionSpec", "Client", "ConnectionFailed", "Session",
    "TensorLike", "UnexpectedReply",
]  # fmt: skip
__all__ += _errors.__all__
