"""Export to ONNX with a dynamic number of rows, and verify the file with onnxruntime if it is installed.

onnxruntime does not run bfloat16; such files are checked for being valid only.
"""

from __future__ import annotations

import importlib.util
import logging

import torch
from torch import Tensor

from fxcore.errors import summarize
from fxcore.exports.agreement import require_agreement
from fxcore.exports.captured import Captured
from fxcore.exports.program import exported
from fxcore.exports.subject import CannotExport
from fxcore.quiet import quiet
from fxcore.tensors import dtype_name


def export_onnx(extractor: Captured) -> bytes:
    """Return the bytes of an ``.onnx`` file whose outputs are named by the extractor's keys.

    Raises:
        CannotExport: onnxruntime's outputs differ from the extractor's, or the file is not valid ONNX.
    """
    from onnx_ir.passes.common import NameFixPass

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with quiet():
        program = torch.onnx.export(
            exported(extractor.module, extractor.inputs),
            input_names=extractor.input_names,
            output_names=extractor.keys,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    # Keys and names of inputs may be names that torch gave to inner values or weights, which get others.
    NameFixPass()(program.model)
    proto = program.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = "fxserve", extractor.description.decode()
    data: bytes = proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is not None and extractor.inputs[0].dtype != torch.bfloat16:
        _check(extractor, data)
    else:
        _validate(extractor, data)
    return data


def _validate(extractor: Captured, data: bytes) -> None:
    """Check that the file is valid ONNX, whose operators do not all have bfloat16, without running it."""
    import onnx

    try:
        onnx.checker.check_model(data, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CannotExport(
            f"{extractor.model} cannot be valid ONNX in {dtype_name(extractor.inputs[0].dtype)}: {summarize(error)}; "
            "export an extractor in float32 or float16",
            format="onnx",
        ) from None


def _check(extractor: Captured, data: bytes) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(*given: Tensor) -> list[Tensor]:
        feed = {name: x.numpy() for name, x in zip(extractor.input_names, given, strict=True)}
        return [torch.from_numpy(value) for value in session.run(extractor.keys, feed)]

    require_agreement(extractor, run, "onnx", "onnxruntime")
