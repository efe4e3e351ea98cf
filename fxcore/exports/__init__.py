"""Export extractors to files that run without this package: Python, torch.export, ONNX, OpenVINO.

Exports accept any number of rows but zero, or one row if the model computes one image at a time; their outputs have the
extractor's keys, in the same order. Zero rows run on some runtimes only: OpenVINO has no max pooling of them, for
example.
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
from fxcore.images.preprocessing import Preprocessing
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
    """An export format.

    Attributes:
        name: key in :data:`FORMATS`.
        suffix: file name suffix, with its dot.
        media_type: media type of the file.
        packages: distributions that are needed to write it, in addition to torch.
        named_outputs: whether the format names outputs, so that each must be a distinct tensor, and cannot have the
            name of an input.

    >>> [name for name, format in FORMATS.items() if not format.packages]
    ['fx', 'torch_export']
    """

    name: str
    suffix: str
    media_type: str
    packages: tuple[str, ...] = ()
    named_outputs: bool = False


FORMATS = {
    f.name: f
    for f in (
        ExportFormat("fx", ".zip", "application/zip"),
        ExportFormat("torch_export", ".pt2", "application/octet-stream"),
        ExportFormat("onnx", ".onnx", "application/octet-stream", ("onnx", "onnxscript"), named_outputs=True),
        ExportFormat("openvino", ".zip", "application/zip", ("openvino",), named_outputs=True),
    )
}
"""All formats by name. ``fx`` and ``openvino`` are zips of several files."""


def export(
    extractor: Extractor | fx.GraphModule,
    format: str,
    cancelled: threading.Event | None = None,
    calibration: Sequence[tuple[Tensor, ...]] = (),
    *,
    example_inputs: Inputs | None = None,
    preprocessing: Preprocessing | None = None,
) -> bytes:
    """Export ``extractor`` to the bytes of one file. It is not changed, and other threads may run it meanwhile.

    All formats except ``fx`` are written in a child process (:mod:`fxcore.backends.process`), which takes seconds to
    start.

    Args:
        extractor: an extractor, or a graph module of tensors as returned by
            :func:`~fxcore.module_extractor.create_extractor` or :func:`~fxcore.tracing.tracer.trace`. If the module
            does not return a dict, a single tensor gets the key ``output``, and a tuple the keys ``0``, ``1``….
            The scale and shift of each edit of an extractor are inputs of the file, with a number for each channel;
            only ``fx`` also takes those of edits that select tokens or a box.
        format: a key of :data:`FORMATS`.
        cancelled: when set, a long export stops early and raises :class:`CannotExport`.
        calibration: for ``openvino``, inputs of one row each (:func:`fxcore.photos.calibration_rows`), with which NNCF
            quantizes the model to int8.
        example_inputs: arguments of one call of a graph module. If their first dimension is over 1, it is the number of
            rows, which is dynamic in the file.
        preprocessing: how images become inputs of an extractor, for the file's description; by default that of its
            model's weights, if its graph is of their size, without a normalisation that is folded in.

    Raises:
        UnknownFormat: there is no such format.
        ExportUnavailable: a package that the format needs is not installed.
        CannotExport: this model cannot be exported to the format.
        NotAGraph: ``extractor`` is neither an extractor nor a graph module.
        BadTensor: a graph module is given without inputs, or does not accept them.

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
            f"install it, or use another format: {', '.join(other for other in FORMATS if other != format)}",
            format=format,
            missing=missing,
        )
    if calibration and format != "openvino":
        raise CannotExport(f"calibration is for openvino only, not for {format}", format=format)
    try:
        subject = subject_of(extractor, example_inputs, preprocessing, any_size=format == "fx")
    except CannotExport as error:
        raise CannotExport(error.detail, format=format) from None
    require_float(subject, format)
    inputs = {spec.name for spec in subject.inputs} if found.named_outputs else ()
    if (twice := next((output.key for output in subject.outputs if output.key in inputs), None)) is not None:
        raise CannotExport(
            f"{twice!r} is the name of an input and the key of an output, and names are unique in {format}; choose "
            "another key for the output",
            format=format,
        )
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
