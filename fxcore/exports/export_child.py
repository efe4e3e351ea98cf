"""The child process that exports an extractor: ``python -m fxcore.exports.export_child DIR``.

:mod:`fxcore.exports.captured` writes the extractor to DIR and reads the result from it.
"""

from __future__ import annotations

import json
from pathlib import Path

from fxcore.backends import process
from fxcore.exports.captured import REFUSAL, RESULT, Captured
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
    module, beside = process.load_module(folder)
    write = WRITERS[beside.pop("format")]
    try:
        (folder / RESULT).write_bytes(write(Captured(module=module, **beside)))
    except CannotExport as error:
        (folder / REFUSAL).write_text(json.dumps({"detail": error.detail, "extra": error.extra}))
        raise


if __name__ == "__main__":
    process.main(work)
