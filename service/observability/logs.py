"""Log formatters: text, or one JSON object per line.

Each line has the id of its request, or the name of its background task.

Messages may contain data sent by clients, which must not forge lines: the text format escapes control characters,
indents tracebacks and quotes request ids with spaces, quotes or brackets; JSON escapes them all. python-json-logger is
not used, because it would replace only one of the two formatters, and the fields would still be listed here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from service.choices import LogFormat

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request being served; tasks started by it inherit it."""

TASK_PREFIX = "fxserve-"
"""Prefix of the names of background tasks; the same as for threads."""

_PLAIN_ORIGIN = re.compile(r"""[^\s"\\\[\]]+""")

_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), 127, *range(128, 160), 0x2028, 0x2029)}


def config(format: LogFormat, level: str) -> dict[str, Any]:
    """Build the ``logging.config.dictConfig`` that logs to stderr, with ``level`` for our loggers and uvicorn's."""
    own = {"level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "lines": {"()": f"service.observability.logs.{'JsonLines' if format == 'json' else 'TextLines'}"}
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        # python-multipart warns about each malformed body, which is answered with 422 anyway.
        "loggers": {"fxserve": own, "uvicorn": own, "python_multipart": {"level": "ERROR"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }


class JsonLines(logging.Formatter):
    """Formats ``{"time", "level", "logger", "message", "process", "request_id", …}`` and ``extra={"fields": …}``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if (own_id := request_id.get()) is not None:
            line["request_id"] = own_id
        elif (task := _task_name()) is not None:
            line["task"] = task
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Formats ``time level logger [request or task] message``."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(" ", "milliseconds")
        origin = request_id.get() or _task_name()
        if origin is not None and not _PLAIN_ORIGIN.fullmatch(origin):
            origin = json.dumps(origin)  # a client's id could look like the rest of the line
        request = f" [{origin}]" if origin is not None else ""
        message = record.getMessage().translate(_CONTROL)
        line = f"{time} {record.levelname.lower()} {record.name}{request} {message}"
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            line = "\n    ".join([line, *(text.translate(_CONTROL) for text in lines)])
        return line


def _task_name() -> str | None:
    """Return the name of the current background task, if there is one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread
        return None
    name = "" if task is None else task.get_name()
    return name if name.startswith(TASK_PREFIX) else None
