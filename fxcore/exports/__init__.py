"""Extractors as files that run without this package: Python, torch.export, ONNX, OpenVINO, TorchScript.

One format a file. Every export takes any number of rows; its outputs have the extractor's keys, in its order.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from fxcore.errors import summarize
from fxcore.exports.captured import written
from fxcore.exports.description import ExportUnavailable, UnknownFormat, require_float
from fxcore.exports.folder import export_folder, folder_zip
from fxcore.exports.subject import CannotExport, subject_of
from fxcore.extractor import Extractor
from fxcore.tracing.interpreter import Inputs

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
        named_outputs: outputs have names in the format itself, and each is a tensor of its own.
        int8: it can hold torch's own int8 layers.

    >>> [name for name, format in FORMATS.items() if not format.packages]
    ['fx', 'torch_export', 'torchscript']
    """

    name: str
    suffix: str
    media_type: str
    packages: tuple[str, ...] = ()
    named_outputs: bool = False
    int8: bool = False


FORMATS = {
    f.name: f
    for f in (
        ExportFormat("fx", ".zip", "application/zip"),
        ExportFormat("torch_export", ".pt2", "application/octet-stream"),
        ExportFormat("onnx", ".onnx", "application/octet-stream", ("onnx", "onnxscript"), named_outputs=True),
        ExportFormat("openvino", ".zip", "application/zip", ("openvino",), named_outputs=True),
        ExportFormat("torchscript", ".pt", "application/octet-stream", int8=True),
    )
}
"""By name. ``fx`` and ``openvino`` are zips of several files."""


def export(
    extractor: Extractor | fx.GraphModule,
    format: str,
    cancelled: threading.Event | None = None,
    calibration: Sequence[tuple[Tensor, ...]] = (),
    *,
    example_inputs: Inputs | None = None,
) -> bytes:
    """``extractor`` as the bytes of one file; it stays as it is, and other threads may run it meanwhile.

    All formats but ``fx`` are written in a process of its own (see :mod:`fxcore.process`), which takes a few seconds
    to start.

    Args:
        extractor: or any graph module of tensors, as :func:`~fxcore.extractor.create_extractor` and
            :func:`~fxcore.tracing.tracer.trace` give it. What it returns gets keys: of a single tensor ``output``, of
            a tuple ``0``, ``1``…
        format: a key of :data:`FORMATS`.
        cancelled: once set, an export that takes long ends early.
        calibration: for ``openvino``, inputs of one row each (:func:`fxcore.photos.calibration_rows`): it is written in
            int8 then, by NNCF, as the backend of that name computes it.
        example_inputs: of one call of a graph module. Where their first dimension is over 1, it is the number of rows,
            and free in the file.

    Raises:
        UnknownFormat: no such format.
        ExportUnavailable: a package that the format needs is not installed.
        CannotExport: this model cannot be written so.
        NotAGraph, BadTensor: neither an extractor nor a graph module with its inputs.

    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> graph = model_graph("resnet18")
    >>> extractor = build_extractor(graph, load_model(get_model("resnet18"), "random"), graph.resolve(["C2"]))
    >>> import io, zipfile
    >>> zipfile.ZipFile(io.BytesIO(export(extractor, "fx"))).namelist()[:2]
    ['resnet18_extractor/README.md', 'resnet18_extractor/__init__.py']
    """
    found = FORMATS.get(format) if isinstance(format, str) else None
    if found is None:
        raise UnknownFormat(
            f"there is no export format {str(format)[:64]!r}; there are {', '.join(FORMATS)}",
            format=str(format)[:64],
            available=list(FORMATS),
        )
    packages = (*found.packages, "nncf") if calibration else found.packages
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ExportUnavailable(
            f"export to {format} needs {', '.join(missing)}, not installed here; "
            f"install it, or ask for another format: {', '.join(other for other in FORMATS if other != format)}",
            format=format,
            missing=missing,
        )
    if calibration and format != "openvino":
        raise CannotExport(f"{format} is written as the extractor is; int8 is made of it for openvino", format=format)
    try:
        subject = subject_of(extractor, example_inputs)
    except CannotExport as error:
        raise CannotExport(error.detail, format=format) from None
    if not found.int8:
        require_float(subject, format)
    try:
        if format == "fx":
            return folder_zip(subject)
        return written(subject, format, found.named_outputs, cancelled, calibration)
    except CannotExport:
        raise
    except Exception as error:  # code generation and pickling fail in many ways
        raise CannotExport(
            f"{subject.name} cannot be exported to {format}: {summarize(error)}", format=format
        ) from error
