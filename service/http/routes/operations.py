"""Health, readiness and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from service import problems
from service.http.routing.declared import declares
from service.http.state import Shared
from service.observability import metrics
from service.schemas.operations import Health, Readiness

router = APIRouter(tags=["operations"])


@router.get("/healthz")
@declares("open", problems.NotReady)
async def healthz(state: Shared) -> Health:
    """Check that the process is up and can use its device."""
    lost = state.engine.device_lost()
    if lost is not None:
        raise problems.NotReady(lost)
    return Health()


@router.get("/readyz")
@declares("open", problems.NotReady, problems.Draining)
async def readyz(state: Shared) -> Readiness:
    """Check that preloading is done and the device worker responds."""
    ready, reason = state.engine.readiness()
    if not ready:
        raise problems.NotReady(reason)
    return Readiness(ready=True, reason=reason)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus' text format.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "fxserve_requests_total{…} 12.0\n"}},
        }
    },
)
@declares("read")
async def show_metrics(state: Shared) -> Response:
    """Return counters, gauges and histograms for Prometheus."""
    state.engine.sample()
    return Response(await asyncio.to_thread(state.engine.metrics.text), media_type=metrics.CONTENT_TYPE)
