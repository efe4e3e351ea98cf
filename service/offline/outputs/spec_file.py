"""``spec.json``: a description of the features in an output folder, so that no incompatible ones are added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from torch import Tensor

from fxcore.errors import FxError
from fxcore.tensors import dtype_name
from service.engine import FeatureOptions
from service.offline.atomic import UNFINISHED
from service.offline.folder import Folder
from service.offline.runners import ExtractorInfo, Rows

FILE = "spec.json"

_TOLERANCE = 3e-4
"""Maximum difference relative to an output's mean or standard deviation in float32. Backends differ by at most half of
it, because they may differ from eager by 1e-4 of the norm; weights that were trained further differ by more."""

_COARSE_TOLERANCE = 0.02
"""The same for outputs in any other precision, in which backends and machines round differently."""


class SpecFile:
    """The content of ``spec.json``.

    Args:
        info: describes the extractor.
        options: how its outputs are pooled and cast.
        format: format of the shards.
        probe: the features of a fixed image.
        reduce: the statistics that the folder holds; None if it holds rows.
    """

    def __init__(
        self, info: ExtractorInfo, options: FeatureOptions, format: str, probe: Rows, reduce: str | None = None
    ) -> None:
        one_shape = info.one_size or options.one_shape
        outputs = [
            {
                **output,
                "shape": list(probe[output["key"]].shape[1:]) if one_shape else None,
                "dtype": dtype_name(probe[output["key"]].dtype),
            }
            for output in info.outputs
        ]
        self.outputs: list[dict[str, Any]] = outputs
        self._document: dict[str, Any] = {
            "spec": info.spec,
            "options": options.named(),
            "images": info.images,
            "format": format,
            "fingerprint": info.fingerprint,
            "backend": info.backend,
            "outputs": outputs,
            "probe": {key: _statistics(values) for key, values in probe.items()},
            **({"reduce": reduce} if reduce is not None else {}),
        }

    @property
    def format(self) -> str:
        """Format of the shards."""
        return str(self._document["format"])

    def metadata(self) -> dict[str, str]:
        """Return the metadata of each shard, as strings."""
        return metadata(self._document)

    def differences(self, other: SpecFile) -> list[str]:
        """Describe how ``other`` differs; empty if rows of both may be in one folder."""
        return differences(other._document, self._document)

    def write_or_check(self, folder: Folder) -> None:
        """Write it to a new folder, or compare it with the existing file.

        Raises:
            FxError: the folder holds something else.
        """
        before = read(folder)
        if before is None:
            # A run that was killed while it wrote this file left an unfinished one.
            if any(name != FILE + UNFINISHED for name in folder.names()):
                raise FxError(f"{folder} is not empty and holds no {FILE}; name a new folder")
            write(folder, self._document)
            return
        if found := differences(before, self._document):
            raise FxError(
                f"{folder} was made with {'; '.join(found)}; use the same options to resume it, or name a new folder"
            )


def write(folder: Folder, document: Mapping[str, Any]) -> None:
    """Write the file into ``folder``."""
    folder.write(FILE, orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


def metadata(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of feature files, as strings."""
    spec = document["spec"]
    return {
        "model": spec["model"],
        "weights": spec["weights"],
        "nodes": orjson.dumps(spec["return_nodes"]).decode(),
        "fingerprint": document["fingerprint"],
    }


def read(folder: Folder) -> dict[str, Any] | None:
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
    return document


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how the content of one file differs from that of another.

    Empty if one folder may hold the features of both.
    """
    found = []
    for part in ("spec", "options"):
        old, new = before.get(part, {}), now[part]
        # Compare as text, because the order of outputs matters.
        differing = [k for k in {**new, **old} if orjson.dumps(old.get(k)) != orjson.dumps(new.get(k))]
        found += [f"{k} {old.get(k)}, not {new.get(k)}" for k in differing]
    if not before.get("images") and before.get("options", {}).get("preprocess") != "none":
        found.append("a version of fxserve with a different preprocess=default")
    elif before.get("images", now["images"]) != now["images"]:
        found.append(f"images preprocessed by {before['images']}, not {now['images']}")
    if before.get("reduce") != now.get("reduce"):
        found.append(f"--reduce {before.get('reduce')}, not {now.get('reduce')}")
    found += [f"{k} {before.get(k)}, not {now[k]}" for k in ("format", "fingerprint") if before.get(k) != now[k]]
    if not found and not _agree(before.get("probe", {}), now):
        found.append("weights of the same name that give different values")
    return found


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
