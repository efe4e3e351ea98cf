"""Read batches of images and run the extractor on them."""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import PIL.Image

from fxcore.errors import BadImage, FxError
from service.engine.threads import compute_with
from service.offline.inputs.reader import Reader
from service.offline.inputs.sources import Source
from service.offline.runners.runner import Rows, Runner, image_error

_BATCH = 16
"""Images submitted to the runner together; the engine forms its own batches of them."""

_MAX_BYTES_IN_FLIGHT = 128 * 1024**2
"""Approximate maximum bytes of features between the model and the shards."""

_MAX_REGIONS = 4096
"""Maximum regions in a batch of several images; below the limit of a server's request."""


@dataclass(frozen=True)
class Result:
    """Features of some images, in their order.

    Attributes:
        paths: path of each row's image. Rows of one image, its regions, are consecutive.
        rows: key → ``[len(paths), ...]``; empty if there are none.
        errors: (path, reason) of the images without features.
    """

    paths: list[str]
    rows: Rows
    errors: list[tuple[str, str]]


_PROBED = {
    "roi": [64.0, 64.0, 192.0, 192.0],
    "points": [100.0, 128.0],
    "mask": {"size": [256, 256], "counts": [64 * 256, 128 * 256, 64 * 256]},
}
"""A region of the fixed image for each kind of region pooling."""


class Batches:
    """Reads images and runs the extractor on them.

    Args:
        runner: runs the extractor.
        reader: reads the images.
        probe: the features of one image, which give the size of a row.
    """

    def __init__(self, runner: Runner, reader: Reader, probe: Rows) -> None:
        self._runner = runner
        self._reader = reader
        row_bytes = max(1, sum(values.nbytes for values in probe.values()))
        images = max(4, min(runner.concurrency, _MAX_BYTES_IN_FLIGHT // row_bytes))
        self._size = max(1, min(_BATCH, images // 4)) if runner.info.one_size else 1
        # Batches in flight that keep the runner busy and fit in memory.
        self._concurrency = -(-images // self._size)
        self._max_regions = max(1, min(_MAX_REGIONS, _MAX_BYTES_IN_FLIGHT // row_bytes // self._concurrency))
        self._readers = ThreadPoolExecutor(4, "fxserve-read", compute_with, (1,))
        self._unpacker = ThreadPoolExecutor(1, "fxserve-unpack", compute_with, (1,))

    async def results(self, blocks: Iterator[Sequence[Source]]) -> AsyncGenerator[Result, None]:
        """Compute the features of blocks of images in batches, several concurrently, and yield them in order.

        An image that fails does not affect the others. Images of a batch that had to be computed separately are
        separate results: their outputs may differ in shape.

        Raises:
            FxError: the failure is not due to an image.
        """
        in_flight: deque[asyncio.Task[list[Result]]] = deque()
        try:
            while block := await asyncio.to_thread(next, blocks, None):
                for batch in self._split(block):
                    while len(in_flight) >= self._concurrency:
                        for result in await in_flight[0]:
                            yield result
                        in_flight.popleft()
                    in_flight.append(asyncio.create_task(self._run(batch)))
            while in_flight:
                for result in await in_flight[0]:
                    yield result
                in_flight.popleft()
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    def close(self) -> None:
        """Stop the readers."""
        for pool in (self._readers, self._unpacker):
            pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()

    def _split(self, images: Sequence[Source]) -> Iterator[Sequence[Source]]:
        """Split ``images`` into batches, which are smaller if images have many regions."""
        start = regions = 0
        for place, source in enumerate(images):
            rows = 0 if source.regions is None else source.rows
            if place > start and (place - start == self._size or regions + rows > self._max_regions):
                yield images[start:place]
                start, regions = place, 0
            regions += rows
        if images:
            yield images[start:]

    async def _run(self, batch: Sequence[Source]) -> list[Result]:
        pool = self._unpacker if any(map(_is_packed, batch)) else self._readers
        found, errors = await asyncio.get_running_loop().run_in_executor(pool, self._read, batch)
        results = await self._compute(found) if found else []
        if errors:
            results.append(Result([], {}, errors))
        return results

    async def _compute(self, found: Sequence[tuple[Source, bytes]]) -> list[Result]:
        """Compute the features of images: of each separately if one of them fails the batch."""
        sources = [source for source, _ in found]
        try:
            regions = None if sources[0].regions is None else [source.regions or () for source in sources]
            rows = await self._runner.features([data for _, data in found], regions)
        except Exception as error:
            reason = image_error(error)
            if reason is None:
                raise
            if len(found) == 1:
                return [Result([], {}, [(sources[0].path, reason)])]
        else:
            return [Result([source.path for source in sources for _ in range(source.rows)], rows, [])]
        separate = await asyncio.gather(*(self._compute([one]) for one in found))
        return [result for [result] in separate]

    def _read(self, batch: Sequence[Source]) -> tuple[list[tuple[Source, bytes]], list[tuple[str, str]]]:
        found, errors = [], []
        for source in batch:
            try:
                found.append((source, self._reader.read(source)))
            except BadImage as error:
                errors.append((source.path, error.detail))
        return found, errors


def _is_packed(source: Source) -> bool:
    try:
        return source.in_compressed_archive
    except Exception:  # raised again when it is read
        return False


async def probe(runner: Runner, pool: str) -> Rows:
    """Compute the features of a fixed image, or of a region in its middle.

    Raises:
        FxError: they cannot be computed.
    """
    region = _PROBED.get(pool)
    try:
        return await runner.features([_probe_image()], None if region is None else [[region]])
    except Exception as error:
        if (reason := image_error(error)) is None:
            raise
        raise FxError(reason) from error


def _probe_image() -> bytes:
    """Encode the fixed image: coloured noise on a gradient, 256 x 256."""
    noise = np.random.default_rng(0).integers(0, 128, (256, 256, 3), dtype=np.uint8)
    slope = np.arange(256, dtype=np.uint8)[:, None, None] // 2
    buffer = io.BytesIO()
    PIL.Image.fromarray(noise + slope).save(buffer, "PNG")
    return buffer.getvalue()
