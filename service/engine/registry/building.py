"""Building an extractor: weights, the graph pruned to its nodes, its transforms, and its first backend."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from fxcore.errors import FxError, summarize
from fxcore.extractor import build_extractor
from service.engine.backends.upgrade import Upgrades
from service.engine.device.threads import in_pool
from service.engine.record import ExtractorRecord
from service.engine.registry.graphs import graph_of
from service.engine.registry.transforms import steps, transformed
from service.engine.registry.weights import ModelStore
from service.garbage import exempt
from service.problems import ExtractorFailed, Problem

log = logging.getLogger("fxserve.extractors")


async def build(
    record: ExtractorRecord,
    models: ModelStore,
    upgrades: Upgrades,
    pool: Executor,
    make_room: Callable[[int], None],
) -> None:
    """Load the weights and build the extractor; afterwards the record is ready or failed.

    Args:
        record: what to build.
        models: the loaded weights.
        upgrades: chooses its first backend.
        pool: the threads that build.
        make_room: evicts until a number of bytes fits into memory.
    """
    try:
        if record.model_key not in models.loaded():
            # An estimate, so that others are evicted before the weights are loaded.
            root = record.held.traced_modules[""] if record.held is not None else None
            params = sum(parameter.numel() for parameter in root.parameters()) if root is not None else 0
            make_room(params * record.dtype.itemsize)
        model = await models.get(record.entry, record.model_key)
        record.held = graph = await in_pool(pool, graph_of, record)
        extractor = await in_pool(
            pool,
            build_extractor,
            graph,
            model.module,
            record.return_nodes,
            record.dtype,
        )
        original: Callable[..., Any] = extractor.module
        if record.spec.transforms:
            extractor, record.transformed, original = await in_pool(
                pool, transformed, record, graph, extractor, steps(record.spec)
            )
        record.outputs = extractor.outputs
        record.extractor = extractor
        await upgrades.first(record, extractor, original, pool)
        record.state, record.failures = "ready", 0
    except (FxError, Problem) as problem:
        record.fail(_kept(problem))
    except Exception as error:
        log.exception("building extractor %s over %s failed", record.id, record.spec.model)
        record.fail(
            ExtractorFailed(
                f"extractor {record.id} over {record.spec.model} could not be built: {summarize(error)}",
                problem={"error": summarize(error)},
            )
        )
    finally:
        if record.state == "failed":
            record.held = record.extractor = None
        record.build = None
        record.last_used = time.monotonic()
    if record.state == "ready":
        with suppress(RuntimeError):  # the engine was closed meanwhile
            pool.submit(exempt)
    make_room(0)


def _kept(problem: FxError | Problem) -> FxError | Problem:
    """``problem`` without its traceback and cause, whose frames keep a model and its extractor in memory."""
    problem.__cause__ = problem.__context__ = None
    return problem.with_traceback(None)
