"""What computes features of a batch of encoded images: this process's own engine, or servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxcore.errors import BadBox, BadImage, FxError, ImageTooLarge
from fxcore.images.decoding import WAYS
from service.client import AsyncClient, AsyncExtractor, exceptions
from service.engine import Engine, ExtractorRecord, FeatureOptions
from service.engine.errors import ComputeFailed, OutOfMemory
from service.offline.shards import BOX
from service.offline.sources import Boxes
from service.schemas.v1 import ExtractorSpec
from service.settings import Settings

Rows = dict[str, Tensor]

_ANY = 2**62
"""No limit: the engine's protect a service from its clients, and here the only client sends what there is room for."""

_PATIENCE = 600.0
"""Seconds that a server may take for a batch, or be away; it is asked again whenever it says when to."""

_LONGEST_DELAY = 10.0
"""Seconds between two attempts to reach a server that is away."""

_LATE = 3
"""How often a server may be too late with one image alone before the image is to blame."""


# What one image can be to blame for: of the engine, and of a server.
_OF_IMAGES = (BadImage, BadBox, ImageTooLarge, OutOfMemory, ComputeFailed)
_OF_IMAGES_SENT = (
    exceptions.ImageProblem,
    exceptions.TooLarge,
    exceptions.OutOfMemory,
    exceptions.ComputeFailed,
    exceptions.DeadlineExceeded,
)

# What another server, or the same one later, may do all the same.
_AWAY = (exceptions.ConnectionFailed, exceptions.UnknownExtractor, exceptions.Draining)


class Unreadable(FxError):
    """One image that features cannot be computed of."""


@dataclass(frozen=True)
class Described:
    """An extractor, as ``spec.json`` says it.

    Attributes:
        spec: everything that decides its values, with full names.
        outputs: key, node, layout and stride of each output.
        fingerprint: of the model's graph.
        backend: what computes it in this process; None where servers choose.
        one_size: whether the outputs of all images have one shape.
        images: what is done with an image before the model, in words.
    """

    spec: dict[str, Any]
    outputs: list[dict[str, Any]]
    fingerprint: str
    backend: str | None
    one_size: bool
    images: str


class Computer(Protocol):
    """Computes features, several batches at a time.

    Attributes:
        described: the extractor.
        at_a_time: images that keep it busy.
    """

    described: Described
    at_a_time: int

    async def features(self, images: Sequence[bytes], boxes: Sequence[Boxes] | None = None) -> Rows:
        """Key → ``[len(images), ...]``; of ``boxes``, which are of each image, ``[boxes, ...]``, with the boxes
        themselves, float64 ``[boxes, 4]``, under :data:`~service.offline.shards.BOX`.

        Raises:
            Unreadable: of a single image: none can be computed of it.
            FxError, Problem: anything else; a Problem only of several images, of which one may be to blame.
        """

    async def close(self) -> None:
        """End what it runs."""


