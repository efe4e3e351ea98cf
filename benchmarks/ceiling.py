"""Measure the upper bound of throughput: the service's decoding and lowered model, without HTTP, queue or encoding.

It runs as a separate process, so that it shares no threads with the benchmark. It finds the best batch size and number
of threads, prints them as JSON, and then, for each line read from stdin, measures and prints images/s.
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
from service.engine import Engine
from service.engine.device.staging import Staging
from service.engine.runtime.runtime import Runtime
from service.engine.threads import compute_with, run_at_low_priority
from service.schemas.specs import ExtractorSpec
from service.settings import Settings


async def runtime_of(spec: ExtractorSpec, settle: float) -> Runtime:
    """Build an extractor and wait up to ``settle`` seconds for its lowering."""
    engine = Engine(Settings())
    await engine.start()
    record, _ = await engine.extractors.get(spec, 600)
    if record.state != "ready":
        raise SystemExit(f"the extractor cannot be built: {record.problem}")
    with suppress(TimeoutError):
        async with asyncio.timeout(settle):
            await engine.settle(record.runtime)
    return record.runtime


class Ceiling:
    """An extractor with ``decoders`` decoding threads and ``threads`` compute threads."""

    def __init__(self, runtime: Runtime, files: list[bytes], pooled: bool, decoders: int, threads: int) -> None:
        self.runtime = runtime
        self.files = cycle(files)
        self.pooled = pooled
        self.staging = Staging(torch.device(runtime.description.device))
        self.pool = ThreadPoolExecutor(decoders, initializer=run_at_low_priority)
        compute_with(threads)

    def rate(self, size: int, seconds: float) -> float:
        """Measure images/s in batches of ``size``, decoding the next batch while one is computed."""
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
        """Measure the median milliseconds to decode and compute one image after another."""
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken) < 5:
            started = time.perf_counter()
            self._compute(self._decode(1)())
            taken.append(1000 * (time.perf_counter() - started))
        return statistics.median(taken[len(taken) // 5 :])

    def _decode(self, size: int) -> Callable[[], list[torch.Tensor]]:
        files = list(islice(self.files, size))
        rows = [self.pool.submit(self.runtime.description.decoder.image, data) for data in files]
        return lambda: [row.result()[None] for row in rows]

    def _compute(self, parts: list[torch.Tensor]) -> None:
        description = self.runtime.description
        with torch.inference_mode():
            inputs = self.staging.inputs([(part,) for part in parts], description.decoder, description.dtype)
            outputs = self.runtime.run(*inputs)
            for info in self.runtime.extractor.outputs:
                value = outputs[info.key]
                (pool(value, info.layout, "avg", info.prefix) if self.pooled else value).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", help="an ExtractorSpec as JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds to wait for backend=auto to lower")
    parser.add_argument("--pooled", action="store_true", help="pool the outputs")
    parser.add_argument("--latency", action="store_true", help="measure latency of single images instead of throughput")
    options = parser.parse_args()
    runtime = asyncio.run(runtime_of(ExtractorSpec.model_validate_json(options.spec), options.settle))
    settings = Settings()
    every = settings.compute_threads
    on_cuda = runtime.description.device != "cpu"
    sizes = (1,) if options.latency else (8, 32, 128) if on_cuda else (1, 4, 8, 16, 32)

    def measure(setup: tuple[int, int, int]) -> float:
        """Measure images/s."""
        size, decoders, threads = setup
        ceiling = Ceiling(runtime, photos.jpegs(), options.pooled, decoders, threads)
        return 1000 / ceiling.latency(options.seconds) if options.latency else ceiling.rate(size, options.seconds)

    if on_cuda:
        splits = [(decoders, 1) for decoders in (1, 4, 8, 16) if decoders <= every]
    else:
        splits = sorted({(1, 1), (1, every), (settings.decode_threads, every)})
    setups = [(size, *split) for split in splits for size in sizes]
    best = max(setups, key=measure)
    how = "batch {}, {} decoding, {} computing".format(*best)
    print(json.dumps({"backend": runtime.backend, "how": how}), flush=True)
    # Measured again: the best of many measurements is biased upwards.
    for _ in sys.stdin:
        print(json.dumps(measure(best)), flush=True)


if __name__ == "__main__":
    main()
