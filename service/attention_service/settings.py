"""The server's settings, each declared once.

Each is a flag of ``attention serve``, an ``ATTENTION_*`` variable and a line of ``.env``. A flag wins over a variable,
a variable over ``.env``.
"""

import ipaddress
import os
import re
from pathlib import Path
from typing import Final, Literal

from platformdirs import user_data_path
from pydantic import ByteSize, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from attention_contract.json_reading import MAX_ITEMS
from attention_contract.schemas.complexity import MAX_SWEEP

MAX_THREADS: Final = max(64, 4 * (os.cpu_count() or 1))
"""More would only wait for each other; far more end the process."""
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*?#@]+", re.IGNORECASE)
_HOST: Final = re.compile(r"\*|(\*\.)?[^/\s*?#@:]+|[0-9a-f:.]+", re.IGNORECASE)


class Settings(BaseSettings):
    """Keep attention modules resident and answer questions about them over HTTP."""

    model_config = SettingsConfigDict(
        env_prefix="ATTENTION_",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
        cli_prog_name="attention serve",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    health_port: int | None = Field(default=None, ge=0, le=65535)
    """A further port that answers /health/live and /health/ready from a thread of its own, however busy the server is;
    0 takes a free one. Default: none. Plain HTTP, on the same address."""

    require_keys: bool | None = None
    """Ask every caller for an API key; default: unless only this machine can reach the server. false lets everybody in
    who can reach it."""

    first_key: bool = False
    """Make a key with every scope if callers need one and there is none, and print it once on standard output."""

    allowed_hosts: str = ""
    """Further names by which callers may address the server (Host), separated by commas, as in box.example,*.lab; * for
    any."""

    allowed_origins: str = ""
    """Origins of web pages that may ask the server (CORS), separated by commas, as in https://page.example."""

    frame_origins: str = ""
    """Origins of web pages that may show the built-in page in a frame, separated by commas; they may not ask the
    server themselves."""

    trusted_proxies: str = ""
    """Addresses or networks of proxies, separated by commas, whose X-Forwarded-For and X-Forwarded-Proto count."""

    ssl_certfile: Path | None = None
    """File of a TLS certificate and its chain (PEM); the server then speaks HTTPS."""

    ssl_keyfile: Path | None = None
    """File of the private key of that certificate, if it is another one."""

    models_dir: Path = user_data_path("attention-service", appauthor=False)
    """The model repository: modules are kept here, and checkpoints are imported from here."""

    replicas: int = Field(default=1, ge=1, le=4096)
    """Processes that serve together, over one models_dir and behind one proxy. The budgets of the host's memory,
    max_connections and the callers' limits are those of all of them, and each takes its share; each has a GPU of its
    own. Modules that are not durable are refused."""

    oip: bool = False
    """Answer the Open Inference Protocol (version 2, REST) under /v2 too, for clients of Triton and KServe."""

    hub: bool = False
    """Let callers fetch checkpoints from the Hugging Face hub into the model repository."""

    hub_limit: ByteSize = Field(default=ByteSize(2**36), ge=0)
    """The largest checkpoint that callers may have fetched, as in 8GiB; a larger one is refused with 507 before it is
    fetched."""

    mcp: bool = False
    """Answer agents at /mcp by the Model Context Protocol; needs the extra mcp."""

    device: str = "auto"
    """Device of the modules: cpu, cuda, cuda:1, …; auto takes CUDA if there is one."""

    tf32: bool = False
    """Let a GPU round the float32 factors of its products to TF32 (10 bits), which is faster; replies say so in ran."""

    memory_budget: ByteSize | None = Field(default=None, gt=0)
    """Bytes that resident modules and running requests may hold together, as in 8GiB; default: 80 % of free memory."""

    host_memory_budget: ByteSize | None = Field(default=None, gt=0)
    """Bytes of the host that bodies, results, replies and recordings may hold beside a GPU; default: 80 % of its free
    memory. On a CPU memory_budget counts everything."""

    max_body_bytes: ByteSize = Field(default=ByteSize(2**30), ge=1024)
    """The largest request body, as in 64MiB."""

    max_json_bytes: ByteSize = Field(default=ByteSize(2**26), ge=1024)
    """The largest JSON body, decompressed; safetensors bodies may be larger."""

    max_json_values: int = Field(default=MAX_ITEMS, ge=1024, le=MAX_ITEMS)
    """Numbers and other values in one JSON body, or one message of a stream."""

    max_sweep: int = Field(default=MAX_SWEEP, ge=2, le=MAX_SWEEP)
    """Sizes that one question about cost may sweep over, for the request and each alternative."""

    max_modules: int = Field(default=1024, ge=1)
    """Resident modules; more are refused with 507."""

    max_sessions: int = Field(default=4096, ge=1)
    """Live sessions; more are refused with 429."""

    max_head_bytes: ByteSize = Field(default=ByteSize(2**16), ge=1024)
    """The largest head of a request: its line and its headers."""

    max_headers: int = Field(default=128, ge=8)
    """Headers of one request."""

    max_connections: int | None = Field(default=None, ge=1)
    """Connections at a time; more are refused with 503. Default: 4096, or fewer where the system's limit of open files
    leaves no room for them."""

    max_connections_per_address: int = Field(default=1024, ge=1)
    """Connections at a time from one address; more are refused with 429. Raise it behind a proxy."""

    head_timeout_s: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Seconds in which the head of a request must come; a connection that stays silent is closed after them."""

    body_timeout_s: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Seconds in which a body must bring as many bytes as the least rate asks for, again and again."""

    write_timeout_s: float = Field(default=20, gt=0, allow_inf_nan=False)
    """Seconds in which a caller must read as many bytes of its reply as the least rate asks for, again and again."""

    idle_timeout_s: int = Field(default=75, ge=1)
    """Seconds for which an idle connection stays open. Clients and load balancers must close theirs first."""

    least_rate: ByteSize = Field(default=ByteSize(2**14), ge=0)
    """Bytes a second that a body or a reply must move."""

    max_compression_ratio: float = Field(default=100, ge=1, allow_inf_nan=False)
    """Decompressed bytes for each byte of a compressed body; the first 8 MiB are not checked."""

    recordings_limit: ByteSize = Field(default=ByteSize(2**33), ge=0)
    """Bytes of all stored recordings together, as in 8GiB; more are refused with 507."""

    caller_requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests a second of one caller (an API key, or an address where no key is used), over two seconds; more are
    refused with 429. Default: no limit. A key may have limits of its own."""

    caller_bytes_per_s: ByteSize | None = Field(default=None, gt=0)
    """Bytes of bodies a second of one caller, over two seconds. Default: no limit."""

    caller_device_ms_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Milliseconds of the device for each second of one caller, over two seconds. Default: no limit."""

    caller_concurrent: int | None = Field(default=None, ge=1)
    """Requests of one caller at a time. Default: no limit."""

    caller_modules: int | None = Field(default=None, ge=0)
    """Resident modules that one caller made since the start. Default: no limit."""

    caller_sessions: int | None = Field(default=None, ge=0)
    """Live sessions of one caller. Default: no limit."""

    caller_session_bytes: ByteSize | None = Field(default=None, ge=0)
    """Bytes of the pages of one caller's sessions. Default: no limit."""

    caller_recordings_bytes: ByteSize | None = Field(default=None, ge=0)
    """Bytes of the recordings that belong to one key without the scope manage. Default: no limit."""

    default_wait_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds that a request may take that names none in `Prefer: wait`. Default: any time."""

    max_predicted_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds that one request may be predicted to compute; more are refused with 422. Default: any time."""

    model_idle_seconds: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Seconds without a request after which a whole model gives its memory back; the next request loads it again."""

    preload: str = ""
    """Whole models that are loaded at the start, separated by commas. `make serve` and compose load `tiny`."""

    session_ttl_s: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Seconds without a request after which a session expires, at most; a request may ask for less."""

    session_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the memory budget that the pages of all sessions may take."""

    session_pinned_share: float = Field(default=0.5, ge=0, le=1)
    """Share of that which pinned sessions may take."""

    max_queue: int = Field(default=256, ge=1)
    """Requests that may wait for the device; more are refused with 429."""

    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Threads of one computation on the CPU; default: one for each core."""

    calibrate: bool = True
    """Correct predicted times by those of the requests that ran, and keep the factors beside the modules."""

    stuck_seconds: float = Field(default=120, gt=0, allow_inf_nan=False)
    """Seconds without progress of a running computation after which /health/live answers 503; ten times the predicted
    time if that is more."""

    drain_seconds: int = Field(default=30, ge=0)
    """Seconds that a stop waits for requests in flight."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe event that is logged."""

    log_format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON object a line."""

    @field_validator("allowed_origins", "frame_origins")
    @classmethod
    def _check_origins(cls, text: str) -> str:
        return _each(
            text, _ORIGIN, "an origin; expected scheme://host or scheme://host:port, as in https://page.example"
        )

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, text: str) -> str:
        return _each(text, _HOST, "the name of a host; expected it without scheme, port and path, as in box.example")

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, text: str) -> str:
        for part in listed(text):
            if part != "*":
                ipaddress.ip_network(part)
        return text


def _each(text: str, form: re.Pattern[str], expected: str) -> str:
    """The text, once each part of it has the form. Raises ValueError."""
    for part in listed(text):
        if form.fullmatch(part) is None:
            raise ValueError(f"{part[:80]!r} is not {expected}")
    return text


def listed(text: str) -> list[str]:
    """The parts of a setting that are separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
