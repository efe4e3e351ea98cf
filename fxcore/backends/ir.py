"""Convert modules to OpenVINO's intermediate representation, in float or, by NNCF, in int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxcore.backends.backend import Inputs


def converted(
    module: nn.Module,
    example: Inputs,
    export: Callable[[nn.Module, Inputs], Any],
    calibration: Sequence[Inputs] = (),
    overflows: bool = True,
) -> Any:
    """Convert ``module`` to an ``openvino.Model`` whose inputs and outputs have the module's dtypes.

    Args:
        module: has float32 weights afterwards. Batch norms are folded in the dtype of the weights, which in a narrow
            one loses digits and divides by zero.
        export: makes a ``torch.export.ExportedProgram`` of a module and its inputs.
        calibration: inputs, one row each; with them the model is quantized to int8, with ranges taken from them.
        overflows: whether the int8 model is for processors that add pairs of products in 16 bits; its weights have one
            bit less then.
    """
    from fxcore.backends.openvino_package import openvino

    narrow = {x.dtype for x in example} & {torch.bfloat16, torch.float16}
    if narrow:
        module, example = module.float(), tuple(x.float() if x.dtype in narrow else x for x in example)
    model = openvino.convert_model(export(module, example))
    if narrow:
        model = _with_types(model, openvino.Type.bf16 if torch.bfloat16 in narrow else openvino.Type.f16)
    if not calibration:
        return model
    import nncf

    attention = any("Attention" in type(m).__name__ for m in module.modules())
    fix = nncf.OverflowFix.ENABLE if overflows else nncf.OverflowFix.DISABLE
    return nncf.quantize(
        model,
        nncf.Dataset([[x.numpy() for x in row] for row in calibration]),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER if attention else None,
        # The fast correction leaves EfficientNet-Lite0 a cosine of 0.976 to float32, the other one 0.991. A ViT gains
        # nothing by the other one, and takes twice as long.
        fast_bias_correction=attention,
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    )


def _with_types(model: Any, narrow: Any) -> Any:
    """``model`` with inputs and outputs of the type ``narrow`` where they are float32."""
    from fxcore.backends.openvino_package import openvino

    given = openvino.preprocess.PrePostProcessor(model)
    for ports, port in ((model.inputs, given.input), (model.outputs, given.output)):
        for place, one in enumerate(ports):
            if one.element_type == openvino.Type.f32:
                port(place).tensor().set_element_type(narrow)
    return given.build()
