"""Convert modules to OpenVINO's intermediate representation, in float or, by NNCF, in int8."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxcore.backends.backend import Inputs, tensors_of

Export = Callable[[nn.Module, Inputs], Any]

_NARROW = (torch.bfloat16, torch.float16)


def converted(module: nn.Module, example: Inputs, export: Export) -> Any:
    """Convert ``module`` to an ``openvino.Model``, whose inputs and outputs have the module's dtypes.

    Args:
        module: returns a tuple.
        export: makes a ``torch.export.ExportedProgram`` of a module and its inputs.
    """
    from fxcore.backends.openvino_package import openvino

    if all(x.dtype not in _NARROW for x in [*tensors_of(module), *example]):
        return openvino.convert_model(export(module, example))
    # Conversion folds batch norms in the dtype of the weights: a narrow one loses digits and divides by zero.
    wide = tuple(x.float() if x.dtype in _NARROW else x for x in example)
    try:
        program = export(copy.deepcopy(module).float(), wide)
        with torch.no_grad():
            outputs = module(*example)
    except Exception:  # its code has a narrow dtype of its own
        return openvino.convert_model(export(module, example))
    return _with_dtypes(openvino.convert_model(program), [x.dtype for x in example], [x.dtype for x in outputs])


def quantized(model: Any, calibration: Sequence[Inputs], overflows: bool) -> Any:
    """Quantize a float ``openvino.Model`` to int8.

    Args:
        calibration: inputs, one row each, from which the ranges are taken.
        overflows: whether the result is for processors that add pairs of products in 16 bits. Its weights have one bit
            less then.
    """
    import nncf

    attention = any(map(_is_attention, model.get_ops()))
    fix = nncf.OverflowFix.ENABLE if overflows else nncf.OverflowFix.DISABLE
    return nncf.quantize(
        model,
        nncf.Dataset([[x.numpy() for x in row] for row in calibration]),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER if attention else None,
        # The fast correction leaves EfficientNet-Lite0 a cosine of 0.976 to float32, the slow one 0.991. A ViT gains
        # nothing by the slow one, and takes twice as long.
        fast_bias_correction=attention,
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    )


def _is_attention(op: Any) -> bool:
    """Return whether an operation weights tokens by each other, and not channels, as split attention of CNNs does."""
    if op.get_type_name() == "ScaledDotProductAttention":
        return True
    if op.get_type_name() != "Softmax":
        return False
    rank = op.get_input_partial_shape(0).rank
    axis = int(op.get_attributes()["axis"])
    return bool(rank.is_static and rank.get_length() >= 3 and axis in (-1, rank.get_length() - 1))


def _with_dtypes(model: Any, inputs: Sequence[torch.dtype], outputs: Sequence[torch.dtype]) -> Any:
    """``model``, which computes in float32, with inputs and outputs that are narrow where these dtypes are."""
    from fxcore.backends.openvino_package import openvino

    types = {torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16}
    changed = openvino.preprocess.PrePostProcessor(model)
    for port, dtypes in ((changed.input, inputs), (changed.output, outputs)):
        for place, dtype in enumerate(dtypes):
            if dtype in types:
                port(place).tensor().set_element_type(types[dtype])
    return changed.build()
