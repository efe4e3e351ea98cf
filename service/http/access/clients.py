"""Who sent the current request, among whom memory and places in the service are shared."""

from __future__ import annotations

from contextvars import ContextVar

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The API key of the current request, or its address where there are no keys; set by
:class:`service.http.middleware.access.Access`."""