class Local:
    """The engine of this process.

    Args:
        settings: as of a service.
        options: what to do with the outputs.
        fast: whether to look for a faster backend first, which takes some seconds.
    """

    at_a_time = 64

    def __init__(self, settings: Settings, options: FeatureOptions, fast: bool) -> None:
        own: dict[str, Any] = {"preload": (), "models": None, "lowering": fast}
        own |= {"max_response_bytes": _ANY, "max_inflight_bytes": _ANY, "request_timeout": 7 * 86400.0}
        self._engine = Engine(settings.model_copy(update=own))
        self._options = options
        self._record: ExtractorRecord | None = None

    async def start(self, spec: ExtractorSpec, served_by: str | None) -> None:
        """Build the extractor.

        Args:
            spec: what to build.
            served_by: the backend that computed earlier rows; ``auto`` means that one then.

        Raises:
            FxError: it cannot be built.
        """
        await self._engine.start()
        asked = spec.backend
        if asked == "auto" and served_by is not None:
            spec = spec.model_copy(update={"backend": served_by})
        record, _ = await self._engine.extractor(spec)
        await self._engine.extractors.load(record)
        await self._engine.settle(record)  # a backend that took over half-way would round the later rows differently
        self._record = record
        self.described = Described(
            spec=_spec(spec, asked, record.weights, record.return_nodes),
            outputs=[_output(vars(info)) for info in record.outputs],
            fingerprint=record.fingerprint,
            backend=record.backend,
            one_size=record.preprocessing.fixed_size and self._options.preprocess != "none",
            images=_images(self._options, self._engine.settings.preprocess),
        )

    async def features(self, images: Sequence[bytes], boxes: Sequence[Boxes] | None = None) -> Rows:
        assert self._record is not None
        try:
            result = await self._engine.features(self._record, images, self._options, boxes=boxes)
            return _beside_boxes(result.outputs, boxes)
        except _OF_IMAGES as error:
            if len(images) > 1:
                raise
            raise Unreadable(error.detail.removeprefix("image 0: ")) from error

    async def close(self) -> None:
        await self._engine.close(0.0)


