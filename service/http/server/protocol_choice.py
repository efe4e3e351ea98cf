"""The HTTP protocol class of a server process.

:mod:`service.http.server.connection` subclasses private classes of uvicorn. If they have changed, uvicorn's own h11
protocol is used instead, which has no timeouts for stalling clients.
"""

from __future__ import annotations

import importlib
import logging

log = logging.getLogger("fxserve")

OWN, FALLBACK = "service.http.server.connection:Connection", "h11"

_METHODS = (
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing", "shutdown"),
    *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("on_response_complete", "_start_asgi_task", "_unset_keepalive_if_required"),
    "timeout_keep_alive_handler",
)
_ATTRIBUTES = (
    *("cycle", "expect_100_continue", "flow", "headers", "loop", "parser", "pipeline", "transport"),
    *("timeout_keep_alive", "timeout_keep_alive_task"),
    *("disconnected", "keep_alive", "message_event", "response_complete", "response_started"),
)


def chosen() -> str:
    """Return the name of the protocol class, for ``uvicorn.Config``."""
    fault = _fault()
    if fault is None:
        return OWN
    log.warning("no timeouts for clients that stall: this version of uvicorn is not supported (%s)", fault)
    return FALLBACK


def _fault() -> str | None:
    """Return why :mod:`service.http.server.connection` does not work with this uvicorn; None if it does."""
    try:
        importlib.import_module("uvicorn._types")
        module = importlib.import_module("uvicorn.protocols.http.httptools_impl")
        protocol, cycle = module.HttpToolsProtocol, module.RequestResponseCycle
        set_by_init = {*protocol.__init__.__code__.co_names, *cycle.__init__.__code__.co_names}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    missing = [name for name in _METHODS if not hasattr(protocol, name)]
    missing += [name for name in _ATTRIBUTES if name not in set_by_init]
    return f"it lacks {', '.join(missing)}" if missing else None
