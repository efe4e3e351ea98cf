"""What the formats have in common."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from fxcore.errors import FxError
from fxcore.extractor import Extractor
from fxcore.transforms.base import applied


class UnknownFormat(FxError):
    """No export format of that name; ``format`` and ``available``."""


class ExportUnavailable(FxError):
    """A package that the ``format`` needs is ``missing``."""


class CannotExport(FxError):
    """This model cannot be written in that ``format``."""


def require_float(extractor: Extractor, format: str) -> None:
    """
    Raises:
        CannotExport: the model computes in torch's own int8, which only torch.fx's code and torch's kernels know.
    """
    if extractor.graph.entry.is_quantized(extractor.graph.weights):
        raise CannotExport(
            f"{extractor.graph.entry.name} holds torch's own int8 layers, which {format} cannot express; "
            "export the float model of that name instead",
            format=format,
        )


def description(extractor: Extractor) -> dict[str, Any]:
    """What a user of an export has to know, for JSON: inputs, preprocessing, and which key is which node."""
    graph = extractor.graph
    return {
        "model": graph.entry.name,
        "weights": graph.weights,
        "fingerprint": graph.fingerprint,
        "dtype": str(extractor.dtype).removeprefix("torch."),
        "inputs": [{"name": i.name, "layout": i.layout, "shape": list(i.shape)} for i in extractor.inputs],
        "preprocessing": graph.preprocessing.describe(),
        "outputs": [{"key": o.key, "node": o.node, "shape": o.shape, "layout": o.layout} for o in extractor.outputs],
        "transforms": [{"name": a.name, "parameters": dict(a.parameters)} for a in applied(extractor.module)],
    }


def description_json(extractor: Extractor) -> bytes:
    """The description as a file."""
    return json.dumps(description(extractor), indent=2, default=str).encode() + b"\n"


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files, the same bytes for the same files. Weights do not compress: they are stored as they are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()


def said(error: BaseException, limit: int = 300) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__
