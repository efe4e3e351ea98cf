"""The application: engine, routes and middleware."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

# By default idle OpenMP threads spin, which on a shared core starves the very thread they wait for. OpenMP reads the
# variable when torch is loaded, so set it before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from service.engine import Engine
from service.garbage import exempt_imports
from service.http import openapi, problem_responses
from service.http.access.hosts import Hosts
from service.http.access.keys import Keys
from service.http.middleware.access import Access
from service.http.middleware.body_limit import BodyLimit
from service.http.middleware.request_context import RequestContext
from service.http.routes import operations, page
from service.http.routes.v1 import (
    attributions,
    embeddings,
    exports,
    extractors,
    features,
    models,
    statistics,
    transforms,
)
from service.http.routes.v2 import discovery, inference, repository
from service.http.routing.declared import DeclaredRoutes, declares
from service.http.server.lost_device import ended_when_device_lost
from service.http.server.signals import drained_on_signals, reload_on_signals
from service.http.state import State
from service.observability.metrics import keep_updated
from service.page import POLICIES
from service.settings import Settings

if TYPE_CHECKING:
    from service.observability.tracing import Traces

log = logging.getLogger("fxserve")

_SAMPLE_SECONDS = 2.0

# Routes are matched in this order: the most frequently requested come first.
_HOT_ROUTES = [*features.routes, *attributions.routes, *embeddings.routes, *inference.routes]
_ROUTERS = [
    module.router
    for module in (models, statistics, extractors, operations, transforms, exports, discovery, repository, page)
]

DESCRIPTION = """Every inner activation of a vision model, over HTTP: list the nodes of its torch.fx graph, name the
ones you want, POST images, get tensors. Errors are `application/problem+json` (RFC 9457), or have the form of their
protocol (`/v1/embeddings`, `/v2`). Every GET route also answers HEAD."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """Create the ASGI application, with settings from the environment by default.

    Its lifespan starts the engine, and drains and closes it at the end.
    """
    settings = settings or Settings()
    keys = None if settings.api_keys_file is None else Keys(settings.api_keys_file)
    traces = traces_type()() if settings.tracing else None
    state = State(Engine(settings), traces)
    app = FastAPI(
        title="fxserve",
        version="1",
        description=DESCRIPTION,
        lifespan=_lifespan(state, keys),
        docs_url=None,  # FastAPI's pages load their scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # redirects would go to any Host sent by the client
        # fxserve has its own; probing for FastAPI's is slow
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.fxserve = state
    problem_responses.install(app)
    routes = _add_routes(app)
    _add_middleware(app, state, keys, routes)
    openapi.install(app, routes, _HOT_ROUTES)
    return app


def _lifespan(state: State, keys: Keys | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the context manager in which the application serves requests."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        exempt_imports()
        if keys is not None:
            reload_on_signals(keys.reload)
        await state.engine.start()  # before all other threads: it sets up where threads allocate memory
        sampling = None
        if state.engine.metrics.shared_dir is not None:  # /metrics of any process reports the gauges of all
            sampling = asyncio.create_task(keep_updated(state.engine.sample, _SAMPLE_SECONDS))
        async with ended_when_device_lost(state.engine):
            try:
                with drained_on_signals(state.engine):
                    yield
            finally:
                if sampling is not None:
                    sampling.cancel()
                await state.engine.close()
                if state.traces is not None:
                    await asyncio.to_thread(state.traces.close)

    return lifespan


def _add_routes(app: FastAPI) -> DeclaredRoutes:
    """Add all routes, and return what they declare."""
    document = next(route for route in app.routes if isinstance(route, Route) and route.path == app.openapi_url)
    declares("open")(document.endpoint)
    app.router.routes[:0] = _HOT_ROUTES
    for router in _ROUTERS:
        app.include_router(router)
    return DeclaredRoutes((*_HOT_ROUTES, document, *chain.from_iterable(router.routes for router in _ROUTERS)))


def _add_middleware(app: FastAPI, state: State, keys: Keys | None, routes: DeclaredRoutes) -> None:
    """Add the middleware, the innermost first."""
    settings = state.engine.settings
    app.add_middleware(
        BodyLimit,
        routes=routes,
        limit=settings.max_body_bytes,
        timeout=settings.body_timeout,
        admission=state.engine.admission,
    )
    hosts = Hosts((*settings.hosts, settings.host))
    app.add_middleware(
        Access, engine=state.engine, routes=routes, keys=keys, hosts=hosts, origins=settings.cors_origins
    )
    cors = None
    if settings.cors_origins:
        cors = partial(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=(
                "Authorization",
                "Accept",
                "Content-Encoding",
                "Content-Type",
                "Inference-Header-Content-Length",
                "X-Request-ID",
                "X-Request-Timeout",
            ),
            expose_headers=(
                "Content-Disposition",
                "Inference-Header-Content-Length",
                "Location",
                "Retry-After",
                "Server-Timing",
                "X-Fxserve-Backend",
                "X-Fxserve-Note",
                "X-Fxserve-Weights",
                "X-Request-ID",
            ),
        )
        app.add_middleware(cors)
    app.add_middleware(RequestContext, engine=state.engine, policies=POLICIES, traces=state.traces, cors=cors)


def traces_type() -> type[Traces]:
    """Import the class that creates spans.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """
    try:
        from service.observability.tracing import Traces
    except ModuleNotFoundError as error:
        raise ValueError(f"FXSERVE_TRACING needs the extra otel: pip install 'fxserve[otel]' ({error})") from error
    return Traces
