"""The service on Ray Serve: replicas of the whole application behind Serve's own proxy.

    serve run service.cluster.serve:app model=resnet50 nodes=C4,C5 cpus=2 replicas=2 extractors=s3://bucket/extractors
    serve deploy serve.yaml

``serve.yaml`` is ``serveConfigV2`` of ``.deploy/ray/rayservice.yaml``. ``serve build`` writes one without arguments,
see :mod:`service.cluster.application`.

Each replica builds its own application and engine when it begins; none of it is pickled, and there is no hop between
replicas. Batching and admission are the engine's: Serve hands a replica as many requests as it admits. Extractors made
through one replica are known to all over the same ``extractors``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.cluster.metrics import bridged
from service.settings import Settings

log = logging.getLogger("fxserve.cluster")

BATCHES_WANTED = 2
"""Batches of requests for each replica above which another replica is started."""

_OWN = ("model", "nodes", "weights", "cpus", "gpus", "replicas", "max_replicas")


def app(args: Mapping[str, Any]) -> Application:
    """Return the application for ``serve run`` and the ``args`` of a config file.

    Args:
        args: ``model``, with ``nodes`` (its levels without them) and ``weights``, is built before a replica is ready;
            ``cpus`` (1) and ``gpus`` (0) of each replica; ``replicas`` (1), up to ``max_replicas`` where that is given;
            and any setting by its name in lower case without ``FXSERVE_``, which wins over the replica's environment.

    Raises:
        ValueError: an argument that there is not, or that has no such value.
    """
    given = {name: value for name, value in args.items() if name not in _OWN}
    unknown = sorted(given.keys() - Settings.model_fields.keys())
    if unknown:
        known = ", ".join((*_OWN, *Settings.model_fields))
        raise ValueError(f"there is no argument {', '.join(unknown)}; there are {known}")
    cpus, gpus = _number(args, "cpus", 1.0), _number(args, "gpus", 0.0)
    replicas = int(_number(args, "replicas", 1.0))
    most = int(_number(args, "max_replicas", replicas))
    cores = max(1, int(cpus))
    given = {
        "compute_threads": cores,
        "decode_threads": max(1, cores // 2),
        "device": "auto" if gpus else "cpu",
    } | given
    settings = Settings(**given)  # as far as it can be said here
    preload = {name: str(args[name]) for name in ("model", "nodes", "weights") if name in args}
    if preload and "model" not in preload:
        raise ValueError("nodes and weights go with a model: model=resnet50 nodes=C4,C5")

    def build() -> FastAPI:
        return _replica(given, preload)

    options: dict[str, Any] = {
        "name": "fxserve",
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        # Serve's own default of 5 would starve batches.
        "max_ongoing_requests": settings.max_inflight,
        "max_queued_requests": settings.max_inflight,
        "graceful_shutdown_timeout_s": settings.grace_period + 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        # Serve would format and write a line for each request, which takes several per cent of a small model's rate.
        "logging_config": {"enable_access_log": False},
    }
    if most > replicas:
        options["autoscaling_config"] = {
            "min_replicas": replicas,
            "max_replicas": most,
            "target_ongoing_requests": BATCHES_WANTED * settings.max_batch,
        }
    else:
        options["num_replicas"] = replicas
    return serve.deployment(**options)(serve.ingress(build)(Replica)).bind()


class Replica:
    """What Serve asks beside HTTP."""

    app: FastAPI

    async def check_health(self) -> None:
        """Have the replica replaced where its device thread hangs or cannot be had again.

        Raises:
            RuntimeError: it does.
        """
        trouble = self.app.state.fxserve.engine.device_trouble()
        if trouble is not None:
            raise RuntimeError(trouble)


def _replica(given: Mapping[str, Any], preload: Mapping[str, str]) -> FastAPI:
    """Yield the application of one replica, which has started once it is ready."""
    from service.app import create_app

    settings = dict(given)
    if preload:
        settings["preload"] = ";".join(filter(None, (str(given.get("preload", "")), _spec_text(**preload))))
    application = create_app(Settings(**settings))
    lifespan = application.router.lifespan_context

    @asynccontextmanager
    async def until_ready(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            engine = app.state.fxserve.engine
            while not (said := engine.readiness())[0]:
                if engine.preload_failed:
                    raise RuntimeError(said[1])
                await asyncio.sleep(0.1)
            with bridged(app.state.fxserve.metrics, engine):
                yield state

    application.router.lifespan_context = until_ready
    application.add_middleware(_AsServeSends)
    return application


class _AsServeSends:
    """Sends bodies as bytes, since Serve pickles them on their way to its proxy, which no memoryview can be; and no
    ``X-Request-ID``, since Serve adds the one that it gave the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if "body" in message:
                message = {**message, "body": bytes(message["body"])}
            elif "headers" in message:
                headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_plain)


def _spec_text(model: str, nodes: str = "", weights: str = "") -> str:
    """What ``FXSERVE_PRELOAD`` calls an extractor of ``model``, by default of its levels."""
    from fxcore.graph.model_graph import model_graph

    nodes = nodes or ",".join(model_graph(model).levels)
    return f"{model}@{weights}:{nodes}" if weights else f"{model}:{nodes}"


def _number(args: Mapping[str, Any], name: str, default: float) -> float:
    try:
        return float(args.get(name, default))
    except (TypeError, ValueError):
        raise ValueError(f"{name}={args[name]!r} is no number") from None
