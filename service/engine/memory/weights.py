"""Loaded weights: one copy, shared by all extractors with the same model key."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fxcore.backends.backend import storages_of, tensors_of
from fxcore.models.entry import ModelEntry
from fxcore.models.weights import download_weights, load_model, missing_weights
from service.engine.description import ModelKey, precision_dtype
from service.engine.memory.shared_weights import share
from service.engine.tasks import SingleFlight
from service.engine.threads import in_pool
from service.settings import SHARED_WEIGHTS


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, in its precision and in eval mode.

    Attributes:
        module: never called directly; extractors share its parameters.
        bytes: bytes of its parameters and buffers.
    """

    module: nn.Module
    bytes: int


class ModelStore:
    """Models by (name, weights, precision) on one device, each loaded once. For one event loop.

    Args:
        device: the device of the models.
        weights_dir: the folder of ``file:NAME`` weights.
        pool: the threads that load weights.
        downloads: the threads that download published weights, which may take minutes each.
    """

    def __init__(self, device: torch.device, weights_dir: Path | None, pool: Executor, downloads: Executor) -> None:
        self._device = device
        self._weights_dir = weights_dir
        self._pool = pool
        self._downloads = downloads
        self._loads = SingleFlight[ModelKey, LoadedModel]("load")
        self._shared = os.environ.get(SHARED_WEIGHTS)

    async def get(self, entry: ModelEntry, key: ModelKey) -> LoadedModel:
        """Return the model of ``key``, loading it if needed.

        Raises:
            WeightsUnavailable, UnknownWeights: see :func:`fxcore.models.weights.load_model`; the next call retries.
        """
        return await self._loads.get(key, partial(self._load, entry, key))

    def forget(self, key: ModelKey) -> bool:
        """Forget a model, and return whether it existed. Its memory is freed with the last extractor that uses it."""
        existed = self._loads.forget(key)
        if existed and self._shared is not None:  # its pages are freed with the last process that maps it
            self._file(self._shared, key).unlink(missing_ok=True)
        return existed

    def loaded(self) -> Mapping[ModelKey, LoadedModel]:
        """Return a live view of the models that are in memory."""
        return self._loads.made

    def loaded_weights(self) -> set[tuple[str, str]]:
        """Return the (model, weights) pairs that are in memory now, in any precision."""
        return {(model, weights) for model, weights, _ in self.loaded()}

    async def _load(self, entry: ModelEntry, key: ModelKey) -> LoadedModel:
        _, weights, _ = key
        if await in_pool(self._pool, missing_weights, entry, weights) is not None:
            await in_pool(self._downloads, download_weights, entry, weights)
        return await in_pool(self._pool, self._read, entry, key)

    def _read(self, entry: ModelEntry, key: ModelKey) -> LoadedModel:
        _, weights, precision = key
        module = load_model(entry, weights, self._weights_dir)
        dtype = precision_dtype(entry, precision)
        for tensor in tensors_of(module):
            if tensor.dtype == entry.dtype:  # others, such as tables in float64, have theirs for a reason
                tensor.data = tensor.data.to(dtype)
        module.to(self._device)
        if self._shared is not None:
            share(module, self._file(self._shared, key))
        return LoadedModel(module, sum(storages_of(tensors_of(module)).values()))

    @staticmethod
    def _file(folder: str, key: ModelKey) -> Path:
        return Path(folder, hashlib.sha256("\0".join(key).encode()).hexdigest()[:32])
