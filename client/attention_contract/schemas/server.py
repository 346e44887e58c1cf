"""The server itself: what it is, what it can do, and how it is."""

from typing import Any, Literal

from pydantic import Field

from attention_contract.base import WireModel


class CallerLimits(WireModel):
    """The limits of one caller: one API key, or one address where no key is used. Null where there is none."""

    requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests and messages of streams a second, over two seconds."""
    bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Bytes of bodies a second, over two seconds."""
    device_ms_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Milliseconds of the device for each second, over two seconds; a request has its share of a joint pass."""
    concurrent: int | None = Field(default=None, ge=1)
    """Requests at a time."""
    modules: int | None = Field(default=None, ge=0)
    """Resident modules that the caller made since the server's start."""
    sessions: int | None = Field(default=None, ge=0)
    """Live sessions."""
    session_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the pages of the caller's sessions."""
    recordings_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the recordings that belong to the caller alone."""


class Limits(WireModel):
    """The limits of the server. Most are settings of its operator."""

    max_body_bytes: int
    """Bytes of one request body."""
    max_json_bytes: int
    """Bytes of one JSON body."""
    memory_budget_bytes: int
    """Bytes that resident modules and running requests may hold together."""
    host_budget_bytes: int
    """Bytes of the host for bodies, results, replies and recordings beside a GPU; on a CPU the same budget."""
    max_queue: int
    """Requests that may wait."""
    max_json_values: int
    """Numbers and other values in one JSON body."""
    max_json_lists: int
    """Lists and objects in one JSON body."""
    max_json_depth: int
    """Levels of lists and objects in one JSON text, one within the other."""
    max_tensor_rank: int
    """Dimensions of one tensor."""
    max_compression_ratio: float
    """Decompressed bytes for each byte of a compressed body."""
    max_head_bytes: int
    """Bytes of the head of a request."""
    max_header_bytes: int
    """Bytes of one header, and of a query string."""
    max_headers: int
    """Headers of one request."""
    max_connections: int
    """Connections at a time."""
    max_connections_per_address: int
    """Connections at a time from one address."""
    head_timeout_s: float
    """Seconds in which a head must come."""
    body_timeout_s: float
    """Seconds over which the rate of a body is measured."""
    write_timeout_s: float
    """Seconds over which the rate is measured at which a reply is read."""
    idle_timeout_s: float
    """Seconds for which an idle connection stays open."""
    least_rate: int
    """Bytes a second that a body or a reply must move."""
    max_modules: int
    """Resident modules."""
    max_sessions: int
    """Live sessions."""
    recordings_bytes: int
    """Bytes of all recordings together."""
    max_sweep: int
    """Sizes of one sweep."""
    max_alternatives: int
    """Alternatives of one question about cost."""
    max_taps: int
    """Tensors that one reply may return."""
    max_steps: int
    """Steps of sessions in one request."""
    max_sequences: int
    """Sequences of one session."""
    max_predicted_s: float | None = None
    """Seconds that a request may be predicted to compute; null for any."""
    default_wait_s: float | None = None
    """Seconds that a request may take which names no time of its own; null for any."""
    caller: CallerLimits = CallerLimits()
    """The limits of the caller who asks."""


class Memory(WireModel):
    """The state of the memory budget."""

    resident_bytes: int
    in_flight_bytes: int
    body_bytes: int
    """Bytes of the bodies that are being read or answered."""
    reply_bytes: int
    """Bytes of the replies that are being sent."""
    free_bytes: int


class SuggestedModel(WireModel):
    """A small model of the Hugging Face hub to begin with."""

    repository: str
    revision: str
    """The commit that is meant."""
    bytes: int
    """Bytes of its tensors; its configs and its tokenizer add a few megabytes."""
    license: str
    """An identifier of SPDX."""
    about: str


class HubInfo(WireModel):
    """The Hugging Face hub, as far as callers may have the server fetch checkpoints from it."""

    problem: str | None = None
    """The reason why they may not, and the way to change that; null if they may."""
    limit_bytes: int
    """The largest checkpoint that may be fetched."""
    models: list[SuggestedModel]
    fetching: list[str]
    """The paths of the checkpoints that are being fetched now."""


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
    session_kernel: Literal["paged", "products"] = "products"
    """The computation of steps of sessions in half types on a GPU: PyTorch's kernel for block tables, or products.

    A trial at the start decides.
    """
    hub: HubInfo | None = None
    """Null of a server that does not tell."""


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
    modules_left_out: int = 0
    """Stored modules that are not served, since their files are damaged or too large; the server's log names them."""
