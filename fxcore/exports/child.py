"""The process in which torch traces an extractor for export: ``python -m fxcore.exports.child DIR``.

:mod:`fxcore.exports.captured` fills DIR and reads the result from it. The last line of what is printed is the reason
where it fails.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fxcore.exports import captured
from fxcore.exports.base import CannotExport, said
from fxcore.exports.onnx import export_onnx
from fxcore.exports.openvino import export_openvino
from fxcore.exports.program import export_program
from fxcore.exports.torchscript import export_torchscript

WRITERS = {
    "torch_export": export_program,
    "onnx": export_onnx,
    "openvino": export_openvino,
    "torchscript": export_torchscript,
}


def main(folder: Path) -> None:
    os.nice(10)  # a service answers requests meanwhile
    format, extractor = captured.load(folder)
    try:
        captured.finish(folder, WRITERS[format](extractor))
    except CannotExport as error:
        captured.refuse(folder, error)
        raise


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(said(error), file=sys.stderr)
        sys.exit(1)
