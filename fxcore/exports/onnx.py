"""ONNX with a free number of rows, compared with the extractor in onnxruntime where that is installed."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import torch
from torch import Tensor

from fxcore.exports.base import CannotExport, as_tuple, description_json, example, require_float
from fxcore.exports.program import exported
from fxcore.extractor import Extractor
from fxcore.verify import verify

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def export_onnx(extractor: Extractor) -> bytes:
    """The bytes of an ``.onnx`` whose outputs are named as the extractor's keys.

    Raises:
        CannotExport: what onnxruntime computes is not what the extractor does.
    """
    require_float(extractor, "onnx")
    inputs = example(extractor)
    keys = [output.key for output in extractor.outputs]
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    try:
        quiet.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                exported(as_tuple(extractor), inputs),
                input_names=[spec.name for spec in extractor.inputs],
                output_names=keys,
                dynamo=True,
                verbose=False,
            )
    finally:
        quiet.setLevel(level)
    assert program is not None
    proto = program.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = "fxserve", description_json(extractor).decode()
    data: bytes = proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is not None and extractor.dtype != torch.bfloat16:
        _check(extractor, data, inputs)
    return data


def _check(extractor: Extractor, data: bytes, inputs: tuple[Tensor, ...]) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    keys = [output.key for output in extractor.outputs]

    def run(*given: Tensor) -> dict[str, Tensor]:
        feed = {i.name: x.cpu().numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
        return {k: torch.from_numpy(v) for k, v in zip(keys, session.run(keys, feed), strict=True)}

    # One row and two: the number of rows is free.
    for given in (inputs, tuple(x[:1] for x in inputs)):
        found = verify(extractor.module, run, given)
        if not found.relative <= _TOLERANCE[extractor.dtype]:
            raise CannotExport(
                f"{extractor.graph.entry.name} gives other values in onnxruntime: {found.relative:.1e} away, "
                f"over {_TOLERANCE[extractor.dtype]:.0e}",
                format="onnx",
                max_rel_error=found.relative,
            )
