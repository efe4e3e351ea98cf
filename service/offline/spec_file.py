"""``spec.json``: what the features in a folder are, so that others of another kind never get in among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from torch import Tensor

from fxcore.errors import FxError
from fxcore.tensors import dtype_name
from service.engine import FeatureOptions
from service.offline.computing import Described, Rows
from service.offline.folder import Folder
from service.offline.shards import UNFINISHED

FILE = "spec.json"

_TOLERANCE = 0.02
"""Backends and precisions round differently, by less than this share of an output's spread; other weights differ by
more."""


class Record:
    """What is written beside the shards.

    Args:
        described: the extractor.
        options: what is done with its outputs.
        format: of the shards.
        probe: the features of one image that is always the same.
    """

    def __init__(self, described: Described, options: FeatureOptions, format: str, probe: Rows) -> None:
        one_shape = described.one_size or options.pool != "none"
        outputs = [
            {
                **output,
                "shape": list(probe[output["key"]].shape[1:]) if one_shape else None,
                "dtype": dtype_name(probe[output["key"]].dtype),
            }
            for output in described.outputs
        ]
        self.outputs: list[dict[str, Any]] = outputs
        self._document: dict[str, Any] = {
            "spec": described.spec,
            "options": options.named(),
            "images": described.images,
            "format": format,
            "fingerprint": described.fingerprint,
            "backend": described.backend,
            "outputs": outputs,
            "probe": {key: _statistics(values) for key, values in probe.items()},
        }

    def about(self) -> dict[str, str]:
        """What each shard says of itself; all of it is text."""
        spec = self._document["spec"]
        return {
            "model": spec["model"],
            "weights": spec["weights"],
            "nodes": orjson.dumps(spec["return_nodes"]).decode(),
            "fingerprint": self._document["fingerprint"],
        }

    def differences(self, other: Record) -> list[str]:
        """In what ``other`` is another one, in words about ``other``; empty where its rows may stand beside these."""
        return _differences(other._document, self._document)

    def settle(self, folder: Folder) -> None:
        """Write it into a new folder, or hold it against what is there.

        Raises:
            FxError: the folder holds something else.
        """
        before = read(folder)
        if before is None:
            # A run that ended while it wrote its first file left half of that.
            if any(name != FILE + UNFINISHED for name in folder.names()):
                raise FxError(f"{folder} is not empty and holds no {FILE}; name a new folder")
            folder.write(FILE, orjson.dumps(self._document, option=orjson.OPT_INDENT_2).decode() + "\n")
            return
        if differences := _differences(before, self._document):
            raise FxError(
                f"{folder} was made with {'; '.join(differences)}: use that to go on, or extract into a new folder"
            )


def read(folder: Folder) -> dict[str, Any] | None:
    """What is written in ``folder``, if anything.

    Raises:
        FxError: it is damaged, or ``folder`` is no folder.
    """
    if folder.disk is not None and folder.disk.exists() and not folder.disk.is_dir():
        raise FxError(f"{folder} is a file; --out names a folder")
    data = folder.read(FILE)
    if data is None:
        return None
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FxError(f"{folder}/{FILE} is damaged: {error}") from error
    if not isinstance(document, dict):
        raise FxError(f"{folder}/{FILE} is damaged: it is no JSON object")
    return document


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for part in ("spec", "options"):
        old, new = before.get(part, {}), now[part]
        # As text: a map of outputs in another order is another extractor.
        found += [f"{k} {old.get(k)}, not {new[k]}" for k in new if orjson.dumps(old.get(k)) != orjson.dumps(new[k])]
    if not before.get("images") and before.get("options", {}).get("preprocess") != "none":
        found.append("an fxserve whose preprocess=default was another")
    elif before.get("images", now["images"]) != now["images"]:
        found.append(f"images prepared by {before['images']}, not {now['images']}")
    found += [f"{k} {before.get(k)}, not {now[k]}" for k in ("format", "fingerprint") if before.get(k) != now[k]]
    if not found and not _agree(before.get("probe", {}), now["probe"]):
        found.append("weights that give other values under the same name")
    return found


def _agree(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    for key, (mean, spread) in now.items():
        old = before.get(key, [math.nan, math.nan])
        allowed = _TOLERANCE * max(abs(mean), spread)
        if not all(abs(a - b) <= allowed or a == b for a, b in zip(old, (mean, spread), strict=True)):
            return False
    return True


def _statistics(values: Tensor) -> list[float]:
    """Mean and standard deviation; 0 in place of what is not finite, which JSON cannot hold."""
    wide = values.double()
    return [n if math.isfinite(n) else 0.0 for n in (float(wide.mean()), float(wide.std(correction=0)))]
