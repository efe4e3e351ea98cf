"""Export of the service's metrics through Ray's, so that Prometheus sees every replica on the port of its node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve
from ray.util.metrics import Gauge

from service.engine import Engine
from service.observability.metrics import keep_updated

SECONDS = 5.0
"""Seconds between two copies, about the reporting interval of Ray's agents."""


@contextmanager
def bridged(engine: Engine) -> Iterator[None]:
    """Copy every metric to Ray regularly, with the tag ``replica``.

    For example, ``fxserve_requests_total`` becomes ``ray_fxserve_requests_total``.

    All become gauges, because Ray's counters only accept increments; Prometheus' ``rate`` does not check the type.
    """
    copying = asyncio.create_task(_copy(engine))
    try:
        yield
    finally:
        copying.cancel()


async def _copy(engine: Engine) -> None:
    replica = serve.get_replica_context().replica_id.unique_id
    gauges: dict[str, Gauge] = {}

    def copy() -> None:
        engine.sample()
        for family in engine.metrics.registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                gauge = gauges.get(sample.name)
                if gauge is None:
                    tags = (*sample.labels, "replica")
                    gauge = gauges[sample.name] = Gauge(sample.name, family.documentation, tags)
                gauge.set(sample.value, {**sample.labels, "replica": replica})

    await keep_updated(copy, SECONDS)
