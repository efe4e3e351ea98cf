"""Building of extractors: weights, pruned graph, transforms, and the first backend."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from fxcore.backends.backend import storages_of, tensors_of
from fxcore.errors import FxError, summarize
from fxcore.extractor import build_extractor
from fxcore.images.decoding import Decoder
from fxcore.models.weights import sized_model
from service.engine.backends.upgrade import Tools, Upgrade
from service.engine.description import Description
from service.engine.memory.graphs import graph_for, preprocessing_for
from service.engine.memory.transforms import prepared, steps, transformed
from service.engine.memory.weights import ModelStore
from service.engine.record import ExtractorRecord
from service.engine.runtime.ledger import Ledger
from service.engine.runtime.pace import Pace
from service.engine.runtime.runtime import Runtime, Variant
from service.engine.threads import in_pool
from service.problems import ExtractorFailed, Problem

log = logging.getLogger("fxserve.extractors")


@dataclass(frozen=True)
class Builder:
    """Builds runtimes. For one event loop.

    Args:
        models: the loaded weights.
        tools: the resources for choosing the first backend, for making room, and for garbage collections.
        pool: the builder threads.
        ledger: counts the bytes of built runtimes.
        paces: the speed of each model and precision built so far.
    """

    models: ModelStore
    tools: Tools
    pool: Executor
    ledger: Ledger
    paces: dict[tuple[str, str], Pace] = field(default_factory=dict)

    async def build(self, record: ExtractorRecord) -> Runtime:
        """Load the weights and build the extractor.

        Its outputs are recorded as soon as they are known. Cancelling the call cancels the lowering.

        Raises:
            FxError: it cannot be built.
        """
        description = record.description
        with _failures(description):
            runtime, original = await self._pruned(description)
            record.outputs = runtime.extractor.outputs
            await self._lowered(runtime, original)
            if description.note is not None:
                log.warning("extractor %s: %s", description.id, description.note)
        return runtime

    async def variant(self, runtime: Runtime, which: Variant) -> Runtime:
        """Build a variant of ``runtime``, over the same weights, for another input size or for edits of nodes.

        Raises:
            BadTensor: the model does not accept that size.
            BadEdit: a node cannot be edited; ``extra["name"]`` is its name.
            FxError: it cannot be built.
        """
        with _failures(runtime.description):
            description = await in_pool(self.pool, _described, runtime.description, which)
            variant, _ = await self._pruned(description, runtime.model)
            await self._lowered(variant, None)  # not worth comparing for a single use
        return variant

    async def _pruned(
        self, description: Description, model: nn.Module | None = None
    ) -> tuple[Runtime, Callable[..., Any]]:
        """Return the runtime without a backend, and the reference that computes the model's own values.

        Args:
            model: the loaded model, if it is held already.
        """
        graph = await in_pool(self.pool, graph_for, description.spec, description.entry, description.weights)
        if model is None:
            if description.model_key not in self.models.loaded():
                # Estimate the size to evict other models before the weights are loaded.
                params = sum(parameter.numel() for parameter in graph.traced_modules[""].parameters())
                self.tools.make_room(params * description.dtype.itemsize)
            model = (await self.models.get(description.entry, description.model_key)).module
        pruned = partial(
            build_extractor,
            any_size=not description.preprocessing.fixed_size,
            inputs=description.begins_at,
            edits={name: name for name in description.edits},
        )
        module = model
        if graph.entry.input_size is not None:
            module = await in_pool(self.pool, sized_model, graph.entry, module, graph.weights)
        extractor = await in_pool(self.pool, pruned, graph, module, description.return_nodes, description.dtype)
        original: Callable[..., Any] = extractor.module
        done = None
        if description.spec.transforms:
            wanted = steps(description.spec)
            extractor, done, original = await in_pool(self.pool, transformed, description, extractor, wanted)
        shared = storages_of(tensors_of(model))
        held = {at: size for at, size in storages_of(tensors_of(module)).items() if at not in shared}
        pace = self.paces.setdefault((description.entry.name, description.spec.precision), Pace())
        collect = self.tools.collector.soon
        return Runtime(description, extractor, done, self.ledger, collect, model, pace, held), original

    async def _lowered(self, runtime: Runtime, original: Callable[..., Any] | None) -> None:
        try:
            await Upgrade(runtime, self.tools).first(original, self.pool)
        except BaseException:
            runtime.retire()
            raise


def _described(description: Description, which: Variant) -> Description:
    """Return the description of a variant.

    A variant for edits is not lowered before its first request, whatever the spec.
    """
    entry, weights, own = description.entry, description.weights, description.spec
    if isinstance(which[0], str):
        spec = own.model_copy(update={"backend": "eager" if own.backend == "eager" else "auto"})
        nodes = hashlib.sha256("\n".join(map(str, which)).encode()).hexdigest()[:12]
        return replace(description, id=f"{description.id}~{nodes}", spec=spec, edits=which)
    spec = own.model_copy(update={"image_size": which, "fit": "stretch"})
    preprocessing = prepared(preprocessing_for(spec, entry, weights), steps(spec))
    return replace(
        description,
        id="{}@{}x{}".format(description.id, *preprocessing.nominal_size()),
        spec=spec,
        inputs=graph_for(spec, entry, weights).inputs,
        preprocessing=preprocessing,
        decoder=Decoder(preprocessing),
    )


@contextmanager
def _failures(description: Description) -> Iterator[None]:
    """Convert unexpected errors of a build to :class:`ExtractorFailed`, and log them."""
    try:
        yield
    except (FxError, Problem):
        raise
    except Exception as error:
        log.exception("building extractor %s over %s failed", description.id, description.spec.model)
        raise ExtractorFailed(
            f"extractor {description.id} over {description.spec.model} could not be built: {summarize(error)}",
            problem={"error": summarize(error)},
        ) from None
