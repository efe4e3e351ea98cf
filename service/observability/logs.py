"""Log lines: text for people, or a JSON object a line for machines. Each names the request that it belongs to.

What a client sent may stand in a message. It cannot forge a line: in text, control characters are escaped and the lines
of a traceback are indented; JSON escapes them by itself. python-json-logger would take the place of one of the two
formatters, and the fields would still be named here.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from service.settings import LogFormat

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that is being worked on in this context; tasks that it starts inherit it."""

_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), 127, *range(128, 160), 0x2028, 0x2029)}


def config(format: LogFormat, level: str) -> dict[str, Any]:
    """For ``logging.config.dictConfig``: everything to stderr, our own loggers and uvicorn's from ``level`` on."""
    shown = {"level": level.upper()}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "lines": {"()": f"service.observability.logs.{'JsonLines' if format == 'json' else 'TextLines'}"}
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        # python-multipart warns of each malformed body, whose client is told.
        "loggers": {"fxserve": shown, "uvicorn": shown, "python_multipart": {"level": "ERROR"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }


class JsonLines(logging.Formatter):
    """``{"time", "level", "logger", "message", "process", "request_id", …}`` and a call's ``extra={"fields": …}``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if (identity := request_id.get()) is not None:
            line["request_id"] = identity
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """``time level logger [request] message``."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(" ", "milliseconds")
        identity = request_id.get()
        request = f" [{identity}]" if identity is not None else ""
        message = record.getMessage().translate(_CONTROL)
        line = f"{time} {record.levelname.lower()} {record.name}{request} {message}"
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            line = "\n    ".join([line, *(text.translate(_CONTROL) for text in lines)])
        return line
