"""What the formats have in common."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from fxcore.errors import FxError
from fxcore.extractor import Extractor
from fxcore.process import holds_int8
from fxcore.tensors import dtype_name
from fxcore.transforms.base import applied


class UnknownFormat(FxError):
    """No export format of that name; ``format`` and ``available``."""


class ExportUnavailable(FxError):
    """A package that the ``format`` needs is ``missing``."""


class CannotExport(FxError):
    """This model cannot be written in that ``format``."""


def require_float(extractor: Extractor, format: str) -> None:
    """Refuse an extractor that computes in torch's own int8, which TorchScript alone can hold.

    Raises:
        CannotExport: it does.
    """
    if holds_int8(extractor.module):
        raise CannotExport(
            f"this extractor of {extractor.graph.entry.name} computes in torch's own int8, which {format} cannot "
            "express; export it as torchscript, or export an extractor in float32",
            format=format,
        )


def description(extractor: Extractor, int8: bool = False) -> dict[str, Any]:
    """What a user of an export has to know, for JSON: inputs, preprocessing, and which key is which node.

    Args:
        int8: whether writing it makes int8 of it.
    """
    graph = extractor.graph
    return {
        "model": graph.entry.name,
        "weights": graph.weights,
        "fingerprint": graph.fingerprint,
        "dtype": dtype_name(extractor.dtype),
        "arithmetic": "int8" if int8 or holds_int8(extractor.module) else dtype_name(extractor.dtype),
        "inputs": [{"name": i.name, "layout": i.layout, "shape": list(i.shape)} for i in extractor.inputs],
        "preprocessing": graph.preprocessing.describe(),
        "outputs": [{"key": o.key, "node": o.node, "shape": o.shape, "layout": o.layout} for o in extractor.outputs],
        "transforms": [{"name": a.name, "parameters": dict(a.parameters)} for a in applied(extractor.module)],
    }


def description_json(extractor: Extractor, int8: bool = False) -> bytes:
    """The description as a file."""
    return json.dumps(description(extractor, int8), indent=2, default=str).encode() + b"\n"


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip of these files, the same bytes for the same files. Weights do not compress: they are stored as they are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()
