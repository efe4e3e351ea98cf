"""Extractors as files that run without this package: Python, torch.export, ONNX, OpenVINO, TorchScript.

One format a file. Every export takes any number of rows; its outputs have the extractor's keys, in its order.
"""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from fxcore.exports.base import CannotExport, ExportUnavailable, UnknownFormat, said
from fxcore.exports.folder import export_folder, folder_zip
from fxcore.exports.onnx import export_onnx
from fxcore.exports.openvino import export_openvino
from fxcore.exports.program import export_program
from fxcore.exports.torchscript import export_torchscript
from fxcore.extractor import Extractor

__all__ = [
    "FORMATS",
    "CannotExport",
    "ExportFormat",
    "ExportUnavailable",
    "UnknownFormat",
    "export",
    "export_folder",
]


@dataclass(frozen=True)
class ExportFormat:
    """One way to write an extractor.

    Attributes:
        suffix: of the file, with its dot.
        media_type: of the file.
        packages: what must be installed to write it, beside torch.
        write: the file's bytes.
    """

    name: str
    suffix: str
    media_type: str
    packages: tuple[str, ...]
    write: Callable[[Extractor], bytes]


FORMATS = {
    f.name: f
    for f in (
        ExportFormat("fx", ".zip", "application/zip", ("safetensors",), folder_zip),
        ExportFormat("torch_export", ".pt2", "application/octet-stream", (), export_program),
        ExportFormat("onnx", ".onnx", "application/octet-stream", ("onnx", "onnxscript"), export_onnx),
        ExportFormat("openvino", ".zip", "application/zip", ("openvino",), export_openvino),
        ExportFormat("torchscript", ".pt", "application/octet-stream", (), export_torchscript),
    )
}
"""By name. ``fx`` and ``openvino`` are zips of several files."""

# torch's exporters keep state of the whole process while they trace.
_ONE_AT_A_TIME = threading.Lock()


def export(extractor: Extractor, format: str) -> bytes:
    """``extractor`` as the bytes of one file; it stays as it is.

    Args:
        format: a key of :data:`FORMATS`.

    Raises:
        UnknownFormat: no such format.
        ExportUnavailable: a package that the format needs is not installed.
        CannotExport: this model cannot be written so.

    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> graph = model_graph("resnet18")
    >>> extractor = build_extractor(graph, load_model(get_model("resnet18"), "random"), graph.resolve(["C2"]))
    >>> import io, zipfile
    >>> zipfile.ZipFile(io.BytesIO(export(extractor, "fx"))).namelist()[:2]
    ['resnet18_extractor/README.md', 'resnet18_extractor/__init__.py']
    """
    found = FORMATS.get(format)
    if found is None:
        raise UnknownFormat(
            f"there is no export format {format[:64]!r}; there are {', '.join(FORMATS)}",
            format=format[:64],
            available=list(FORMATS),
        )
    missing = [package for package in found.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ExportUnavailable(
            f"export to {format} needs {', '.join(missing)}, not installed here; "
            f"install it, or ask for another format: {', '.join(other for other in FORMATS if other != format)}",
            format=format,
            missing=missing,
        )
    try:
        with _ONE_AT_A_TIME:
            return found.write(_on_cpu(extractor))
    except CannotExport:
        raise
    except Exception as error:  # torch's exporters raise of every kind
        raise CannotExport(
            f"{extractor.graph.entry.name} cannot be exported to {format}: {said(error)}", format=format
        ) from error


def _on_cpu(extractor: Extractor) -> Extractor:
    """What is downloaded may not ask for the device that it was served from."""
    if all(p.device.type == "cpu" for p in (*extractor.module.parameters(), *extractor.module.buffers())):
        return extractor
    # eval: the copy of a GraphModule comes back in train mode.
    return replace(extractor, module=copy.deepcopy(extractor.module).cpu().eval())
