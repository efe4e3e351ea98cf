"""The child process that exports an extractor: ``python -m fxcore.exports.export_child DIR``.

:mod:`fxcore.exports.captured` writes the extractor to DIR and reads the result from it.
"""

from __future__ import annotations

from pathlib import Path

from fxcore.backends import process
from fxcore.exports import captured
from fxcore.exports.onnx import export_onnx
from fxcore.exports.openvino import export_openvino
from fxcore.exports.program import export_program
from fxcore.exports.subject import CannotExport

WRITERS = {
    "torch_export": export_program,
    "onnx": export_onnx,
    "openvino": export_openvino,
}


def work(folder: Path) -> None:
    format, extractor = captured.load(folder)
    try:
        captured.finish(folder, WRITERS[format](extractor))
    except CannotExport as error:
        captured.refuse(folder, error)
        raise


if __name__ == "__main__":
    process.main(work)
