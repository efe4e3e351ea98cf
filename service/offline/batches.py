"""From a few images to rows of features and reasons why there are none."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import PIL.Image

from fxcore.errors import BadImage
from service.engine.device.threads import compute_with
from service.offline.computing import Computer, Rows, Unreadable, concerns_an_image
from service.offline.sources import Reader, Source

_BATCH = 16
"""Images handed to the engine together; it makes its own batches of them."""

_BYTES_UNDER_WAY = 128 * 1024**2
"""About the most bytes of features on their way from the model to a shard."""

_MOST_BOXES = 4096
"""In a batch of several images; a request to a server may have some times as many."""


@dataclass(frozen=True)
class Result:
    """What came of some images, in their order.

    Attributes:
        paths: the image of each row. Those of its boxes follow one another.
        rows: key → ``[n, ...]``, ``n`` rows a part.
        errors: path and reason of images that have none.
    """

    paths: list[str]
    rows: list[Rows]
    errors: list[tuple[str, str]]

    @property
    def images(self) -> int:
        """How many images there are rows of."""
        return len(set(self.paths))


class Batches:
    """Reads images and has features computed of them.

    Args:
        computer: computes them.
        reader: reads them.
        probe: the features of one image, which say how large rows are.

    Attributes:
        at_a_time: batches under way that keep the computer busy and fit into memory.
    """

    def __init__(self, computer: Computer, reader: Reader, probe: Rows) -> None:
        self._computer = computer
        self._reader = reader
        row_bytes = max(1, sum(values.nbytes for values in probe.values()))
        most = max(4, min(computer.at_a_time, _BYTES_UNDER_WAY // row_bytes))
        self._size = max(1, min(_BATCH, most // 4)) if computer.described.one_size else 1
        self.at_a_time = -(-most // self._size)
        self._most_boxes = max(1, min(_MOST_BOXES, _BYTES_UNDER_WAY // row_bytes // self.at_a_time))
        self._readers = ThreadPoolExecutor(4, "fxserve-read", compute_with, (1,))
        self._unpacker = ThreadPoolExecutor(1, "fxserve-unpack", compute_with, (1,))

    def cut(self, images: Sequence[Source]) -> Iterator[Sequence[Source]]:
        """``images`` in batches: some each, fewer where they have many boxes, one at least."""
        start = boxes = 0
        for place, source in enumerate(images):
            rows = 0 if source.boxes is None else source.rows
            if place > start and (place - start == self._size or boxes + rows > self._most_boxes):
                yield images[start:place]
                start, boxes = place, 0
            boxes += rows
        if images:
            yield images[start:]

    async def result(self, batch: Sequence[Source]) -> Result:
        """What comes of ``batch``. An image that cannot be read, or computed, costs no other its place.

        Raises:
            FxError: no image is to blame.
        """
        pool = self._unpacker if any(source.packed for source in batch) else self._readers
        found, errors = await asyncio.get_running_loop().run_in_executor(pool, self._read, batch)
        if not found:
            return Result([], [], errors)
        try:
            boxes = None if found[0][0].boxes is None else [source.boxes or () for source, _ in found]
            rows = await self._computer.features([data for _, data in found], boxes)
            return Result(_paths([source for source, _ in found]), [rows], errors)
        except Exception as error:
            if not concerns_an_image(error) and not isinstance(error, Unreadable):
                raise
        alone = await asyncio.gather(*(self._alone(*one) for one in found))
        done = [(source, one) for (source, _), one in zip(found, alone, strict=True) if isinstance(one, dict)]
        errors += [(source.path, one) for (source, _), one in zip(found, alone, strict=True) if isinstance(one, str)]
        return Result(_paths([source for source, _ in done]), [one for _, one in done], errors)

    def close(self) -> None:
        """Take no more batches."""
        for pool in (self._readers, self._unpacker):
            pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()

    async def _alone(self, source: Source, data: bytes) -> Rows | str:
        try:
            return await self._computer.features([data], None if source.boxes is None else [source.boxes])
        except Unreadable as error:
            return error.detail

    def _read(self, batch: Sequence[Source]) -> tuple[list[tuple[Source, bytes]], list[tuple[str, str]]]:
        found, errors = [], []
        for source in batch:
            try:
                found.append((source, self._reader.read(source)))
            except BadImage as error:
                errors.append((source.path, error.detail))
        return found, errors


def _paths(sources: Sequence[Source]) -> list[str]:
    return [source.path for source in sources for _ in range(source.rows)]


async def probe(computer: Computer, pool: str) -> Rows:
    """The features of an image that is always the same, or of a box in its middle."""
    return await computer.features([_probe_image()], [[[64.0, 64.0, 192.0, 192.0]]] if pool == "roi" else None)


def _probe_image() -> bytes:
    """Coloured noise on a slope, 256 x 256."""
    noise = np.random.default_rng(0).integers(0, 128, (256, 256, 3), dtype=np.uint8)
    slope = np.arange(256, dtype=np.uint8)[:, None, None] // 2
    buffer = io.BytesIO()
    PIL.Image.fromarray(noise + slope).save(buffer, "PNG")
    return buffer.getvalue()
