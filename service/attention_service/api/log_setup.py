"""Structured logging on standard error."""

import logging
import sys
from typing import Literal

import structlog


def configure_logging(level: str, form: Literal["console", "json"]) -> None:
    """Structured events on standard error, from this service and from the libraries alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables: those are other people's tensors.
    without_locals = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    final: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(without_locals), structlog.processors.JSONRenderer()]
        if form == "json"
        else [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final], foreign_pre_chain=shared
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
