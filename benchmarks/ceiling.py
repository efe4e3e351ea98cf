"""What these cores can do: the service's own decoding and lowered model, called directly. No HTTP, no queue, no answer.

A program of its own, so that nothing of the benchmark shares its threads. It finds the best size of batch and number
of threads, prints them as JSON, and from then on answers every line that it reads with the images a second that it
measures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice

import photos
import torch

from fxcore.pooling import pool
from service.engine import Engine, ExtractorRecord
from service.engine.device.staging import Staging
from service.engine.device.threads import compute_with, run_at_low_priority
from service.engine.requests.jpeg_groups import FEWEST, MOST
from service.garbage import release
from service.schemas.v1 import ExtractorSpec
from service.settings import Settings


async def record_of(spec: ExtractorSpec, settle: float) -> ExtractorRecord:
    """A built extractor, lowered if it is going to be within ``settle`` seconds."""
    engine = Engine(Settings())
    await engine.start()
    record, _ = await engine.extractor(spec, 600)
    if record.state != "ready":
        raise SystemExit(f"no ceiling: {record.problem}")
    with suppress(TimeoutError):
        async with asyncio.timeout(settle):
            await engine.settle(record)
    return record


class Ceiling:
    """One extractor with ``decoders`` threads that decode, each file by itself or, on CUDA, several ``together``, and
    ``threads`` that compute."""

    def __init__(
        self, record: ExtractorRecord, files: list[bytes], pooled: bool, decoders: int, threads: int, together: bool
    ) -> None:
        self.record = record
        self.together = record.jpeg_batches if together else None
        self.files = cycle(files)
        self.pooled = pooled
        self.staging = Staging(torch.device(record.device))
        self.pool = ThreadPoolExecutor(decoders, initializer=run_at_low_priority)
        compute_with(threads)

    def rate(self, size: int, seconds: float) -> float:
        """Images a second in batches of ``size``, the next being decoded while one is computed."""
        done = -2 * size  # two batches to warm up
        started = time.perf_counter()
        following = self._decode(size)
        while done <= 0 or time.perf_counter() - started < seconds:
            if done <= 0:
                started = time.perf_counter()
            inputs = following()
            following = self._decode(size)
            self._compute(inputs)
            done += size
        following()
        return done / (time.perf_counter() - started)

    def latency(self, seconds: float) -> float:
        """Median milliseconds of one image after another, decoded and computed."""
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken) < 5:
            started = time.perf_counter()
            self._compute(self._decode(1)())
            taken.append(1000 * (time.perf_counter() - started))
        return statistics.median(taken[len(taken) // 5 :])

    def _decode(self, size: int) -> Callable[[], list[torch.Tensor]]:
        files = list(islice(self.files, size))
        if self.together is not None:
            groups = [files[start : start + MOST] for start in range(0, size, MOST)]
            work = [self.pool.submit(self.together.rows, group) for group in groups]
            return lambda: [part.result() for part in work]
        alone = [self.pool.submit(self.record.decoder.image, data) for data in files]
        return lambda: [row.result()[None] for row in alone]

    def _compute(self, parts: list[torch.Tensor]) -> None:
        run = self.record.run
        assert run is not None
        with torch.inference_mode():
            inputs = self.staging.inputs([(part,) for part in parts], self.record.decoder, self.record.dtype)
            outputs = run(*inputs)
            for info in self.record.outputs:
                value = outputs[info.key]
                (pool(value, info.layout, "avg") if self.pooled else value).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", help="an ExtractorSpec as JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="that each measurement lasts")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds that backend=auto gets to lower")
    parser.add_argument("--pooled", action="store_true", help="pool the outputs")
    parser.add_argument("--latency", action="store_true", help="measure one image after another")
    options = parser.parse_args()
    record = asyncio.run(record_of(ExtractorSpec.model_validate_json(options.spec), options.settle))
    settings = Settings()
    every = settings.compute_threads
    on_cuda = record.jpeg_batches is not None
    sizes = (1,) if options.latency else (1, 4, 8, 16, 32, *((128,) if on_cuda else ()))

    def measured(way: tuple[int, int, int, bool]) -> float:
        """Images a second."""
        size, decoders, threads, together = way
        ceiling = Ceiling(record, photos.jpegs(), options.pooled, decoders, threads, together)
        return 1000 / ceiling.latency(options.seconds) if options.latency else ceiling.rate(size, options.seconds)

    splits = sorted({(1, 1), (1, every), (settings.decode_threads, every)})
    ways = [(size, *split, False) for split in splits for size in sizes]
    ways += [(size, *split, True) for split in splits for size in sizes if on_cuda and size >= FEWEST]
    best = max(ways, key=measured)
    how = "batch {}, {} decoding, {} computing".format(*best) + (", decoded together" if best[3] else "")
    print(json.dumps({"backend": record.backend, "how": how}), flush=True)
    # The best of fifteen is a lucky one on a machine that others share, so what found it does not count.
    for _ in sys.stdin:
        print(json.dumps(measured(best)), flush=True)
    release()


if __name__ == "__main__":
    main()
