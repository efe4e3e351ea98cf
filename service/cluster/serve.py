"""The service on Ray Serve: replicas of the whole application behind Serve's own proxy.

    serve run service.cluster.serve:app model=resnet50 nodes=C4,C5 cpus=2 replicas=2 extractors=s3://bucket/extractors
    serve deploy serve.yaml

``serve.yaml`` is ``serveConfigV2`` of ``.deploy/ray/rayservice.yaml``. ``serve build`` writes one without arguments,
see :mod:`service.cluster.application`.

Each replica builds its own application and engine when it starts; nothing is pickled, and there is no hop between
replicas. Batching and admission are left to the engine: Serve passes a replica as many requests as the engine admits.
Replicas with the same ``extractors`` store know each other's extractors.
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
"""Requests per replica, in batches, above which another replica is started."""

_OWN = ("model", "nodes", "weights", "cpus", "gpus", "replicas", "max_replicas")


def app(args: Mapping[str, Any]) -> Application:
    """Return the application for ``serve run`` and the ``args`` of a config file.

    Args:
        args: ``model``, with ``nodes`` (by default its levels, or its last value if it has none) and ``weights``, is
            built before a replica is ready; ``cpus`` (1) and ``gpus`` (0) are per replica; ``replicas`` (1) may grow up
            to ``max_replicas`` if that is given. Any setting can be given by its name in lower case without
            ``FXSERVE_``, and overrides the replica's environment.

    Raises:
        ValueError: an argument is unknown or has an invalid value.
    """
    given = {name: value for name, value in args.items() if name not in _OWN}
    unknown = sorted(given.keys() - Settings.model_fields.keys())
    if unknown:
        known = ", ".join((*_OWN, *Settings.model_fields))
        raise ValueError(f"unknown argument {', '.join(unknown)}; valid arguments: {known}")
    cpus, gpus = _number(args, "cpus", 1.0), _number(args, "gpus", 0.0)
    replicas = _count(args, "replicas", 1)
    most = _count(args, "max_replicas", replicas)
    if most < replicas:
        raise ValueError(f"max_replicas={most} is less than replicas={replicas}")
    cores = max(1, int(cpus))
    given = {
        "compute_threads": cores,
        "decode_threads": max(1, cores // 2),
        "device": "auto" if gpus else "cpu",
    } | given
    settings = Settings(**given)  # validates the values; replicas add their environment
    preload = {name: str(args[name]) for name in ("model", "nodes", "weights") if name in args}
    if preload and "model" not in preload:
        raise ValueError("nodes and weights need a model, as in model=resnet50 nodes=C4,C5")

    def build() -> FastAPI:
        return _replica(given, preload)

    options: dict[str, Any] = {
        "name": "fxserve",
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        # Serve's default of 5 would starve batches.
        "max_ongoing_requests": settings.max_inflight,
        "max_queued_requests": settings.max_inflight,
        "graceful_shutdown_timeout_s": settings.grace_period + 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        # Writing a line per request would cost several per cent of a small model's throughput.
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
    """The class that Serve deploys; adds a health check to the HTTP application."""

    app: FastAPI

    async def check_health(self) -> None:
        """Fail Ray's health check when the device thread hangs or cannot be restarted.

        Raises:
            RuntimeError: the replica must be replaced.
        """
        trouble = self.app.state.fxserve.engine.device_trouble()
        if trouble is not None:
            raise RuntimeError(trouble)


def _replica(given: Mapping[str, Any], preload: Mapping[str, str]) -> FastAPI:
    """Return the application of one replica. Its startup completes once the engine is ready."""
    from service.app import create_app

    settings = dict(given)
    if preload:
        others = given.get("preload", "")
        others = [others] if isinstance(others, str) else others
        settings["preload"] = ";".join(filter(None, (*others, _spec_text(**preload))))
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
            with bridged(engine):
                yield state

    application.router.lifespan_context = until_ready
    application.add_middleware(_AsServeSends)
    return application


class _AsServeSends:
    """Middleware that adapts responses to Serve.

    Serve pickles response bodies, and a memoryview cannot be pickled, so bodies are sent as bytes. ``X-Request-ID`` is
    removed because Serve adds its own.
    """

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
    """Return the ``FXSERVE_PRELOAD`` text for an extractor of ``model``."""
    return model + (f"@{weights}" if weights else "") + (f":{nodes}" if nodes else "")


def _number(args: Mapping[str, Any], name: str, default: float) -> float:
    try:
        return float(args.get(name, default))
    except (TypeError, ValueError):
        raise ValueError(f"{name}={args[name]!r} is not a number") from None


def _count(args: Mapping[str, Any], name: str, default: int) -> int:
    number = _number(args, name, default)
    if number < 1 or number % 1:
        raise ValueError(f"{name}={args[name]!r} is not a whole number of at least 1")
    return int(number)
