"""The application: wiring only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from service import problems
from service.api import exports, extractors, features, inference_v2, models, operations, repository_v2, transforms
from service.api.state import State
from service.engine import Engine
from service.metrics import RequestMetrics
from service.middleware import BodyLimit, RequestContext
from service.schemas import ImagesBody, Problem
from service.settings import Settings

DESCRIPTION = """Every inner activation of a vision model, over HTTP: list the nodes of its torch.fx graph, name the
ones you want, POST images, get tensors. Errors are `application/problem+json` (RFC 9457)."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service as an ASGI application; ``settings`` from the environment where not given.

    Its lifespan starts the engine and drains it at the end.
    """
    settings = settings or Settings()
    state = State(settings, Engine(settings), RequestMetrics())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await state.engine.start()
        try:
            yield
        finally:
            await state.engine.close()

    app = FastAPI(title="fxserve", version="1", description=DESCRIPTION, lifespan=lifespan)
    app.state.fxserve = state
    problems.install(app)
    for noun in (operations, models, transforms, extractors, exports, features, inference_v2, repository_v2):
        app.include_router(noun.router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(RequestContext, metrics=state.metrics)
    _document_shared_schemas(app)
    return app


def _document_shared_schemas(app: FastAPI) -> None:
    """Add to the OpenAPI document the schemas that routes refer to by hand."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, shared = models_json_schema(
                [(Problem, "serialization"), (ImagesBody, "validation")], ref_template="#/components/schemas/{model}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(shared["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
