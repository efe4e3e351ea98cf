"""``spec.json``: a description of the features in an output folder, so that no incompatible ones are added."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from torch import Tensor

from fxcore.errors import FxError
from fxcore.tensors import dtype_name
from service.engine import FeatureOptions
from service.offline.atomic import UNFINISHED
from service.offline.folder import Folder
from service.offline.runners.runner import ExtractorInfo, Rows

FILE = "spec.json"

_TOLERANCE = 3e-4
"""Maximum difference relative to an output's mean or standard deviation in float32. Backends usually differ by less,
because they may differ from eager by 1e-4 of the norm; weights that were trained further differ by more."""

_COARSE_TOLERANCE = 0.02
"""The same for outputs in any other precision, in which backends and machines round differently."""


_MAX_RUN = 2**31 - 1
"""The largest number that an index holds."""


class SpecFile:
    """The content of ``spec.json``; see :meth:`of`."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    @classmethod
    def of(
        cls, info: ExtractorInfo, options: FeatureOptions, format: str, probe: Rows, reduce: str | None = None
    ) -> SpecFile:
        """Describe a run.

        Args:
            info: describes the extractor.
            options: how its outputs are pooled and cast.
            format: format of the shards.
            probe: the features of a fixed image.
            reduce: the statistics that the folder holds; None if it holds rows.
        """
        one_shape = info.one_size or options.one_shape
        outputs = [
            {
                **output,
                "shape": list(probe[output["key"]].shape[1:]) if one_shape else None,
                "dtype": dtype_name(probe[output["key"]].dtype),
            }
            for output in info.outputs
        ]
        return cls(
            {
                "spec": info.spec,
                "options": options.named(),
                "images": info.images,
                "format": format,
                "fingerprint": info.fingerprint,
                "backend": info.backend,
                "outputs": outputs,
                "probe": {key: _statistics(values) for key, values in probe.items()},
                **({"reduce": reduce} if reduce is not None else {}),
                "run": 1 + secrets.randbelow(_MAX_RUN),
            }
        )

    @classmethod
    def read(cls, folder: Folder) -> SpecFile | None:
        """Read the file in ``folder``, or None.

        Raises:
            FxError: it is damaged, or ``folder`` is a file.
        """
        if folder.disk is not None and folder.disk.exists() and not folder.disk.is_dir():
            raise FxError(f"{folder} is a file; --out must be a folder")
        data = folder.read(FILE)
        if data is None:
            return None
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise FxError(f"{folder}/{FILE} is damaged: {error}") from error
        if not isinstance(document, dict):
            raise FxError(f"{folder}/{FILE} is damaged: not a JSON object")
        return cls(document)

    @classmethod
    def of_earlier_run(cls, folder: Folder) -> SpecFile | None:
        """Read the file in the output folder of a run, or None for a new folder.

        Raises:
            FxError: it is damaged, or ``folder`` holds something else.
        """
        before = cls.read(folder)
        # A run that was killed while it wrote this file left an unfinished one.
        if before is None and any(name != FILE + UNFINISHED for name in folder.names()):
            raise FxError(f"{folder} is not empty and holds no {FILE}; name a new folder")
        return before

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Key, node, layout, stride, shape and dtype of each output."""
        outputs: list[dict[str, Any]] = self._document["outputs"]
        return outputs

    @property
    def format(self) -> str:
        """Format of the shards."""
        return str(self._document["format"])

    @property
    def backend(self) -> str | None:
        """The backend that computed the rows; None if servers chose."""
        return self._document.get("backend")

    @property
    def reduce(self) -> str | None:
        """The statistics that the folder holds; None if it holds rows."""
        return self._document.get("reduce")

    @property
    def run(self) -> int:
        """Random number of the folder's first run, which its index has too; 0 if an older fxserve made it."""
        return int(self._document.get("run", 0))

    def metadata(self) -> dict[str, str]:
        """Return the metadata of each shard, as strings."""
        spec = self._document["spec"]
        return {
            "model": spec["model"],
            "weights": spec["weights"],
            "nodes": orjson.dumps(spec["return_nodes"]).decode(),
            "fingerprint": self._document["fingerprint"],
        }

    def differences(self, other: SpecFile) -> list[str]:
        """Describe how this differs from ``other``; empty if rows of both may be in one folder."""
        before, now = self._document, other._document
        found = []
        for part in ("spec", "options"):
            old, new = before.get(part, {}), now[part]
            # Compare as text, because the order of outputs matters.
            differing = [k for k in {**new, **old} if orjson.dumps(old.get(k)) != orjson.dumps(new.get(k))]
            found += [f"{k} {old.get(k)}, not {new.get(k)}" for k in differing]
        if before.get("images") != now["images"]:
            found.append(f"images preprocessed by {before.get('images', 'an older fxserve')}, not {now['images']}")
        if self.reduce != other.reduce:
            found.append(f"--reduce {self.reduce}, not {other.reduce}")
        if before.get("format") != now["format"]:
            found.append(f"format {before.get('format')}, not {now['format']}")
        old, new = before.get("fingerprint"), now["fingerprint"]
        if not found and old != new:
            found.append(f"fingerprint {old} (of another version of the model, fxserve or torchvision), not {new}")
        if not found and not _agree(before.get("probe", {}), now):
            found.append("weights of the same name that give different values")
        return found

    def write(self, folder: Folder) -> None:
        """Write the file into ``folder``."""
        folder.write(FILE, orjson.dumps(self._document, option=orjson.OPT_INDENT_2).decode() + "\n")

    def write_or_check(self, folder: Folder) -> None:
        """Write it to a new folder, or compare it with the existing file and take over its number.

        Raises:
            FxError: the folder holds something else.
        """
        before = SpecFile.of_earlier_run(folder)
        if before is None:
            self.write(folder)
        elif found := before.differences(self):
            raise FxError(
                f"{folder} was made with {'; '.join(found)}; use the same options to resume it, or name a new folder"
            )
        else:
            self._document = {**self._document, "run": before.run}


def _agree(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    dtypes = {output["key"]: output["dtype"] for output in now["outputs"]}
    for key, (mean, spread) in now["probe"].items():
        old = before.get(key, [math.nan, math.nan])
        exact = now["spec"]["precision"] == dtypes.get(key) == "float32"
        allowed = (_TOLERANCE if exact else _COARSE_TOLERANCE) * max(abs(mean), spread)
        if not all(abs(a - b) <= allowed or a == b for a, b in zip(old, (mean, spread), strict=True)):
            return False
    return True


def _statistics(values: Tensor) -> list[float]:
    """Return mean and standard deviation, with 0 for non-finite values, which JSON does not support."""
    wide = values.double()
    return [n if math.isfinite(n) else 0.0 for n in (float(wide.mean()), float(wide.std(correction=0)))]
