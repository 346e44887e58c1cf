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
from attention_contract.schemas.costs.sweeps import MAX_SWEEP

MAX_THREADS: Final = max(64, 4 * (os.cpu_count() or 1))
"""More would only wait for each other; far more end the process."""
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*?#@]+", re.IGNORECASE)
_SHA256: Final = re.compile(r"([0-9a-fA-F]{64})?")
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
    """A further port for /health/live and /health/ready, answered by a separate thread, however busy the server is; 0
    takes a free one. Default: none. Plain HTTP, on the same address."""

    require_keys: bool | None = None
    """Require an API key from every caller. Default: required, unless only this machine can reach the server. false
    admits everybody who can reach the server."""

    first_key: bool = False
    """If callers need a key and none exists, make one with every scope, and print it once on standard output."""

    key_hash: str = ""
    """SHA-256 of a further API key with every scope, in hexadecimal. A program that starts a server for itself keeps
    the key, and so passes on no secret."""

    allowed_hosts: str = ""
    """Further host names of the server that callers may send in Host, separated by commas, as in box.example,*.lab; *
    for any."""

    allowed_origins: str = ""
    """Origins of web pages that may send requests to the server (CORS), separated by commas, as in
    https://page.example."""

    frame_origins: str = ""
    """Origins of web pages that may show the built-in page in a frame, separated by commas. They may not send requests
    themselves."""

    trusted_proxies: str = ""
    """Addresses or networks of proxies, separated by commas. The server accepts X-Forwarded-For and X-Forwarded-Proto
    only from them."""

    ssl_certfile: Path | None = None
    """File of a TLS certificate and its chain (PEM); the server then speaks HTTPS."""

    ssl_keyfile: Path | None = None
    """File with the private key of the certificate, if the certificate file does not contain it."""

    models_dir: Path = user_data_path("attention-service", appauthor=False)
    """The model repository: the folder where modules are stored, and from which checkpoints are imported."""

    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of processes that serve together, with one models_dir and behind one proxy. The budgets of host memory,
    max_connections and the callers' limits apply to all processes together; each process takes its share. Each has a
    GPU of its own. Modules that are not durable are refused."""

    oip: bool = False
    """Answer the Open Inference Protocol (version 2, REST) under /v2 too, for clients of Triton and KServe."""

    hub: bool = False
    """Let callers download checkpoints from the Hugging Face hub into the model repository."""

    hub_limit: ByteSize = Field(default=ByteSize(2**36), ge=0)
    """The largest checkpoint that callers may have fetched, as in 8GiB; a larger one is refused with 507 before it is
    fetched."""

    mcp: bool = False
    """Answer agents at /mcp by the Model Context Protocol; needs the extra mcp."""

    device: str = "auto"
    """Device of the modules: cpu, cuda, cuda:1, …; auto takes CUDA if there is one."""

    tf32: bool = False
    """Let a GPU round float32 factors of matrix products to TF32 (10 bits), which is faster; ran.tf32 is then true."""

    memory_budget: ByteSize | None = Field(default=None, gt=0)
    """Bytes that resident modules and running requests may hold together, as in 8GiB; default: 80 % of free memory."""

    host_memory_budget: ByteSize | None = Field(default=None, gt=0)
    """On a GPU server, bytes of host memory for bodies, results, replies and recordings; default: 80 % of the free host
    memory. On a CPU, memory_budget covers everything."""

    max_body_bytes: ByteSize = Field(default=ByteSize(2**30), ge=1024)
    """The largest request body, as in 64MiB."""

    max_json_bytes: ByteSize = Field(default=ByteSize(2**26), ge=1024)
    """The largest JSON body, decompressed; safetensors bodies may be larger."""

    max_json_values: int = Field(default=MAX_ITEMS, ge=1024, le=MAX_ITEMS)
    """The largest number of values in one JSON body, or in one message on a stream."""

    max_sweep: int = Field(default=MAX_SWEEP, ge=2, le=MAX_SWEEP)
    """The largest number of sizes in the sweep of one complexity request, for the request and for each alternative."""

    max_modules: int = Field(default=1024, ge=1)
    """The largest number of resident modules; more are refused with 507."""

    max_sessions: int = Field(default=4096, ge=1)
    """The largest number of live sessions; more are refused with 429."""

    max_head_bytes: ByteSize = Field(default=ByteSize(2**16), ge=1024)
    """The largest head of a request: the request line and the headers."""

    max_headers: int = Field(default=128, ge=8)
    """The largest number of headers in one request."""

    max_connections: int | None = Field(default=None, ge=1)
    """The largest number of connections at a time; more are refused with 503. Default: 4096, or fewer if the system's
    limit of open files is too low."""

    max_connections_per_address: int = Field(default=1024, ge=1)
    """The largest number of connections at a time from one address; more are refused with 429. Raise it behind a
    proxy."""

    head_timeout_s: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Seconds within which the head of a request must arrive; then the server closes the connection."""

    body_timeout_s: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Length in seconds of the periods over which the rate of an arriving body is measured; see least_rate."""

    write_timeout_s: float = Field(default=20, gt=0, allow_inf_nan=False)
    """Length in seconds of the periods over which the rate is measured at which a caller reads its reply; see
    least_rate."""

    idle_timeout_s: int = Field(default=75, ge=1)
    """Seconds for which an idle connection stays open. Clients and load balancers must close theirs first."""

    least_rate: ByteSize = Field(default=ByteSize(2**14), ge=0)
    """The least rate in bytes a second at which a body must arrive and a caller must read its reply."""

    max_compression_ratio: float = Field(default=100, ge=1, allow_inf_nan=False)
    """The largest ratio of decompressed to compressed bytes of a body; the first 8 MiB are not checked."""

    recordings_limit: ByteSize = Field(default=ByteSize(2**33), ge=0)
    """The largest total size of stored recordings, as in 8GiB; more are refused with 507."""

    caller_requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Requests per second of one caller (an API key, or an address if no key is used), measured over two seconds; more
    are refused with 429. Default: no limit. A key may have limits of its own."""

    caller_bytes_per_s: ByteSize | None = Field(default=None, gt=0)
    """Bytes of bodies per second of one caller, measured over two seconds. Default: no limit."""

    caller_device_ms_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Milliseconds of device time per second for one caller, measured over two seconds. Default: no limit."""

    caller_concurrent: int | None = Field(default=None, ge=1)
    """Requests of one caller at a time. Default: no limit."""

    caller_modules: int | None = Field(default=None, ge=0)
    """Resident modules that one caller made since the server started. Default: no limit."""

    caller_sessions: int | None = Field(default=None, ge=0)
    """Live sessions of one caller. Default: no limit."""

    caller_session_bytes: ByteSize | None = Field(default=None, ge=0)
    """Bytes of memory for the sessions of one caller. Default: no limit."""

    caller_recordings_bytes: ByteSize | None = Field(default=None, ge=0)
    """Bytes of the stored recordings of one key without the scope manage. Default: no limit."""

    default_wait_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Deadline in seconds of a request without `Prefer: wait`. Default: no deadline."""

    max_predicted_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The longest predicted computation of one request in seconds; longer ones are refused with 422. Default: no
    limit."""

    model_devices: int = Field(default=1, ge=1, le=64)
    """Devices that each whole model is spread over, of those that can be: GPUs, or on a server without GPUs processes.
    A request that loads a model may name others."""

    model_idle_seconds: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Seconds without a request after which a whole model is unloaded; the next request loads it again."""

    spare_model_process: bool = True
    """If the server is idle, start a process that has imported transformers, so that the next whole model is loaded in
    the time of reading its weights. It takes 304 MiB of the memory budget, at most a quarter of what is free, and ends
    when a request needs them."""

    model_prefix_bytes: ByteSize = Field(default=ByteSize(2**29), ge=0)
    """The most memory of each whole model that generates for keys and values of texts that have ended: a prompt that
    begins as one of them is read from there on. It is a quarter of the model's size, and at least 32 MiB, if this is
    less. 0: every prompt is read whole."""

    shared_prefixes: bool = False
    """Let callers with different keys read on from the texts of each other. A caller can then find out by the time of
    an answer what others have asked."""

    preload: str = ""
    """Whole models that are loaded at the start, separated by commas. The server does not start if the model repository
    lacks one. `make serve` and compose load `tiny`."""

    session_ttl_s: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Seconds without a request after which a session expires. A request may set a shorter time."""

    session_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the memory budget that all sessions together may take."""

    session_pinned_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the memory for sessions that pinned sessions may take."""

    max_queue: int = Field(default=256, ge=1)
    """The largest number of requests that wait for the device; more are refused with 429."""

    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS)
    """Threads of one computation on the CPU; default: one for each core that the process may use, by its affinity and
    the CPU limit of its container."""

    calibrate: bool = True
    """Correct predicted times by the measured times of requests, and store the correction factors in models_dir."""

    stuck_seconds: float = Field(default=120, gt=0, allow_inf_nan=False)
    """If a running computation makes no progress for this number of seconds, or for ten times its predicted time if
    that is longer, /health/live answers 503. A process of a whole model that uses no processor for so long is ended;
    /health/ready answers 503 after a quarter of the time."""

    drain_seconds: int = Field(default=30, ge=0)
    """Seconds that a stopping server waits for running requests."""

    idle_exit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds without a request after which the server stops. Requests, streams, downloads and fits that run count as
    requests. Default: it does not stop by itself."""

    parent_pid: int | None = Field(default=None, ge=1)
    """Process id of the program that starts the server. The server ends at once when this process ends, however it
    ends. Default: it outlives the program."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe event that is logged."""

    log_format: Literal["console", "json"] = "console"
    """The format of the log: lines for people, or one JSON object on each line."""

    @field_validator("key_hash")
    @classmethod
    def _check_hash(cls, text: str) -> str:
        if _SHA256.fullmatch(text) is None:
            raise ValueError("expected 64 hexadecimal digits")
        return text

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
