"""Functions shared by export formats: the check for int8, the description, the zip."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping

from fxcore.errors import FxError
from fxcore.exports.subject import CannotExport, Subject
from fxcore.int8.layers import holds_int8


class UnknownFormat(FxError):
    """There is no export format ``format``; ``available`` has all formats."""


class ExportUnavailable(FxError):
    """The packages ``missing``, which the ``format`` needs, are not installed."""


def require_float(subject: Subject, format: str) -> None:
    """Check that ``subject`` has no torch int8 layers, which no format can contain.

    Raises:
        CannotExport: ``subject`` has int8 layers.
    """
    if holds_int8(subject.module):
        raise CannotExport(
            f"this extractor of {subject.name} computes in torch's own int8, which {format} cannot "
            "express; export an extractor in float32",
            format=format,
        )


def description_json(subject: Subject, int8: bool = False) -> bytes:
    """Return the description of ``subject`` as a JSON file."""
    return json.dumps(subject.description(int8), indent=2, default=str).encode() + b"\n"


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Return a reproducible zip of ``files``, stored without compression since weights do not compress."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()