class _Server:
    """One server, and what a run has learnt of it.

    A server has a deadline of its own for a request. Once it was too late, it is sent one request at a time for the
    rest of the run, of half as many images until it is in time. One that it is late with alone is sent again, and
    unreadable after :data:`_LATE` times; the next run over the folder tries it again.

    Attributes:
        busy: batches that it has.
        away_until: when to try it again, on the monotonic clock.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.extractor: AsyncExtractor | None = None
        self.busy = 0
        self.away_until = 0.0
        self._most: int | None = None
        self._alone = asyncio.Lock()

    async def features(
        self, images: Sequence[bytes], boxes: Sequence[Boxes] | None, options: Mapping[str, Any]
    ) -> Rows:
        """Key → ``[len(images), ...]``.

        Raises:
            FxserveError: there are none.
        """
        assert self.extractor is not None
        if self._most is None:
            try:
                return await self.extractor(list(images), boxes=boxes, as_torch=True, **options)
            except exceptions.DeadlineExceeded:
                self._most = self._most or max(1, len(images) // 2)
        parts: list[Rows] = []
        start = late = 0
        async with self._alone:
            while start < len(images):
                some = list(images[start : start + self._most])
                theirs = None if boxes is None else boxes[start : start + self._most]
                try:
                    parts.append(await self.extractor(some, boxes=theirs, as_torch=True, **options))
                except exceptions.DeadlineExceeded:
                    late += len(some) == 1
                    if late == _LATE or (late and len(images) > 1):
                        raise
                    self._most = max(1, len(some) // 2)
                else:
                    start += len(some)
        return parts[0] if len(parts) == 1 else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


class Remote:
    """Servers; each batch goes to the one that has the fewest, and to another one where that is away.

    Args:
        urls: where they are.
        api_key: what they want to see, if anything.
        options: what to do with the outputs.
    """

    def __init__(self, urls: Sequence[str], api_key: str | None, options: FeatureOptions) -> None:
        self._options = options
        key = {"Authorization": f"Bearer {api_key}"} if api_key is not None else None
        try:
            clients = [AsyncClient(url, timeout=_PATIENCE, retries=10_000, headers=key) for url in urls]
        except ValueError as error:
            raise FxError(f"--server: {error}") from error
        self._servers = [_Server(client) for client in clients]
        self.at_a_time = 64 * len(urls)

    async def start(self, spec: ExtractorSpec) -> None:
        """Have every server build the extractor.

        Raises:
            FxError: one cannot, or they do not mean the same by it.
        """
        extractors = await asyncio.gather(*(self._extractor(server.client, spec) for server in self._servers))
        meant = await asyncio.gather(*(self._meant(server.client, spec.model) for server in self._servers))
        told = [self._described(spec, *each) for each in zip((e.description for e in extractors), meant, strict=True)]
        first = self._servers[0].client.url
        for server, extractor, other in zip(self._servers, extractors, told, strict=True):
            if (other.spec, other.fingerprint) != (told[0].spec, told[0].fingerprint):
                raise FxError(f"{server.client.url} and {first} make another extractor of this: {other.spec}")
            if other.images != told[0].images:
                raise FxError(f"{server.client.url} prepares images by {other.images}, {first} by {told[0].images}")
            server.extractor = extractor
        self.described = told[0]

    async def features(self, images: Sequence[bytes], boxes: Sequence[Boxes] | None = None) -> Rows:
        options = {name: value for name, value in self._options.named().items() if value is not None}
        deadline = time.monotonic() + _PATIENCE
        delay = 0.5
        while True:
            now = time.monotonic()
            server = min(self._servers, key=lambda one: (max(one.away_until, now), one.busy))
            await asyncio.sleep(max(0.0, server.away_until - now))
            server.busy += 1
            try:
                rows = await server.features(images, boxes, options)
                rows.pop("box_image", None)
                return _beside_boxes(rows, boxes)
            except _OF_IMAGES_SENT as error:
                if len(images) > 1:
                    raise
                raise Unreadable(error.detail.removeprefix("image 0: ")) from error
            except exceptions.FxserveError as error:
                if not isinstance(error, _AWAY) or time.monotonic() + delay > deadline:
                    raise FxError(f"{server.client.url}: {error}") from error
                server.away_until = time.monotonic() + delay
                delay = min(2 * delay, _LONGEST_DELAY)
            finally:
                server.busy -= 1

    async def close(self) -> None:
        for server in self._servers:
            await server.client.close()

    async def _extractor(self, client: AsyncClient, spec: ExtractorSpec) -> AsyncExtractor:
        fields = spec.model_dump(exclude={"model", "return_nodes", "name"})
        try:
            return await client.extractor(spec.model, spec.return_nodes, **fields)
        except exceptions.FxserveError as error:
            raise FxError(f"{client.url}: {error}") from error

    async def _meant(self, client: AsyncClient, model: str) -> str:
        try:
            return str((await client.model(model))["default_preprocess"]["way"])
        except exceptions.FxserveError as error:
            raise FxError(f"{client.url}: {error}") from error

    def _described(self, spec: ExtractorSpec, told: Mapping[str, Any], default: str) -> Described:
        nodes = {output["key"]: output["node"] for output in told["outputs"]}
        fixed = not any(size is None for output in told["outputs"] for size in output["shape"][1:])
        return Described(
            spec=_spec(spec, spec.backend, told["weights"], nodes),
            outputs=[_output(output) for output in told["outputs"]],
            fingerprint=told["fingerprint"],
            backend=None,
            one_size=fixed and self._options.preprocess != "none",
            images=_images(self._options, default),
        )


def _beside_boxes(rows: Rows, boxes: Sequence[Boxes] | None) -> Rows:
    if boxes is None:
        return rows
    if BOX in rows:
        raise FxError(f"an output cannot be called {BOX!r}, which is where the boxes of its rows are")
    return {**rows, BOX: torch.tensor([box for of_image in boxes for box in of_image], dtype=torch.float64)}


def concerns_an_image(error: Exception) -> bool:
    """Whether a batch failed because of one or some of its images."""
    return isinstance(error, (*_OF_IMAGES, *_OF_IMAGES_SENT))


def _images(options: FeatureOptions, default: str) -> str:
    way = default if options.preprocess == "default" else options.preprocess
    return WAYS.get(way, "pixels as they are, in [0, 1]")


def _spec(spec: ExtractorSpec, backend: str, weights: str, return_nodes: Mapping[str, str]) -> dict[str, Any]:
    fields = spec.model_dump(mode="json", exclude={"name"})
    return {**fields, "backend": backend, "weights": weights, "return_nodes": dict(return_nodes)}


def _output(output: Mapping[str, Any]) -> dict[str, Any]:
    return {name: output[name] for name in ("key", "node", "layout", "stride")}
