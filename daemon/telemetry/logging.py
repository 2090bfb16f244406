"""Logging: structlog, JSON unless a terminal reads it, ids bound once and present in every line of a task.

Prompts, texts and tokens are never logged, nor what variables hold where an error came up. Other libraries'
records pass through the same formatter.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Literal, TextIO

import structlog
import structlog.tracebacks

if TYPE_CHECKING:
    from structlog.typing import Processor

LogFormat = Literal["auto", "json", "console"]


def configure_logging(
    level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None
) -> None:
    """Send all log records of the process to one stream.

    Args:
        level: Least severity that is shown: debug, info, warning or error.
        log_format: `auto` is console if the stream is a terminal, else JSON, one object per line.
        stream: Where to; None is standard error.
    """
    out: TextIO = sys.stderr if stream is None else stream
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if console
        else [structlog.processors.ExceptionRenderer(_tracebacks()), structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # Tests configure more than once.
    )


def set_level(level: str) -> None:
    """Change the least severity that is shown."""
    logging.getLogger().setLevel(level.upper())


def _tracebacks() -> structlog.tracebacks.ExceptionDictTransformer:
    """Tracebacks for JSON. Theirs would show the variables of every frame: prompts, tokens."""
    return structlog.tracebacks.ExceptionDictTransformer(show_locals=False)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; its events are constant strings, everything that varies is a key."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind_ids(**ids: Any) -> None:
    """Add ids (tenant, job_id, rpc, ...) to every log line of the current task from now on."""
    structlog.contextvars.bind_contextvars(**ids)
