"""Convert exported programs to OpenVINO's intermediate representation, in float or, by NNCF, in int8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fxcore.backends.backend import Inputs


def converted(program: Any, module: nn.Module, calibration: Sequence[Inputs] = ()) -> Any:
    """Convert ``program`` to an ``openvino.Model``.

    Args:
        program: the ``torch.export.ExportedProgram`` of ``module``.
        calibration: inputs, one row each; with them the model is quantized to int8, with ranges taken from them.
    """
    from fxcore.backends.openvino_package import openvino

    model = openvino.convert_model(program)
    if not calibration:
        return model
    import nncf

    attention = any("Attention" in type(m).__name__ for m in module.modules())
    return nncf.quantize(
        model,
        nncf.Dataset([[x.numpy() for x in row] for row in calibration]),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER if attention else None,
    )
