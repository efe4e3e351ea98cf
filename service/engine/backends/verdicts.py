"""What was found when a backend was compared and tried, kept for the next start.

For resnet50 that takes six seconds, half of the time in which a server that preloads it is ready. Only verdicts in
favour of a backend are kept. A verdict is valid while everything that it depends on stays the same, and even then it is
confirmed on one photograph.
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

from service.engine.candidate import Candidate
from service.engine.record import ExtractorRecord
from service.machine import processor
from service.settings import Settings

KEPT = 1000
"""Most verdicts in a cache, of half a kilobyte each; those not written for longest go first."""


class Verdicts:
    """The verdicts of a cache.

    Args:
        settings: its folder, and what else decides how fast a backend is.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder = None if settings.cache_dir is None else settings.cache_dir / ".verdicts"
        self._settings = settings

    def read(self, record: ExtractorRecord, backend: str) -> list[Candidate] | None:
        """What ``backend`` replaced and it itself, as they were measured for ``record``; None if nothing is known."""
        if self._folder is None:
            return None
        try:
            own, other = json.loads((self._folder / self._name(record, backend)).read_text())
            return [Candidate(**own), Candidate(**other)]
        except (OSError, ValueError, TypeError):  # there is none, or it is damaged, or of another version
            return None

    def write(self, record: ExtractorRecord, own: Candidate, candidate: Candidate) -> None:
        """Keep that ``candidate`` agrees and is faster than ``own``, if the cache can be written."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".", delete=False) as file:
                json.dump([asdict(own), asdict(candidate)], file)
            Path(file.name).rename(self._folder / self._name(record, candidate.backend))
            written = sorted(self._folder.iterdir(), key=lambda kept: kept.stat().st_mtime)
            for old in written[:-KEPT]:
                old.unlink(missing_ok=True)

    def _name(self, record: ExtractorRecord, backend: str) -> str:
        """A hash of what a verdict depends on; of the weights it is their name, hence the photograph."""
        packages = ("fxserve", "torch", "torchvision", backend)
        decisive = {
            "extractor": record.id,
            "fingerprint": record.fingerprint,
            "versions": {name: _version(name) for name in packages},
            "machine": [platform.machine(), processor(), record.device],
            "threads": self._settings.compute_threads,
            "rows": self._settings.max_batch,
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:24] + ".json"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # inductor is torch's
        return None
