"""HEAD on every route with GET."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Middleware that answers HEAD as GET; the server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}  # a copy, because the server uses the method in its own scope
        try:
            await self.app(as_get, receive, send)
        finally:
            if "route" in as_get:
                scope["route"] = as_get["route"]  # for metrics and traces
