"""The HTTP protocol of a server process: our own over uvicorn's httptools protocol, if that is as expected.

:mod:`service.http.connection` builds on classes of uvicorn that are not public. If they have changed, uvicorn's own
protocol over h11 serves instead: it reads the same requests, but waits forever for clients that stall.
"""

from __future__ import annotations

import importlib
import logging

log = logging.getLogger("fxserve")

OURS, PLAIN = "service.http.connection:Connection", "h11"

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
    """The protocol, as ``uvicorn.Config`` takes it by name."""
    fault = _fault()
    if fault is None:
        return OURS
    log.warning("clients that stall are not given up: uvicorn's protocol is not as this version knows it (%s)", fault)
    return PLAIN


def _fault() -> str | None:
    """The first thing that :mod:`service.http.connection` needs and does not find; None if all is there."""
    try:
        importlib.import_module("uvicorn._types")
        module = importlib.import_module("uvicorn.protocols.http.httptools_impl")
        protocol, cycle = module.HttpToolsProtocol, module.RequestResponseCycle
        set_by_init = {*protocol.__init__.__code__.co_names, *cycle.__init__.__code__.co_names}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    missing = [name for name in _METHODS if not hasattr(protocol, name)]
    missing += [name for name in _ATTRIBUTES if name not in set_by_init]
    return f"without {', '.join(missing)}" if missing else None
