"""A cache of verdicts: the backends that agreed and were faster, for the next start.

Comparisons and timings take much of the startup time of a server that preloads extractors. Only verdicts in favour of a
backend are kept. A verdict is valid while everything it depends on stays the same, and even then it is confirmed on one
photograph.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.engine.description import Description
from service.engine.runtime.candidate import Candidate, CandidateState
from service.machine import processor
from service.settings import Settings

KEPT = 1000
"""Maximum verdicts in a cache, about half a kilobyte each; the oldest are removed first."""


class Verdicts:
    """The verdicts of a cache.

    Args:
        settings: the cache folder, and the settings that affect a backend's speed.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = None if settings.cache_dir is None else settings.cache_dir / ".verdicts"
        self._settings = settings

    def read(self, description: Description, backend: str) -> list[Candidate] | None:
        """Return the candidates measured for an extractor: the replaced one and that of ``backend``.

        None without a verdict.
        """
        if self._folder is None:
            return None
        try:
            own, other = json.loads((self._folder / self._name(description, backend)).read_text())
            return [_candidate(own), _candidate(other)]
        except (OSError, ValueError, TypeError, KeyError):  # missing, damaged, or from another version
            return None

    def write(self, description: Description, own: Candidate, candidate: Candidate) -> None:
        """Save the verdict that ``candidate`` agrees and is faster than ``own``, if the cache can be written."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".", delete=False) as file:
                json.dump([asdict(own), asdict(candidate)], file)
            Path(file.name).rename(self._folder / self._name(description, candidate.backend))
            written = sorted(self._folder.iterdir(), key=lambda kept: kept.stat().st_mtime)
            for old in written[:-KEPT]:
                old.unlink(missing_ok=True)

    def _name(self, description: Description, backend: str) -> str:
        """Return a hash of everything that a verdict depends on.

        Only the name of the weights is included, which is why a photograph must confirm a verdict.
        """
        packages = ("fxserve", "torch", "torchvision", backend)
        decisive = {
            "extractor": description.id,
            "fingerprint": description.fingerprint,
            "versions": {name: _version(name) for name in packages},
            "machine": [platform.machine(), processor(), description.device],
            "threads": self._settings.compute_threads,
            "rows": self._settings.max_batch,
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:24] + ".json"


def _candidate(saved: dict[str, Any]) -> Candidate:
    return Candidate(**{**saved, "state": CandidateState(saved["state"])})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # inductor is part of torch
        return None
