"""OpenVINO IR: a zip with ``model.xml``, ``model.bin`` and a description."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fxcore.exports.base import as_tuple, description_json, example, require_float, zipped
from fxcore.exports.program import exported
from fxcore.extractor import Extractor


def export_openvino(extractor: Extractor) -> bytes:
    """The bytes of the zip; the model's inputs and outputs have the extractor's names."""
    import openvino

    require_float(extractor, "openvino")
    model = openvino.convert_model(exported(as_tuple(extractor), example(extractor)))
    for port, spec in zip(model.inputs, extractor.inputs, strict=True):
        port.get_tensor().set_names({spec.name})
    for port, output in zip(model.outputs, extractor.outputs, strict=True):
        port.get_tensor().set_names({output.key})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)  # halving the weights is the user's choice
        files = {name: (Path(folder) / name).read_bytes() for name in ("model.xml", "model.bin")}
    return zipped({**files, "extractor.json": description_json(extractor)})
