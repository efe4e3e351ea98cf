"""Static post-training quantization to torch's int8 kernels, with the error of each layer.

The kernels (``torch.backends.quantized.engine``) exist only on CPUs. torch.ao's graph mode, if torch has it, converts
the module (:mod:`fxcore.int8.graph_mode`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxcore.copies import shared_copy
from fxcore.errors import FxError, summarize
from fxcore.int8.calls import part_batch_norms
from fxcore.int8.layers import inline_leaves
from fxcore.int8.report import MEASURED, LayerError, layer_errors
from fxcore.models import torch_ao
from fxcore.passes.base import fork, require_eval
from fxcore.passes.keep_float import KEPT
from fxcore.passes.out_of_place import out_of_place
from fxcore.tensors import Tensors
from fxcore.tracing.failures.input_mismatch import explain_mismatch
from fxcore.tracing.writes import mutated_argument

Calibration = Tensor | Tensors | Iterable[Tensor | Sequence[Tensor]]

_BATCH = 8
_WANTED = "int8 is calibrated on a tensor, a tuple of tensors, or an iterable of those"


class CannotQuantize(FxError):
    """The module cannot be quantized, or this torch has no graph mode or int8 kernels."""


@dataclass(frozen=True)
class Quantized:
    """An int8 module, and the error of each of its layers.

    Attributes:
        module: the module, on the CPU; accepts and returns float32 like the original.
        layers: the quantized layers, the one with the largest error first.
    """

    module: fx.GraphModule
    layers: list[LayerError]


def missing() -> str | None:
    """Return why torch's int8 is not available; None if it is."""
    if not torch_ao.available():
        return torch_ao.MISSING
    return "torch has no int8 kernels for this machine" if torch.backends.quantized.engine == "none" else None


def quantize(module: fx.GraphModule, calibration: Calibration, *, keep: Sequence[str] = ()) -> Quantized:
    """Copy ``module`` with int8 layers wherever torch has a kernel.

    Weights are quantized per output channel, activations per tensor, from histograms over the calibration inputs.
    Transposed convolutions stay in float32, because torch's int8 kernels compute them incorrectly.
    Layers with hooks, such as those of ``torch.nn.utils.weight_norm``, stay in float32 too.

    Args:
        module: a float32 module in eval mode, on the CPU.
        calibration: a tensor or a tuple of positional arguments, or any iterable of those, such as a data loader.
            :func:`fxcore.photos.calibration_rows` returns rows made from photographs.
        keep: names of nodes, or a single one, to leave in float32, in addition to those marked by
            :func:`~fxcore.passes.keep_float.keep_float`; a path means all nodes under it.

    Raises:
        UnknownNode: ``keep`` names a node that does not exist.
        CannotQuantize: torch fails, or ``calibration`` is empty or does not match the module's arguments.
        BadTensor: the module does not accept tensors of that shape or dtype.
        CannotTransform: the module is not a graph module in eval mode, or ``out_of_place`` cannot rewrite its in-place
            calls.

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
    keep = [keep] if isinstance(keep, str) else keep
    module = fork(module)
    batches = _batches(module, calibration)
    few = tuple(tensor[:MEASURED] for tensor in batches[0]) if _rows(batches[0]) is not None else batches[0]
    if (why := missing()) is not None:
        raise CannotQuantize(why)
    from fxcore.int8.graph_mode import converted  # imports torch.ao

    try:
        # Inlining adds constants to modules, which are the caller's own.
        pure = _without_writes(inline_leaves(shared_copy(module)))
        with explain_mismatch(module, tuple(batches[0])), torch_ao.same_engine():
            part_batch_norms(pure, batches[0])
            made, roundings = converted(pure, batches, [*module.meta.get(KEPT, ()), *keep])
            per_channel = torch.backends.quantized.engine != "qnnpack"
        layers = layer_errors(pure, few, roundings, per_channel)
    except FxError:
        raise
    except Exception as error:  # graph mode raises all kinds
        raise CannotQuantize(f"torch cannot quantize this module: {summarize(error)}") from error
    return Quantized(made, layers)


def _without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Return ``module``, or if it has in-place calls, an out-of-place copy with the same names.

    torch.ao removes nodes whose values no node reads, even if they write to memory that is read later.
    """
    modules = dict(module.named_modules())
    writes = any(node.meta.get("mutates") or mutated_argument(node, modules) for node in module.graph.nodes)
    return out_of_place(module) if writes else module


def _batches(module: fx.GraphModule, calibration: Calibration) -> list[Tensors]:
    """Return the positional inputs of each calibration call, batching calls with a single row.

    Raises:
        CannotQuantize: there are no calls, or they do not match the arguments of ``module``.
    """
    calls = _calls(module, calibration)
    if not calls or any(part.numel() == 0 for part in calls[0]):
        raise CannotQuantize("int8 needs images to calibrate on, and none were given")
    groups: list[list[Tensors]] = []
    for call in calls:
        last = groups[-1] if groups else []
        alike = bool(last) and [part.shape for part in call] == [part.shape for part in last[0]]
        if alike and len(last) < _BATCH and _rows(call) == 1:
            last.append(call)
        else:
            groups.append([call])
    return [
        tuple(torch.cat(parts) for parts in zip(*group, strict=True)) if len(group) > 1 else group[0]
        for group in groups
    ]


def _calls(module: fx.GraphModule, calibration: Calibration) -> list[Tensors]:
    """Check the calibration calls, and return the positional inputs of each."""
    single = isinstance(calibration, Tensor) or (
        isinstance(calibration, tuple) and all(isinstance(part, Tensor) for part in calibration)
    )
    if not single and not isinstance(calibration, Iterable):
        raise CannotQuantize(f"{_WANTED}, not on {calibration!r:.100}")
    inputs = module.graph.find_nodes(op="placeholder")
    required = [node.name for node in inputs if not node.args]
    calls: list[Tensors] = []
    for given in [calibration] if single else calibration:
        call = (given,) if isinstance(given, Tensor) else given
        if not isinstance(call, (tuple, list)) or not all(isinstance(part, Tensor) for part in call):
            raise CannotQuantize(f"{_WANTED}, not on {given!r:.100}")
        if not len(required) <= len(call) <= len(inputs):
            raise CannotQuantize(
                f"the module takes {', '.join(required)} and got {len(call)} tensors to calibrate on; a tuple "
                "holds the arguments of one call, a list several calls"
            )
        calls.append(tuple(call))
    return calls


def _rows(call: Sequence[Tensor]) -> int | None:
    """Return the common size of the first dimension of a call's tensors; None if they differ."""
    sizes = {part.shape[0] if part.ndim else None for part in call}
    return sizes.pop() if len(sizes) == 1 else None
