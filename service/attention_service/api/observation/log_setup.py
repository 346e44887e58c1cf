"""Structured logging on standard error."""

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict

from attention_service.api.problems import request_id
from attention_service.runtime.callers import caller


def of_request(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Add the id and the caller of the request that is being answered, if there is one."""
    if (identity := request_id.get()) is not None:
        event.setdefault("request_id", identity)
        event.setdefault("caller", caller.get().name)
    return event


def configure_logging(level: str, form: Literal["console", "json"]) -> None:
    """Structured events on standard error, from this service and from the libraries alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        of_request,
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
