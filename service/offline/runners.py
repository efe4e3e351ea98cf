"""Running an extractor on batches of encoded images, on an engine in this process or on servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fxcore.errors import BadBox, BadImage, BadMask, BadPoint, FxError, ImageTooLarge
from fxcore.images.decoding import PREPROCESS_MODES
from service.choices import RegionPooling
from service.client import AsyncClient, AsyncExtractor, exceptions
from service.codecs.requests import regions as body_regions
from service.engine import Engine, ExtractorRecord, FeatureOptions
from service.engine.rows.shapes import row_layout
from service.offline.inputs.sources import Regions
from service.problems import Problem
from service.schemas.regions import KINDS
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

Rows = dict[str, Tensor]

_OWN_SETTINGS = frozenset(
    {
        *("device", "compute_threads", "decode_threads", "encode_threads", "build_threads"),
        *("cache_dir", "calibration_dir", "models_dir", "weights_dir"),
        *("preprocess", "max_pixels", "max_batch", "max_batch_bytes", "memory_budget", "max_nodes"),
    }
)
"""The settings that apply to an offline run: device, threads, folders, preprocessing and sizes."""

_LIMITS = {"max_inflight": 2**31, "max_inflight_bytes": 2**62, "max_response_bytes": 2**62}
"""Effectively unlimited: these limits protect a service from its clients, and here the only client limits its own
load."""

_SERVER_TIMEOUT = 600.0
"""Maximum seconds of a batch, including retries, or of a server being unreachable."""

_MAX_RETRY_DELAY = 10.0
"""Maximum seconds between two attempts to reach a server."""

_MAX_TIMEOUTS = 3
"""Number of timeouts after which a single image counts as unreadable."""

# Errors that a single image can cause, in the engine and on a server.
_SERVER_IMAGE_ERRORS = (
    exceptions.ImageProblem,
    exceptions.TooLarge,
    exceptions.OutOfMemory,
    exceptions.ComputeFailed,
    exceptions.DeadlineExceeded,
)
_IMAGE_ERRORS = (*_SERVER_IMAGE_ERRORS, BadImage, BadBox, BadPoint, BadMask, ImageTooLarge)

# Errors that may not occur on another server, or later on the same one.
_RETRYABLE = (exceptions.ConnectionFailed, exceptions.UnknownExtractor, exceptions.Draining)


class Unreadable(FxError):
    """The features of an image cannot be computed."""


@dataclass(frozen=True)
class RowLayout:
    """The meaning of the dimensions of an output's rows.

    Attributes:
        layout: layout of the rows; None if it is unknown, or if rows are pooled and have their channels in dimension 1.
        prefix: number of tokens before those of the positions.
    """

    layout: str | None = None
    prefix: int = 0


@dataclass(frozen=True)
class ExtractorInfo:
    """Description of an extractor, for ``spec.json``.

    Attributes:
        spec: everything that determines its values, with node names and weights resolved.
        outputs: key, node, layout and stride of each output.
        fingerprint: hash of the model's graph.
        backend: the backend in this process; None if servers choose.
        one_size: whether outputs have the same shape for all images.
        images: description of how images are preprocessed.
        layouts: key → layout of each output's rows.
    """

    spec: dict[str, Any]
    outputs: list[dict[str, Any]]
    fingerprint: str
    backend: str | None
    one_size: bool
    images: str
    layouts: dict[str, RowLayout]


class Runner(Protocol):
    """Runs one extractor on several batches concurrently.

    Attributes:
        info: describes the extractor.
        concurrency: number of images in flight that keeps it busy.
    """

    info: ExtractorInfo
    concurrency: int

    async def start(self, spec: ExtractorSpec) -> None:
        """Build the extractor.

        Raises:
            FxError: it cannot be built.
        """

    async def features(self, images: Sequence[bytes], regions: Sequence[Regions] | None = None) -> Rows:
        """Compute key → ``[len(images), ...]``.

        With ``regions``, a list for each image, the first dimension is the regions. The key ``box`` or ``point`` has
        their coordinates, float64 ``[regions, 4]`` or ``[regions, 2]``; the key ``mask`` has their indices in the
        lists, int64.

        Raises:
            Unreadable: the features of a single image cannot be computed.
            FxError, Problem: any other failure. With several images, one of them may be the cause:
                see :func:`is_image_error`.
        """

    async def close(self) -> None:
        """Stop the engine, or close the connections."""


class LocalRunner:
    """Runs an extractor on an engine in this process.

    Args:
        settings: settings of the engine. Server settings, such as limits and the store of extractors, are ignored.
        options: how to pool and cast the outputs.
        images: number of images of the run; a faster backend is searched for if that saves time.
        served_by: the backend that computed earlier rows; ``auto`` then means that one.
    """

    concurrency = 64

    def __init__(self, settings: Settings, options: FeatureOptions, images: int, served_by: str | None) -> None:
        fields = Settings.model_fields
        changed: dict[str, Any] = {
            name: fields[name].get_default(call_default_factory=True) for name in fields.keys() - _OWN_SETTINGS
        }
        changed |= {"lowering": False, "request_timeout": 7 * 86400.0, **_LIMITS}
        self._engine = Engine(settings.model_copy(update=changed))
        self._options = options
        self._images = images
        self._served_by = served_by
        self._lowering = settings.lowering
        self._record: ExtractorRecord | None = None

    async def start(self, spec: ExtractorSpec) -> None:
        await self._engine.start()
        requested = spec.backend
        if requested == "auto" and self._served_by is not None:
            spec = spec.model_copy(update={"backend": self._served_by})
        record, _ = await self._engine.extractor(spec)
        runtime = await self._engine.runtimes.load(record)
        if self._lowering:  # now, because switching backends during the run would round later rows differently
            await self._engine.settle(runtime, self._images)
        self._record, description = record, record.description
        self.info = ExtractorInfo(
            spec=_spec(spec, requested, description.weights, description.return_nodes),
            outputs=[_output(vars(info)) for info in runtime.outputs],
            fingerprint=description.fingerprint,
            backend=runtime.backend,
            one_size=description.preprocessing.fixed_size and self._options.preprocess != "none",
            images=_images(self._options, self._engine.settings.preprocess),
            layouts={info.key: _row_layout(self._options, vars(info), info.prefix.count) for info in runtime.outputs},
        )

    async def features(self, images: Sequence[bytes], regions: Sequence[Regions] | None = None) -> Rows:
        assert self._record is not None
        try:
            pool = cast(RegionPooling, self._options.pool)
            given = None if regions is None else body_regions.given(pool, regions)
            result = await self._engine.features(self._record, images, self._options, regions=given)
            return _add_regions(result.outputs, regions, self._options.pool)
        except Exception as error:
            if len(images) > 1 or not is_image_error(error):
                raise
            reason = error.detail if isinstance(error, FxError | Problem) else f"{type(error).__name__}: {error}"
            raise Unreadable(reason.removeprefix("image 0: ")) from error

    async def close(self) -> None:
        await self._engine.close(0.0)


class _Server:
    """One server and its state in this run.

    After a request times out, the server gets one request at a time for the rest of the run, with half as many images
    after each timeout. A single image that times out is retried, and counts as unreadable after :data:`_MAX_TIMEOUTS`
    attempts; the next run into the folder tries it again.

    Attributes:
        in_flight: batches sent to it that are not answered yet.
        retry_at: when to use it again after a failure, on the monotonic clock.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.extractor: AsyncExtractor | None = None
        self.in_flight = 0
        self.retry_at = 0.0
        self._max_images: int | None = None
        self._one_request = asyncio.Lock()

    async def features(
        self, images: Sequence[bytes], regions: Sequence[Regions] | None, options: Mapping[str, Any]
    ) -> Rows:
        """Compute key → ``[len(images), ...]``, in several requests once one has timed out.

        Raises:
            FxserveError: the server failed or rejected a request.
        """
        assert self.extractor is not None
        kind = KINDS.get(options["pool"])
        field = kind.field if kind is not None else ""
        if self._max_images is None:
            try:
                given: dict[str, Any] = {} if regions is None else {field: regions}
                return await self.extractor(list(images), as_torch=True, **given, **options)
            except exceptions.DeadlineExceeded:
                self._max_images = self._max_images or max(1, len(images) // 2)
        parts: list[Rows] = []
        start = timeouts = 0
        async with self._one_request:
            while start < len(images):
                some = list(images[start : start + self._max_images])
                given = {} if regions is None else {field: regions[start : start + self._max_images]}
                try:
                    parts.append(await self.extractor(some, as_torch=True, **given, **options))
                except exceptions.DeadlineExceeded:
                    timeouts += len(some) == 1
                    if timeouts == _MAX_TIMEOUTS or (timeouts and len(images) > 1):
                        raise
                    self._max_images = max(1, len(some) // 2)
                else:
                    start += len(some)
        return parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


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
        self.concurrency = 64 * len(urls)

    async def start(self, spec: ExtractorSpec) -> None:
        """Build the extractor on every server.

        Raises:
            FxError: a server cannot build it, or servers differ in graph, weights or preprocessing.
        """
        extractors = await asyncio.gather(*(self._extractor(server.client, spec) for server in self._servers))
        defaults = await asyncio.gather(
            *(self._default_preprocess(server.client, spec.model) for server in self._servers)
        )
        infos = [self._info(spec, e.description, default) for e, default in zip(extractors, defaults, strict=True)]
        first, first_url = infos[0], self._servers[0].client.url
        for server, extractor, info in zip(self._servers, extractors, infos, strict=True):
            if (info.spec, info.fingerprint) != (first.spec, first.fingerprint):
                raise FxError(f"{server.client.url} and {first_url} build different extractors from {info.spec}")
            if info.images != first.images:
                raise FxError(
                    f"{server.client.url} preprocesses images by {info.images}, but {first_url} by {first.images}"
                )
            server.extractor = extractor
        self.info = first

    async def features(self, images: Sequence[bytes], regions: Sequence[Regions] | None = None) -> Rows:
        options = {name: value for name, value in self._options.named().items() if value is not None}
        deadline = time.monotonic() + _SERVER_TIMEOUT
        delay = 0.5
        while True:
            now = time.monotonic()
            server = min(self._servers, key=lambda one: (max(one.retry_at, now), one.in_flight))
            await asyncio.sleep(max(0.0, server.retry_at - now))
            server.in_flight += 1
            try:
                rows = await server.features(images, regions, options)
                if (kind := KINDS.get(self._options.pool)) is not None:
                    rows.pop(kind.output, None)
                return _add_regions(rows, regions, self._options.pool)
            except _SERVER_IMAGE_ERRORS as error:
                if len(images) > 1:
                    raise
                raise Unreadable(error.detail.removeprefix("image 0: ")) from error
            except exceptions.FxserveError as error:
                if not isinstance(error, _RETRYABLE) or time.monotonic() + delay > deadline:
                    raise FxError(f"{server.client.url}: {error}") from error
                server.retry_at = time.monotonic() + delay
                delay = min(2 * delay, _MAX_RETRY_DELAY)
            finally:
                server.in_flight -= 1

    async def close(self) -> None:
        for server in self._servers:
            await server.client.close()

    async def _extractor(self, client: AsyncClient, spec: ExtractorSpec) -> AsyncExtractor:
        fields = spec.model_dump(exclude={"model", "return_nodes", "name"})
        try:
            return await client.extractor(spec.model, spec.return_nodes, **fields)
        except exceptions.FxserveError as error:
            raise FxError(f"{client.url}: {error}") from error

    async def _default_preprocess(self, client: AsyncClient, model: str) -> str:
        try:
            return str((await client.model(model))["default_preprocess"]["way"])
        except exceptions.FxserveError as error:
            raise FxError(f"{client.url}: {error}") from error

    def _info(self, spec: ExtractorSpec, description: Mapping[str, Any], default: str) -> ExtractorInfo:
        nodes = {output["key"]: output["node"] for output in description["outputs"]}
        fixed = not any(size is None for output in description["outputs"] for size in output["shape"][1:])
        return ExtractorInfo(
            spec=_spec(spec, spec.backend, description["weights"], nodes),
            outputs=[_output(output) for output in description["outputs"]],
            fingerprint=description["fingerprint"],
            backend=None,
            one_size=fixed and self._options.preprocess != "none",
            images=_images(self._options, default),
            layouts={
                output["key"]: _row_layout(self._options, output, (output.get("prefix") or {}).get("count", 0))
                for output in description["outputs"]
            },
        )


def _add_regions(rows: Rows, regions: Sequence[Regions] | None, pool: str) -> Rows:
    """Add the coordinates of the regions, or the indices of masks, to the outputs."""
    if regions is None:
        return rows
    kind = KINDS[pool]
    if kind.one in rows:
        raise FxError(f"an output cannot be named {kind.one!r}, which is the column of {kind.field}")
    if pool == "mask":
        places = [place for of_image in regions for place in range(len(of_image))]
        return {**rows, kind.one: torch.tensor(places, dtype=torch.int64)}
    return {**rows, kind.one: torch.tensor([one for of_image in regions for one in of_image], dtype=torch.float64)}


def is_image_error(error: Exception) -> bool:
    """Return whether a batch may have failed because of one of its images. Unknown errors count as well."""
    if isinstance(error, (FxError, exceptions.FxserveError)):
        return isinstance(error, _IMAGE_ERRORS)
    return True


def _images(options: FeatureOptions, default: str) -> str:
    preprocess = default if options.preprocess == "default" else options.preprocess
    return PREPROCESS_MODES.get(preprocess, "pixels as they are, in [0, 1]")


def _row_layout(options: FeatureOptions, output: Mapping[str, Any], prefix: int) -> RowLayout:
    if options.one_shape:  # pooled or projected
        return RowLayout()
    return RowLayout(row_layout(output["layout"], output["rows_per_image"]), prefix)


def _spec(spec: ExtractorSpec, backend: str, weights: str, return_nodes: Mapping[str, str]) -> dict[str, Any]:
    # The default fit is omitted, as in folders older than this field.
    fields = spec.model_dump(mode="json", exclude={"name", *(["fit"] if spec.fit == "crop" else [])})
    return {**fields, "backend": backend, "weights": weights, "return_nodes": dict(return_nodes)}


def _output(output: Mapping[str, Any]) -> dict[str, Any]:
    return {name: output[name] for name in ("key", "node", "layout", "stride")}
