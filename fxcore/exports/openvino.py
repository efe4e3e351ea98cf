"""Export to OpenVINO IR, in float or int8: a zip with ``model.xml``, ``model.bin`` and a description.

Files are verified with OpenVINO, except in int8 and in narrow dtypes, where they round differently from the extractor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxcore.backends.ir import converted, has_narrow, quantized
from fxcore.backends.openvino import THREADS_EACH
from fxcore.backends.process import check_threads
from fxcore.exports.agreement import require_agreement
from fxcore.exports.captured import Captured
from fxcore.exports.description import zipped
from fxcore.exports.program import exported


def export_openvino(extractor: Captured) -> bytes:
    """Return the bytes of the zip; inputs and outputs have the extractor's names.

    Raises:
        CannotExport: OpenVINO's outputs differ from the extractor's.
    """
    from fxcore.backends.openvino_package import openvino

    model = converted(extractor.module, extractor.inputs, exported)
    if extractor.calibration:
        model = quantized(model, extractor.calibration, overflows=True)  # the file may run on any processor
    for ports, names in ((model.inputs, extractor.input_names), (model.outputs, extractor.keys)):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    narrow = has_narrow(extractor.module, extractor.inputs) or _makes_narrow(model)
    if not extractor.calibration and not narrow:
        _check(extractor, model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        openvino.save_model(model, path, compress_to_fp16=False)  # compressing the weights is the user's choice
        files = {name: (Path(folder) / name).read_bytes() for name in ("model.xml", "model.bin")}
    return zipped({**files, "extractor.json": extractor.description})


def _makes_narrow(model: Any) -> bool:
    """Return whether an operation of ``model`` makes bfloat16 or float16."""
    types = {port.get_element_type().get_type_name() for op in model.get_ops() for port in op.outputs()}
    return bool(types & {"bf16", "f16"})


def _check(extractor: Captured, model: Any) -> None:
    from fxcore.backends.openvino_package import openvino

    threads = torch.get_num_threads()
    check_threads(THREADS_EACH + threads)  # OpenVINO spins forever if it cannot start its threads
    # Some processors compute in bfloat16 by default.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(model, "CPU", settings)

    def run(*given: Tensor) -> list[Tensor]:
        found = compiled([x.numpy() for x in given])
        return [torch.from_numpy(found[port].copy()) for port in compiled.outputs]

    require_agreement(extractor, run, "openvino", "OpenVINO")
