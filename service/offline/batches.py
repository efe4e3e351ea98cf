"""From a few images to rows of features and reasons why there are none."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Result:
    """What came of some images, in their order.

    Attributes:
        paths: of those that there are rows of.
        rows: key → ``[n, ...]``, ``n`` images a part.
        errors: path and reason of the others.
    """

    paths: list[str]
    rows: list[Rows]
    errors: list[tuple[str, str]]


class Batches:
    """Reads images and has features computed of them.

    Args:
        computer: computes them.
        reader: reads them.
        probe: the features of one image, which say how large rows are.

    Attributes:
        size: images of a batch.
        at_a_time: batches under way that keep the computer busy and fit into memory.
    """

    def __init__(self, computer: Computer, reader: Reader, probe: Rows) -> None:
        self._computer = computer
        self._reader = reader
        row_bytes = max(1, sum(values.nbytes for values in probe.values()))
        most = max(4, min(computer.at_a_time, _BYTES_UNDER_WAY // row_bytes))
        self.size = max(1, min(_BATCH, most // 4)) if computer.described.one_size else 1
        self.at_a_time = -(-most // self.size)
        self._readers = ThreadPoolExecutor(4, "fxserve-read", compute_with, (1,))
        self._unpacker = ThreadPoolExecutor(1, "fxserve-unpack", compute_with, (1,))

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
            rows = await self._computer.features([data for _, data in found])
            return Result([path for path, _ in found], [rows], errors)
        except Exception as error:
            if not concerns_an_image(error) and not isinstance(error, Unreadable):
                raise
        alone = await asyncio.gather(*(self._alone(data) for _, data in found))
        done = [(path, one) for (path, _), one in zip(found, alone, strict=True) if isinstance(one, dict)]
        errors += [(path, one) for (path, _), one in zip(found, alone, strict=True) if isinstance(one, str)]
        return Result([path for path, _ in done], [one for _, one in done], errors)

    def close(self) -> None:
        """Take no more batches."""
        for pool in (self._readers, self._unpacker):
            pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()

    async def _alone(self, data: bytes) -> Rows | str:
        try:
            return await self._computer.features([data])
        except Unreadable as error:
            return error.detail

    def _read(self, batch: Sequence[Source]) -> tuple[list[tuple[str, bytes]], list[tuple[str, str]]]:
        found, errors = [], []
        for source in batch:
            try:
                found.append((source.path, self._reader.read(source)))
            except BadImage as error:
                errors.append((source.path, error.detail))
        return found, errors


def probe_image() -> bytes:
    """An image that is always the same: coloured noise on a slope."""
    noise = np.random.default_rng(0).integers(0, 128, (256, 256, 3), dtype=np.uint8)
    slope = np.arange(256, dtype=np.uint8)[:, None, None] // 2
    buffer = io.BytesIO()
    PIL.Image.fromarray(noise + slope).save(buffer, "PNG")
    return buffer.getvalue()
