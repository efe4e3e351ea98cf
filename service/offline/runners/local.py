"""Running an extractor on an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from fxcore.errors import BadImage, FxError
from service.choices import RegionPooling
from service.codecs.requests import regions as body_regions
from service.engine import Engine, FeatureOptions
from service.offline.inputs.sources import Regions
from service.offline.runners.runner import Rows, add_regions, describe
from service.problems import Problem
from service.schemas.specs import ExtractorSpec
from service.settings import Settings

_OWN_SETTINGS = frozenset(
    {
        *("device", "compute_threads", "decode_threads", "encode_threads", "build_threads"),
        *("cache_dir", "calibration_dir", "models_dir", "weights_dir"),
        *("preprocess", "max_pixels", "max_batch", "max_batch_bytes", "memory_budget", "max_nodes"),
    }
)
"""The settings that apply to an offline run: device, threads, folders, preprocessing and sizes."""

_LIMITS = {"max_inflight": 2**31, "max_inflight_bytes": 2**62, "max_response_bytes": 2**62}
"""Effectively unlimited: these limits protect a service from its clients, and here the only client limits its own
load."""


class LocalRunner:
    """Runs an extractor on an engine in this process.

    Args:
        settings: settings of the engine. Server settings, such as limits and the store of extractors, are ignored.
        options: how to pool and cast the outputs.
        images: counts the images of the run; a faster backend is searched for if that saves time.
        served_by: the backend that computed earlier rows; ``auto`` then means that one.
    """

    concurrency = 64

    def __init__(
        self, settings: Settings, options: FeatureOptions, images: Callable[[], int], served_by: str | None
    ) -> None:
        fields = Settings.model_fields
        changed: dict[str, Any] = {
            name: fields[name].get_default(call_default_factory=True)
            for name in fields.keys() - _OWN_SETTINGS - _LIMITS.keys()
        }
        changed |= {"lowering": False, "request_timeout": 7 * 86400.0, **_LIMITS}
        self._engine = Engine(settings.model_copy(update=changed))
        self._options = options
        self._images = images
        self._served_by = served_by
        self._lowering = settings.lowering

    async def start(self, spec: ExtractorSpec) -> None:
        await self._engine.start()
        backend = self._served_by if spec.backend == "auto" and self._served_by is not None else spec.backend
        self._record, _ = await self._engine.extractors.get(spec.model_copy(update={"backend": backend}))
        runtime = await self._engine.runtimes.load(self._record)
        if self._lowering:  # now, because switching backends during the run would round later rows differently
            await self._engine.settle(runtime, self._images)
        description = self._record.description
        self.info = describe(
            spec,
            self._options,
            {
                "weights": description.weights,
                "fingerprint": description.fingerprint,
                "outputs": [{**vars(info), "prefix": vars(info.prefix)} for info in self._record.outputs],
            },
            backend=runtime.backend,
            fixed_size=description.preprocessing.fixed_size,
            default_preprocess=self._engine.settings.preprocess,
        )

    async def features(self, images: Sequence[bytes], regions: Sequence[Regions] | None = None) -> Rows:
        pool = cast(RegionPooling, self._options.pool)
        given = None if regions is None else body_regions.given(pool, regions)
        self._options.check_regions(given)
        try:
            result = await self._engine.features(self._record, images, self._options, regions=given)
        except (FxError, Problem):
            raise
        except Exception as error:  # such as one of a decoder, which an image caused
            raise BadImage(f"{type(error).__name__}: {error}") from error
        return add_regions(result.outputs, regions, self._options.pool)

    async def close(self) -> None:
        await self._engine.close(0.0)
