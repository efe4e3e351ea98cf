"""Accounting of accepted requests, which draining waits for, and refusal of others."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.engine import Engine
from service.http.problem_responses import error_response
from service.http.routing.declared import READ_METHODS, route_path
from service.problems import Draining


class Accepted:
    """Middleware that registers each request with the engine, so that draining waits for it.

    Requests that arrive later are answered 503, except those that only read, and so is a request that the server
    cancels before its response has started.
    """

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        accepted = not self.engine.draining
        if not accepted and scope["method"] not in READ_METHODS:
            await error_response(route_path(scope), Draining())(scope, receive, send)
            return
        responded = False

        async def send_response(message: Message) -> None:
            nonlocal responded
            responded = True
            await send(message)

        try:
            with self.engine.in_flight if accepted else nullcontext():
                await self.app(scope, receive, send_response)
        except asyncio.CancelledError:
            if responded or not self.engine.draining:
                raise
            await error_response(route_path(scope), Draining())(scope, receive, send)
