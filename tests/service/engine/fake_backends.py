"""Backends that replace OpenVINO, with a fault or under a test's control."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from typing import Any

import torch

from fxcore.backends import BACKENDS, Lowered, LoweringFailed, Options
from service.engine import ExtractorRecord
from tests.service.engine.running import PATIENCE, until


class Broken:
    """The eager backend with a ``fault``.

    It is ``fails``, ``short once`` (of threads), ``short in a run`` (of memory, once), ``differs``, ``slower``,
    ``breaks later``, ``one size``, ``two rows`` or ``none``.
    """

    name = "openvino"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        return None

    def lower(self, module: Any, example: Any, options: Options) -> Lowered:
        if self.fault == "fails":
            raise LoweringFailed("lowering to openvino failed: no such operation", backend=self.name)
        if self.fault == "short once":
            self.fault = "none"
            raise LoweringFailed("lowering failed", backend=self.name) from BlockingIOError(errno.EAGAIN, "no threads")
        eager = BACKENDS["eager"].lower(module, example, options)
        fault, batches = self.fault, 0
        if fault == "short in a run":
            self.fault = "none"

        class Run:
            grown = 0

            def __call__(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
                nonlocal batches
                batches += 1
                if fault == "short in a run" and batches == 1:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                if fault == "slower":
                    time.sleep(0.3)
                if fault == "breaks later" and batches > 6:
                    raise RuntimeError("lost its mind")
                if fault == "one size" and inputs[0].shape[-2:] != (224, 224):
                    raise RuntimeError("Shape mismatch")
                if fault == "two rows" and len(inputs[0]) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return {k: v * 1.01 if fault == "differs" else v for k, v in eager(*inputs).items()}

            def storages(self) -> dict[int, int]:
                return {}

        return Run()


class Held(Broken):
    """A backend that lowers once the test opens it, unless it is cancelled before.

    This is how the process behaves in which OpenVINO lowers. It ignores cancellation if it is ``deaf``.
    """

    def __init__(self) -> None:
        super().__init__("none")
        self.begun: list[list[str]] = []
        self.cancelled: list[threading.Event] = []
        self.open = threading.Event()
        self.deaf = False

    def lower(self, module: Any, example: Any, options: Options) -> Lowered:
        self.cancelled.append(options.cancelled)
        self.begun.append(list(module.graph.output_node().args[0]))
        while not self.open.wait(0.01):
            if options.cancelled.is_set() and not self.deaf:
                raise LoweringFailed("was cancelled", backend=self.name)
        return super().lower(module, example, options)

    async def began(self, *nodes: str) -> None:
        """Wait until lowering has begun for extractors with one of ``nodes`` each, in that order."""
        await until(lambda: len(self.begun) >= len(nodes))
        assert self.begun == [[node] for node in nodes]


async def settled(record: ExtractorRecord) -> dict[str, Any]:
    """Wait until the search for a faster backend is over, and return the record's checks."""
    assert record.runtime.wanted.is_set()
    await asyncio.wait_for(asyncio.shield(record.runtime.upgrade), 5 * PATIENCE)
    assert record.checks is not None
    return record.checks
