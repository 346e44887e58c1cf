"""The server itself: what it is, what it can do, and how it is."""

from typing import Any, Literal

from attention_contract.base import WireModel


class Limits(WireModel):
    """The limits of the server."""

    max_body_bytes: int
    """Bytes of one request body."""
    max_json_bytes: int
    """Bytes of one JSON body."""
    memory_budget_bytes: int
    """Bytes that resident modules and running requests may hold together."""
    max_queue: int
    """Requests that may wait."""


class Memory(WireModel):
    """The state of the memory budget."""

    resident_bytes: int
    in_flight_bytes: int
    free_bytes: int


class ServerInfo(WireModel):
    """The server and its device."""

    name: str
    version: str
    torch: str
    device: str
    """The device, such as ``cpu`` or ``cuda:0``."""
    device_name: str
    dtypes: list[str]
    media_types: list[str]
    limits: Limits
    memory: Memory
    modules: int


class Variant(WireModel):
    """One registered entry: a score, mask, position, normalizer, method or kernel."""

    kind: Literal["score", "mask", "position", "normalizer", "method", "kernel"]
    name: str
    summary: str
    formula: str
    gradient: str
    """The formula of its gradient, with ∂x for ∂L/∂x."""
    cost: str
    """Asymptotic cost in the sequence length n and the head width d."""
    source: str
    options: dict[str, Any]
    """JSON Schema of its options."""


class VariantList(WireModel):
    """Everything that a spec can say here."""

    variants: list[Variant]


class Health(WireModel):
    """The health of the server."""

    status: Literal["live", "ready", "loading", "draining"]
    modules: int
    """Modules resident so far."""
