"""int8 by torch's own kernels: calibrated on photographs, node by node, with the error that each layer brings.

What runs are torch's int8 kernels (``torch.backends.quantized.engine``), which exist on CPUs only, in a module that
torch.ao's graph mode makes (:mod:`fxcore.int8.graph_mode`), while torch has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxcore import torch_ao
from fxcore.errors import FxError, summarize
from fxcore.int8.report import LayerError, Simulation
from fxcore.tracing.misfit import explained
from fxcore.transforms.base import require_eval
from fxcore.transforms.keep_float import KEPT

__all__ = ["CannotQuantize", "Inputs", "LayerError", "Quantized", "missing", "quantize"]

Inputs = tuple[Tensor, ...]
Calibration = Tensor | Inputs | Iterable[Tensor | Sequence[Tensor]]

_BATCH = 8
_REPORT_ROWS = 2
_WANTED = "int8 is calibrated on a tensor, a tuple of tensors, or an iterable of those"


class CannotQuantize(FxError):
    """Graph mode cannot quantize this module, or this torch has no graph mode."""


@dataclass(frozen=True)
class Quantized:
    """An int8 module, and the error that each of its layers brings.

    Attributes:
        module: takes and returns float32 as the original does; on the CPU.
        layers: what was quantized, the layer that brings the largest error first.
    """

    module: fx.GraphModule
    layers: list[LayerError]


def missing() -> str | None:
    """Why torch's own int8 is not available here; None if it is."""
    if not torch_ao.available():
        return torch_ao.MISSING
    return "torch has no int8 kernels for this machine" if torch.backends.quantized.engine == "none" else None


def quantize(module: fx.GraphModule, calibration: Calibration, *, keep: Sequence[str] = ()) -> Quantized:
    """``module`` computed in int8 wherever torch has a kernel for that; it stays as it is.

    Weights get a scale per channel, activations one per tensor from histograms over the calibration inputs. Transposed
    convolutions stay in float32: torch's int8 kernels give wrong values for them.

    Args:
        module: in eval mode, on the CPU, float32.
        calibration: a tensor or a tuple of positional arguments, or any iterable of those, such as a data loader.
            :func:`fxcore.photos.calibration_rows` makes them of photographs.
        keep: names of nodes to leave in float32; a path means every node under it. Those that
            :func:`~fxcore.transforms.keep_float.keep_float` named come on top.

    Raises:
        UnknownNode: ``keep`` names none.
        CannotQuantize: torch fails, or ``calibration`` is empty or not what the module takes.
        BadTensor: the module does not take tensors of that shape or dtype.

    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> from fxcore.photos import calibration_rows
    >>> graph = model_graph("resnet18")
    >>> extractor = build_extractor(graph, load_model(get_model("resnet18"), "random"), graph.resolve(["C2"]))
    >>> rows = calibration_rows(graph.preprocessing, extractor.inputs, graph.input_size, count=4)
    >>> found = quantize(extractor.module, rows, keep=["layer1.0"])
    >>> sorted(layer.name for layer in found.layers)
    ['conv1', 'layer1.1.add', 'layer1.1.conv1', 'layer1.1.conv2', 'maxpool']
    """
    require_eval(module, "quantize")
    batches = _batches(module, calibration)
    few = tuple(tensor[:_REPORT_ROWS] for tensor in batches[0]) if _rows(batches[0]) is not None else batches[0]
    if (why := missing()) is not None:
        raise CannotQuantize(why)
    from fxcore.int8.graph_mode import converted  # imports torch.ao

    try:
        with explained(module, tuple(batches[0])):
            made, roundings = converted(module, batches, [*module.meta.get(KEPT, ()), *keep])
        per_channel = torch.backends.quantized.engine != "qnnpack"
        layers = Simulation(module, few, roundings, per_channel).layers()
    except FxError:
        raise
    except Exception as error:  # graph mode raises of every kind
        raise CannotQuantize(f"torch cannot quantize this module: {summarize(error)}") from error
    return Quantized(made, layers)


def _batches(module: fx.GraphModule, calibration: Calibration) -> list[Inputs]:
    """The positional inputs of each calibration call; calls of a single row are put together into batches.

    Raises:
        CannotQuantize: there are none, or they are not what ``module`` takes.
    """
    one = isinstance(calibration, Tensor) or (
        isinstance(calibration, tuple) and all(isinstance(part, Tensor) for part in calibration)
    )
    if not one and not isinstance(calibration, Iterable):
        raise CannotQuantize(f"{_WANTED}, not on {calibration!r:.100}")
    inputs = module.graph.find_nodes(op="placeholder")
    wanted = [node.name for node in inputs if not node.args]
    groups: list[list[Inputs]] = []
    for given in [calibration] if one else calibration:
        call = (given,) if isinstance(given, Tensor) else given
        if not isinstance(call, (tuple, list)) or not all(isinstance(part, Tensor) for part in call):
            raise CannotQuantize(f"{_WANTED}, not on {given!r:.100}")
        if not len(wanted) <= len(call) <= len(inputs):
            raise CannotQuantize(
                f"the module takes {', '.join(wanted)} and was given {len(call)} tensors to calibrate on; a tuple "
                "holds the arguments of one call, a list several calls"
            )
        shapes = [part.shape for part in call]
        last = groups[-1] if groups else []
        if 0 < len(last) < _BATCH and _rows(call) == 1 and shapes == [part.shape for part in last[0]]:
            last.append(tuple(call))
        else:
            groups.append([tuple(call)])
    if not groups or any(part.numel() == 0 for part in groups[0][0]):
        raise CannotQuantize("int8 needs images to calibrate on, and none were given")
    return [
        tuple(torch.cat(parts) for parts in zip(*group, strict=True)) if len(group) > 1 else group[0]
        for group in groups
    ]


def _rows(call: Sequence[Tensor]) -> int | None:
    """The size that all tensors of a call have in their first dimension; None if they differ in it."""
    sizes = {part.shape[0] if part.ndim else None for part in call}
    return sizes.pop() if len(sizes) == 1 else None
