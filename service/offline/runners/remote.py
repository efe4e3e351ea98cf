"""Running an extractor on servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxcore.errors import FxError
from service.client import AsyncClient, AsyncExtractor, exceptions
from service.codecs.requests import image_text
from service.engine import FeatureOptions
from service.offline.inputs.sources import Regions
from service.offline.runners.runner import (
    SERVER_IMAGE_ERRORS,
    ExtractorInfo,
    Rows,
    add_regions,
    describe,
)
from service.schemas.regions import KINDS
from service.schemas.specs import ExtractorSpec

_SERVER_TIMEOUT = 600.0
"""Maximum seconds of a batch, including retries, while no server answers."""

_ATTEMPT_TIMEOUT = 120.0
"""Maximum seconds of the first attempt at a batch. A server that needs longer gets twice as long each time."""

_MAX_RETRY_DELAY = 10.0
"""Maximum seconds between two attempts to reach a server."""

_MAX_TIMEOUTS = 3
"""Number of timeouts after which a single image counts as unreadable."""

_RECOVERY = 8
"""Number of requests in time after which a server gets twice as many images; each timeout, also the first, doubles
it."""

# Errors that may not occur on another server, or later on the same one.
_RETRYABLE = (exceptions.ConnectionFailed, exceptions.TimedOut, exceptions.UnknownExtractor, exceptions.Busy)

_BAD_GATEWAY = 502

_log = logging.getLogger("fxserve.offline")


class _Server:
    """One server and its state in this run.

    After a request misses its deadline, the server gets one request at a time, with half as many images after each
    miss, and twice as many after each :data:`_RECOVERY` requests in time, until it gets whole batches again.
    A single image that misses its deadline is retried, and counts as unreadable after :data:`_MAX_TIMEOUTS` attempts;
    the next run into the folder tries it again.

    Attributes:
        in_flight: batches sent to it that are not answered yet.
        retry_at: when to use it again after a failure, on the monotonic clock.
        timeout: maximum seconds of a request.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.extractor: AsyncExtractor | None = None
        self.in_flight = 0
        self.retry_at = 0.0
        self.timeout = _ATTEMPT_TIMEOUT
        self._recovery = _RECOVERY
        self._in_time = 0
        self._max_images: int | None = None
        self._one_request = asyncio.Lock()

    async def features(
        self, images: Sequence[bytes], regions: Sequence[Regions] | None, options: Mapping[str, Any]
    ) -> Rows:
        """Compute key → ``[len(images), ...]``, in several requests once one has timed out.

        Raises:
            FxserveError: the server failed or rejected a request.
        """

        async def request(some: slice) -> Rows:
            assert self.extractor is not None
            given: dict[str, Any] = {} if regions is None else {KINDS[options["pool"]].field: regions[some]}
            return await self.extractor(list(images[some]), as_torch=True, **given, **options)

        if self._max_images is None:
            timeout = self.timeout
            try:
                return await request(slice(None))
            except exceptions.DeadlineExceeded:
                if self._max_images is None:
                    _log.warning("%s missed a deadline and gets fewer images at a time", self.client.url)
                    self.allow_longer_than(timeout)
                    self._missed(len(images))
        parts: list[Rows] = []
        start = timeouts = 0
        async with self._one_request:
            while start < len(images):
                stop = min(len(images), start + (self._max_images or len(images)))
                timeout = self.timeout
                try:
                    parts.append(await request(slice(start, stop)))
                except exceptions.DeadlineExceeded:
                    timeouts += stop - start == 1
                    if timeouts == _MAX_TIMEOUTS or (timeouts and len(images) > 1):
                        raise
                    if stop - start == 1:
                        self.allow_longer_than(timeout)
                    self._missed(stop - start)
                else:
                    start = stop
                    if self._max_images is not None:
                        self._in_time += 1
                        if self._in_time == self._recovery:
                            self._in_time = 0
                            self._max_images = None if self._max_images >= len(images) else 2 * self._max_images
        return parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _missed(self, images: int) -> None:
        """Give it fewer images at a time than the ``images`` that missed their deadline, and for longer than before."""
        self._max_images, self._in_time = max(1, images // 2), 0
        self._recovery *= 2

    def allow_longer_than(self, timeout: float) -> None:
        """Give requests twice the time of one that was not answered in ``timeout`` seconds."""
        self.timeout = min(2 * timeout, _SERVER_TIMEOUT)
        self.client.retry_policy = replace(self.client.retry_policy, timeout=self.timeout)


class RemoteRunner:
    """Runs an extractor on servers.

    Each batch goes to the server with the fewest in flight; unreachable ones are skipped.

    Args:
        urls: base URLs of the servers.
        api_key: API key for all of them.
        options: how to pool and cast the outputs.
    """

    def __init__(self, urls: Sequence[str], api_key: str | None, options: FeatureOptions) -> None:
        self._options = options
        key = {"Authorization": f"Bearer {api_key}"} if api_key is not None else None
        try:
            clients = [AsyncClient(url, timeout=_SERVER_TIMEOUT, retries=10_000, headers=key) for url in urls]
        except ValueError as error:
            raise FxError(f"--server: {error}") from error
        self._servers = [_Server(client) for client in clients]
        self._answered_at = 0.0
        self.concurrency = 64 * len(urls)

    async def start(self, spec: ExtractorSpec) -> None:
        """Build the extractor on every server.

        Raises:
            FxError: a server cannot build it, or servers differ in graph, weights or preprocessing.
        """
        infos = await asyncio.gather(*(self._start(server, spec) for server in self._servers))
        first, first_url = infos[0], self._servers[0].client.url
        for server, info in zip(self._servers, infos, strict=True):
            if (info.spec, info.fingerprint) != (first.spec, first.fingerprint):
                raise FxError(f"{server.client.url} and {first_url} build different extractors from {info.spec}")
            if info.images != first.images:
                raise FxError(
                    f"{server.client.url} preprocesses images by {info.images}, but {first_url} by {first.images}"
                )
        self.info = first

    async def features(self, images: Sequence[bytes], regions: Sequence[Regions] | None = None) -> Rows:
        options = {name: value for name, value in self._options.named().items() if value is not None}
        if regions is not None and self._options.pool == "mask":  # the client takes a string for the path of a file
            regions = [[image_text.decode_one(m) if isinstance(m, str) else m for m in masks] for masks in regions]
        deadline = time.monotonic() + _SERVER_TIMEOUT
        delay = 0.5
        while True:
            now = time.monotonic()
            server = min(self._servers, key=lambda one: (max(one.retry_at, now), one.in_flight))
            await asyncio.sleep(min(max(0.0, server.retry_at - now), _MAX_RETRY_DELAY))
            server.in_flight += 1
            began, timeout = time.monotonic(), server.timeout
            try:
                rows = await server.features(images, regions, options)
                self._answered_at = time.monotonic()
                if (kind := KINDS.get(self._options.pool)) is not None:
                    rows.pop(kind.output, None)
                return add_regions(rows, regions, self._options.pool)
            except SERVER_IMAGE_ERRORS:
                raise
            except exceptions.FxserveError as error:
                now = time.monotonic()
                if self._answered_at > began:  # others answer, so the time spent on this server does not count
                    deadline += now - began
                retryable = isinstance(error, _RETRYABLE) or getattr(error, "status", None) == _BAD_GATEWAY
                if not retryable or now + delay > deadline:
                    raise FxError(f"{server.client.url}: {error}") from error
                server.retry_at = now + delay
                if isinstance(error, exceptions.TimedOut):  # prefer others for as long as it might take again
                    server.allow_longer_than(timeout)
                    server.retry_at = now + server.timeout
                delay = min(2 * delay, _MAX_RETRY_DELAY)
            finally:
                server.in_flight -= 1

    async def close(self) -> None:
        for server in self._servers:
            await server.client.close()

    async def _start(self, server: _Server, spec: ExtractorSpec) -> ExtractorInfo:
        """Build the extractor on a server, and describe it."""
        client = server.client
        fields = spec.model_dump(exclude={"model", "return_nodes", "name"})
        try:
            extractor = await client.extractor(spec.model, spec.return_nodes, **fields)
            default = (await client.model(spec.model))["default_preprocess"]["way"]
        except exceptions.FxserveError as error:
            raise FxError(f"{client.url}: {error}") from error
        server.extractor = extractor
        client.retry_policy = replace(client.retry_policy, timeout=server.timeout)
        return describe(
            spec,
            self._options,
            extractor.description,
            backend=None,
            fixed_size=extractor.one_size,
            default_preprocess=default,
        )
