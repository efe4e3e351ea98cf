"""What computes features of a batch of encoded images: this process's own engine, or servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fxcore.errors import BadImage, FxError, ImageTooLarge
from service.client import AsyncClient, AsyncExtractor, errors
from service.engine import Engine, ExtractorRecord, FeatureOptions
from service.engine.errors import ComputeFailed, OutOfMemory
from service.engine.options import CHOICES
from service.schemas import ExtractorSpec
from service.settings import Settings

Rows = dict[str, Tensor]

_ANY = 2**62
"""The engine's limits protect a service from its clients; here there is one, which sends what it has room for."""

_PATIENCE = 600.0
"""Seconds that a server may take for a batch; it is asked again as long as it says when."""


# What one image can be to blame for: of the engine, and of a server.
_OF_IMAGES = (BadImage, ImageTooLarge, OutOfMemory, ComputeFailed)
_OF_IMAGES_SENT = (errors.OfImage, errors.OutOfMemory, errors.ComputeFailed)


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
    """

    spec: dict[str, Any]
    outputs: list[dict[str, Any]]
    fingerprint: str
    backend: str | None
    one_size: bool


class Computer(Protocol):
    """Computes features, several batches at a time.

    Attributes:
        described: the extractor.
        at_a_time: images that keep it busy.
    """

    described: Described
    at_a_time: int

    async def features(self, images: Sequence[bytes]) -> Rows:
        """Key → ``[len(images), ...]``.

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
        await self._engine.load(record)
        await self._engine.settle(record)  # a backend that took over half-way would round the later rows differently
        self._record = record
        self.described = Described(
            spec=_spec(spec, asked, record.weights, record.return_nodes),
            outputs=[_output(vars(info)) for info in record.outputs],
            fingerprint=record.fingerprint,
            backend=record.backend,
            one_size=record.preprocessing.fixed_size and self._options.preprocess != "none",
        )

    async def features(self, images: Sequence[bytes]) -> Rows:
        assert self._record is not None
        try:
            return (await self._engine.features(self._record, images, self._options)).outputs
        except _OF_IMAGES as error:
            if len(images) > 1:
                raise
            raise Unreadable(error.detail.removeprefix("image 0: ")) from error

    async def close(self) -> None:
        await self._engine.close(0.0)


class Remote:
    """Servers; each batch goes to the one that has the fewest.

    Args:
        urls: where they are.
        api_key: what they want to see, if anything.
        options: what to do with the outputs.
    """

    def __init__(self, urls: Sequence[str], api_key: str | None, options: FeatureOptions) -> None:
        self._options = options
        key = {"Authorization": f"Bearer {api_key}"} if api_key is not None else None
        try:
            self._clients = [AsyncClient(url, timeout=_PATIENCE, retries=10_000, headers=key) for url in urls]
        except ValueError as error:
            raise FxError(f"--server: {error}") from error
        self._extractors: list[AsyncExtractor] = []
        self._busy = [0] * len(urls)
        self.at_a_time = 64 * len(urls)

    async def start(self, spec: ExtractorSpec) -> None:
        """Have every server build the extractor.

        Raises:
            FxError: one cannot, or they do not mean the same by it.
        """
        self._extractors = await asyncio.gather(*(self._extractor(client, spec) for client in self._clients))
        told = [self._described(spec, extractor.description) for extractor in self._extractors]
        for client, other in zip(self._clients, told, strict=True):
            if (other.spec, other.fingerprint) != (told[0].spec, told[0].fingerprint):
                raise FxError(f"{client.url} and {self._clients[0].url} make another extractor of this: {other.spec}")
        self.described = told[0]

    async def features(self, images: Sequence[bytes]) -> Rows:
        place = min(range(len(self._extractors)), key=self._busy.__getitem__)
        self._busy[place] += 1
        given = {name: getattr(self._options, name) for name in CHOICES}
        options = {name: value for name, value in given.items() if value is not None}
        try:
            return await self._extractors[place](list(images), as_torch=True, **options)
        except _OF_IMAGES_SENT as error:
            if len(images) > 1:
                raise
            raise Unreadable(error.detail.removeprefix("image 0: ")) from error
        except errors.FxserveError as error:
            raise FxError(f"{self._clients[place].url}: {error}") from error
        finally:
            self._busy[place] -= 1

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def _extractor(self, client: AsyncClient, spec: ExtractorSpec) -> AsyncExtractor:
        fields = spec.model_dump(exclude={"model", "return_nodes", "name"})
        try:
            return await client.extractor(spec.model, spec.return_nodes, **fields)
        except errors.FxserveError as error:
            raise FxError(f"{client.url}: {error}") from error

    def _described(self, spec: ExtractorSpec, told: Mapping[str, Any]) -> Described:
        nodes = {output["key"]: output["node"] for output in told["outputs"]}
        fixed = not any(size is None for output in told["outputs"] for size in output["shape"][1:])
        return Described(
            spec=_spec(spec, spec.backend, told["weights"], nodes),
            outputs=[_output(output) for output in told["outputs"]],
            fingerprint=told["fingerprint"],
            backend=None,
            one_size=fixed and self._options.preprocess != "none",
        )


def concerns_an_image(error: Exception) -> bool:
    """Whether a batch failed because of one or some of its images."""
    return isinstance(error, (*_OF_IMAGES, *_OF_IMAGES_SENT))


def _spec(spec: ExtractorSpec, backend: str, weights: str, return_nodes: Mapping[str, str]) -> dict[str, Any]:
    fields = spec.model_dump(mode="json", exclude={"name"})
    return {**fields, "backend": backend, "weights": weights, "return_nodes": dict(return_nodes)}


def _output(output: Mapping[str, Any]) -> dict[str, Any]:
    return {name: output[name] for name in ("key", "node", "layout", "stride")}
