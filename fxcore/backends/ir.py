"""Convert modules to OpenVINO's intermediate representation, in float, or in int8 with NNCF."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxcore.backends.backend import tensors_of
from fxcore.tensors import Tensors

Export = Callable[[nn.Module, Tensors], Any]

_NARROW = (torch.bfloat16, torch.float16)


def converted(module: nn.Module, example: Tensors, export: Export) -> Any:
    """Convert ``module`` to an ``openvino.Model`` whose inputs and outputs have the module's dtypes.

    Args:
        module: a module that returns a tuple.
        export: exports a module with example inputs as a ``torch.export.ExportedProgram``.
    """
    with module.register_forward_hook(_copied):
        return _converted(module, example, export)


def has_narrow(module: nn.Module, example: Tensors) -> bool:
    """Return whether a tensor of ``module`` or ``example`` is bfloat16 or float16."""
    return any(x.dtype in _NARROW for x in [*tensors_of(module), *example])


def _copied(module: nn.Module, inputs: Tensors, outputs: Tensors) -> Tensors:
    """Copy the outputs of a module.

    The converter drops operations without effect, such as dropout, clone() and casts to the same dtype, and rejects a
    value that is then returned twice. It keeps cat(), which the compiler removes.
    """
    return tuple(torch.cat((value,)) if value.ndim else value for value in outputs)


def _converted(module: nn.Module, example: Tensors, export: Export) -> Any:
    if not has_narrow(module, example):
        return _model(export(module, example))
    # Conversion folds batch norms in the weights' dtype: a narrow one loses precision and divides by zero.
    wide = tuple(x.float() if x.dtype in _NARROW else x for x in example)
    try:
        program = export(copy.deepcopy(module).float(), wide)
        with torch.no_grad():
            outputs = module(*example)
    except Exception:  # the code hard-codes a narrow dtype
        return _model(export(module, example))
    return _with_dtypes(_model(program), [x.dtype for x in example], [x.dtype for x in outputs])


def _model(program: Any) -> Any:
    """Convert an exported program, whose constant sizes are also those of the model's inputs.

    The converter leaves them open. Images of other sizes would fail within the model, or be computed wrongly.
    """
    from fxcore.backends.openvino_package import openvino

    model = openvino.convert_model(program)
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    shapes = [values[name].shape for name in program.graph_signature.user_inputs]
    model.reshape({i: [d if isinstance(d, int) else -1 for d in shape] for i, shape in enumerate(shapes)})
    return model


def quantized(model: Any, calibration: Sequence[Tensors], overflows: bool) -> Any:
    """Quantize a float ``openvino.Model`` to int8.

    Args:
        calibration: calibration inputs, one row each.
        overflows: whether the target processor adds pairs of products in 16 bits; weights then use one bit less.
    """
    import nncf

    attention = any(map(_is_attention, model.get_ops()))
    fix = nncf.OverflowFix.ENABLE if overflows else nncf.OverflowFix.DISABLE
    return nncf.quantize(
        model,
        nncf.Dataset([[x.numpy() for x in row] for row in calibration]),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER if attention else None,
        # EfficientNet-Lite0 has a cosine similarity to float32 of 0.976 with the fast correction, 0.991 with the slow
        # one. A ViT gains nothing from the slow one, which takes twice as long.
        fast_bias_correction=attention,
        advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    )


def _is_attention(op: Any) -> bool:
    """Return whether ``op`` is attention over tokens, not over channels as the split attention of CNNs is."""
    if op.get_type_name() == "ScaledDotProductAttention":
        return True
    if op.get_type_name() != "Softmax":
        return False
    rank = op.get_input_partial_shape(0).rank
    axis = int(op.get_attributes()["axis"])
    return bool(rank.is_static and rank.get_length() >= 3 and axis in (-1, rank.get_length() - 1))


def _with_dtypes(model: Any, inputs: Sequence[torch.dtype], outputs: Sequence[torch.dtype]) -> Any:
    """Give the inputs and outputs of ``model``, a float32 model, the narrow dtypes among ``inputs`` and ``outputs``."""
    from fxcore.backends.openvino_package import openvino

    types = {torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16}
    changed = openvino.preprocess.PrePostProcessor(model)
    for port, dtypes in ((changed.input, inputs), (changed.output, outputs)):
        for place, dtype in enumerate(dtypes):
            if dtype in types:
                port(place).tensor().set_element_type(types[dtype])
    return changed.build()
