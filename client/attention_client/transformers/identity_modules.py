"""Modules whose projections are identities: a session of one takes queries, keys and values as they are.

Such a module is named by a hash of its config and parameters, so that all layers of equal attention share it. Its
heads are merged: query ``[B, L, H·D]``, key ``[B, L, Hkv·D]``, value ``[B, L, Hkv·Dv]``. A product with the identity
is exact.
"""

import hashlib
import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attention_client import Client
from attention_client.array_likes import as_array
from attention_client.calls.base import Call, ReplyT
from attention_client.calls.method import Blocking, Sender
from attention_client.connection_settings import StreamSettings
from attention_contract.errors import ModuleNotFound
from attention_contract.schemas.sessions import OpenSession
from attention_contract.spec import AttentionSpec, Causal, Mask, ScaledDot, SlidingWindow, Softmax

_DTYPES: Final = {torch.float64: "float64", torch.float32: "float32"} | {
    torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class RawAttention:
    """The attention of one layer: its shape and its computation."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    """The number of latest keys that a query sees, its own included; None for all."""

    @property
    def width(self) -> int:
        """Width of the module's query and output: room for all heads of either."""
        return self.heads * max(self.head_dim, self.value_dim)

    @property
    def mask(self) -> Mask:
        """The mask of the spec."""
        return Causal() if self.window is None else SlidingWindow(left=self.window - 1, right=0)

    def config(self, *, sinks: bool) -> dict[str, Any]:
        """The config of the module."""
        spec = AttentionSpec(
            score=ScaledDot(scale=self.scale), softcap=self.softcap, masks=[self.mask], normalizer=Softmax(sinks=sinks)
        )
        return {
            "d_model": self.width, "num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "value_dim": self.value_dim, "key_width": self.kv_heads * self.head_dim,
            "value_width": self.kv_heads * self.value_dim, "bias": False, "dtype": _DTYPES[self.dtype],
            "spec": spec.model_dump(mode="json"),
        }  # fmt: skip

    def parameters(self) -> dict[str, Tensor]:
        """The identity projections."""
        sizes = {
            "q_proj": (self.heads * self.head_dim, self.width),
            "k_proj": (self.kv_heads * self.head_dim,) * 2,
            "v_proj": (self.kv_heads * self.value_dim,) * 2,
            "o_proj": (self.width, self.heads * self.value_dim),
        }
        return {f"{name}.weight": torch.eye(*size, dtype=self.dtype) for name, size in sizes.items()}


class IdentityModules(Sender[Blocking]):
    """A client that makes the modules of its sessions when the server lacks them. Threads may share it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, tuple[RawAttention, Tensor | None]] = {}
        self._made: set[str] = set()
        self._lock = threading.Lock()

    def name(self, raw: RawAttention, sinks: Tensor | None) -> str:
        """Return the name of the module of an attention; ``sinks [H]``."""
        digest = hashlib.sha256(json.dumps(raw.config(sinks=sinks is not None), sort_keys=True).encode())
        if sinks is not None:
            sinks = sinks.detach().to(raw.dtype)
            digest.update(as_array(sinks).tobytes())
        name = f"session-cache-{digest.hexdigest()[:24]}"
        self._known[name] = raw, sinks
        return name

    def stream_settings(self) -> StreamSettings:
        """Return address, headers and policy of the client's streams."""
        return self._client.stream_settings()

    def send(self, call: Call[ReplyT]) -> ReplyT:
        """Send a call. Make the module of a session that opens, if there is none: at first, or after a restart."""
        name = call.path.get("name", "") if isinstance(call.request, OpenSession) else ""
        try:
            return self._client.send(call)
        except ModuleNotFound:
            if name not in self._known:
                raise
        with self._lock:  # one thread makes it, and the others find it
            try:
                return self._client.send(call)
            except ModuleNotFound:
                self._make(name)
        return self._client.send(call)

    def remove(self) -> None:
        """Delete the modules that were made here. Sessions of them, another cache's too, live on."""
        while self._made:
            with suppress(ModuleNotFound):
                self._client.modules.delete(self._made.pop())

    def _make(self, name: str) -> None:
        raw, sinks = self._known[name]
        parameters = raw.parameters() | ({} if sinks is None else {"sinks": sinks})
        self._client.modules.create(name, raw.config(sinks=sinks is not None), parameters=parameters, durable=False)
        self._made.add(name)
