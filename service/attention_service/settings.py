"""The server's settings, each declared once.

Each is a flag of ``attention serve``, an ``ATTENTION_*`` variable and a line of ``.env``. A flag wins over a variable,
a variable over ``.env``.
"""

from pathlib import Path
from typing import Literal

from platformdirs import user_data_path
from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


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

    models_dir: Path = user_data_path("attention-service", appauthor=False)
    """The model repository: modules are kept here, and checkpoints are imported from here."""

    hub: bool = False
    """Let callers fetch checkpoints from the Hugging Face hub into the model repository."""

    device: str = "auto"
    """Device of the modules: cpu, cuda, cuda:1, …; auto takes CUDA if there is one."""

    memory_budget: ByteSize | None = None
    """Bytes that resident modules and running requests may hold together, as in 8GiB; default: 80 % of free memory."""

    max_body_bytes: ByteSize = Field(default=ByteSize(2**30), ge=1024)
    """The largest request body, as in 64MiB."""

    max_json_bytes: ByteSize = Field(default=ByteSize(2**26), ge=1024)
    """The largest JSON body, decompressed; safetensors bodies may be larger."""

    recordings_limit: ByteSize = Field(default=ByteSize(2**33), ge=0)
    """Bytes of all stored recordings together, as in 8GiB; more are refused with 507."""

    session_ttl_s: float = Field(default=600, gt=0, allow_inf_nan=False)
    """Seconds without a request after which a session expires, at most; a request may ask for less."""

    session_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the memory budget that the pages of all sessions may take."""

    session_pinned_share: float = Field(default=0.5, ge=0, le=1)
    """Share of that which pinned sessions may take."""

    max_queue: int = Field(default=256, ge=1)
    """Requests that may wait for the device; more are refused with 429."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of one computation on the CPU; default: one for each core."""

    calibrate: bool = True
    """Measure the device at the first start, while no request waits, and again if predicted times drift; false keeps
    the earlier measurements."""

    drain_seconds: int = Field(default=30, ge=0)
    """Seconds that a stop waits for requests in flight."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe event that is logged."""

    log_format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON object a line."""
