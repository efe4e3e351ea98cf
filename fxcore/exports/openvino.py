"""Export to OpenVINO IR, in float or int8: a zip with ``model.xml``, ``model.bin`` and a description."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fxcore.backends.ir import converted, quantized
from fxcore.exports.captured import Captured
from fxcore.exports.description import zipped
from fxcore.exports.program import exported, rows_of


def export_openvino(extractor: Captured) -> bytes:
    """Return the bytes of the zip; inputs and outputs have the extractor's names."""
    from fxcore.backends.openvino_package import openvino

    model = converted(extractor.module, extractor.inputs, exported)
    if extractor.calibration:
        model = quantized(model, extractor.calibration, overflows=True)  # the file may run on any processor
    # The converter leaves sizes open that are constants in the exported graph. Images of other sizes would fail within
    # it, or be resized to these.
    shapes = zip(extractor.inputs, rows_of(extractor.inputs), strict=True)
    model.reshape({place: [-1, *x.shape[1:]] if free else [*x.shape] for place, (x, free) in enumerate(shapes)})
    for ports, names in ((model.inputs, extractor.input_names), (model.outputs, extractor.keys)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)  # compressing the weights is the user's choice
        files = {name: (Path(folder) / name).read_bytes() for name in ("model.xml", "model.bin")}
    return zipped({**files, "extractor.json": extractor.description})
