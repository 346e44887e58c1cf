"""The server itself: what it is, what it can do, and how it is."""

from typing import Any, Literal

from pydantic import Field

from attention_contract.base import WireModel


class CallerLimits(WireModel):
    """The limits of one caller: an API key, or an address if no key is used. Null means no limit."""

    requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests and messages on streams per second, measured over two seconds."""
    bytes_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Bytes of bodies per second, measured over two seconds."""
    device_ms_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Milliseconds of device time per second, measured over two seconds; a request in a joint pass counts with its
    share."""
    concurrent: int | None = Field(default=None, ge=1)
    """Requests at a time."""
    modules: int | None = Field(default=None, ge=0)
    """Resident modules that the caller made since the server's start."""
    sessions: int | None = Field(default=None, ge=0)
    """Live sessions."""
    session_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the pages of the caller's sessions."""
    recordings_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the recordings that belong only to the caller."""


class Limits(WireModel):
    """The limits of the server. Most are settings of its operator."""

    max_body_bytes: int
    """Bytes of one request body."""
    max_json_bytes: int
    """Bytes of one JSON body."""
    memory_budget_bytes: int
    """Bytes that resident modules and running requests may hold together."""
    host_budget_bytes: int
    """On a GPU server, bytes of host memory for bodies, results, replies and recordings; on a CPU the same budget."""
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
    """Seconds within which the head of a request must arrive."""
    body_timeout_s: float
    """Seconds over which the rate of a body is measured."""
    write_timeout_s: float
    """Seconds over which the rate of reading a reply is measured."""
    idle_timeout_s: float
    """Seconds for which an idle connection stays open."""
    least_rate: int
    """The least rate in bytes a second of an arriving body, and of a reply that is being read."""
    max_modules: int
    """Resident modules."""
    max_sessions: int
    """Live sessions."""
    recordings_bytes: int
    """Bytes of all recordings together."""
    max_sweep: int
    """Sizes of one sweep."""
    max_alternatives: int
    """The largest number of alternatives in one complexity request."""
    max_taps: int
    """Tensors that one reply may return."""
    max_steps: int
    """Steps of sessions in one request."""
    max_sequences: int
    """Sequences of one session."""
    max_predicted_s: float | None = None
    """The longest predicted computation of one request in seconds; null for no limit."""
    default_wait_s: float | None = None
    """Deadline in seconds of a request without its own; null for none."""
    caller: CallerLimits = Field(default_factory=CallerLimits)
    """The limits of the caller of this request."""


class Memory(WireModel):
    """The state of the memory budget."""

    resident_bytes: int
    """Bytes of the resident modules."""
    models_bytes: int = 0
    """Bytes of whole models and their processes."""
    sessions_bytes: int = 0
    """Bytes of the pasts of sessions."""
    in_flight_bytes: int
    """Bytes that running requests have reserved."""
    body_bytes: int
    """Bytes of the bodies of current requests."""
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
    """Everything that a spec can contain."""

    variants: list[Variant]


class Health(WireModel):
    """The health of the server."""

    status: Literal["live", "ready", "loading", "draining"]
    modules: int
    """Modules resident so far."""
    modules_left_out: int = 0
    """The number of stored modules that are not served, because their files are damaged or too large; the log names
    them."""
