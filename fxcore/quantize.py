"""int8 by torch.fx's own graph mode: calibrated on photographs, node by node, with the error that each layer brings.

What runs are torch's int8 kernels (``torch.backends.quantized.engine``), which exist on CPUs only. torch has marked
graph mode as deprecated in favour of torchao's PT2E, which gives a program for a compiler instead of kernels;
graph mode works from torch 2.11 to 2.15, and with torchao 0.18 PT2E was seen to
refuse ResNets ("Input partition has more than one output node") and to take three to four times as long as float32
where it worked, unless a compiler follows.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import FixedQParamsObserver, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.fx.fuse import fuse
from torch.ao.quantization.fx.prepare import prepare
from torch.ao.quantization.quantize_fx import convert_fx, convert_to_reference_fx

from fxcore.errors import FxError, NotTraceable, UnknownNode, said
from fxcore.int8_kernels import kind_of, ranges, untrusted
from fxcore.interpreter import Interpreter
from fxcore.tracing import PATH, public_name, record
from fxcore.transforms.base import fork, require_eval
from fxcore.transforms.keep_float import KEPT, named
from fxcore.verify import OutputErrors, verify

Inputs = tuple[Tensor, ...]
Calibration = Tensor | Inputs | Iterable[Tensor | Sequence[Tensor]]

# Said by torch on every call; once for the process, since ``catch_warnings`` is made for one thread.
warnings.filterwarnings("ignore", message=r"\s*torch\.ao\.quantization is deprecated", category=DeprecationWarning)
warnings.filterwarnings("ignore", message="torch.quantize_per_tensor, .* are deprecated", category=UserWarning)

_BATCH = 8
_REPORT_ROWS = 2
_WANTED = "int8 is calibrated on a tensor, a tuple of tensors, or an iterable of those"

_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear)
_NORMS = (nn.modules.batchnorm._BatchNorm,)


class CannotQuantize(FxError):
    """Graph mode cannot make an int8 module of this one."""


@dataclass(frozen=True)
class LayerError:
    """What one layer loses by being computed in int8.

    Attributes:
        name: of its node, as :func:`quantize` takes it in ``keep``; what was fused into it counts with it.
        sqnr: of the layer alone, in decibels: it is given the float model's own values, rounded to int8, and its output
            is rounded to int8 too. Infinite where nothing is lost.
        relative, cosine: the same error as norm of the difference over norm of the float value, and as cosine.
        accumulated: the relative error of its value when everything before it is int8 as well.
    """

    name: str
    sqnr: float
    relative: float
    cosine: float
    accumulated: float


@dataclass(frozen=True)
class Quantized:
    """An int8 module, and what each of its layers costs.

    Attributes:
        module: takes and returns float32 as the original does; on the CPU.
        layers: what was quantized, the layer that brings the largest error first.
    """

    module: fx.GraphModule
    layers: list[LayerError]


def quantize(module: fx.GraphModule, calibration: Calibration, *, keep: Sequence[str] = ()) -> Quantized:
    """``module`` computed in int8 wherever torch has a kernel for that; it stays as it is.

    Weights get a scale per channel, activations one per tensor from histograms over the calibration inputs. Transposed
    convolutions stay in float32: torch's int8 kernels give wrong values for them.

    Args:
        module: in eval mode, on the CPU, float32.
        calibration: what :func:`~fxcore.verify.verify` takes, a tensor or a tuple of positional arguments, or any
            iterable of those, such as a data loader. :func:`fxcore.photos.calibration_rows` makes them of photographs.
        keep: names of nodes to leave in float32; a path means every node under it. Those that
            :func:`~fxcore.transforms.keep_float.keep_float` named come on top.

    Raises:
        UnknownNode: ``keep`` names none.
        CannotQuantize: it fails, or there is nothing to calibrate on, or something else than the module takes.

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
    try:
        with torch.no_grad():
            observed, kept = _observed(module, batches[0], [*module.meta.get(KEPT, ()), *keep])
            for inputs in batches:
                observed(*inputs)
            computed = {node.name: public_name(_computed_by(observed, node)) for node in observed.graph.nodes}
            paths = {name: path for name, path in computed.items() if path not in kept}
            floats = _Floats(observed)
            floats.run(*few)
            reference = convert_to_reference_fx(copy.deepcopy(observed))
            layers = _layer_errors(reference, floats.values, paths, few)
            made = convert_fx(observed)
    except FxError:
        raise
    except Exception as error:  # graph mode raises of every kind
        raise CannotQuantize(f"torch cannot quantize this module: {said(error)}") from error
    return Quantized(made.eval(), layers)


def _observed(module: fx.GraphModule, example: Inputs, keep: Sequence[str]) -> tuple[fx.GraphModule, set[str]]:
    """A private copy with batch norms fused and observers placed, and the names of the nodes that stay in float.

    ``prepare_fx`` would trace the module again, and a trace patches nn.Module for every thread; it has been traced, so
    its two other steps are called.
    """
    private = _opened(copy.deepcopy(fork(module)).eval())
    mapping = get_default_qconfig_mapping(ranges(private))
    kept = _leave_in_float(private, mapping, keep)
    scopes = {node.name: (public_name(node), _kind(private, node)) for node in private.graph.nodes}
    fused = fuse(private, is_qat=False)
    observed = prepare(fused, mapping, False, scopes, example_inputs=example).eval()
    _range_inputs(observed, mapping)
    _share_rounded(observed, kept)
    return observed, kept


def _of_known_range(mapping: QConfigMapping) -> set[Any]:
    """The kinds of nodes whose values torch does not observe: sigmoids, tanh, softmax."""
    configs = mapping.object_type_qconfigs.items()
    return {target for target, config in configs if config and isinstance(config.activation(), FixedQParamsObserver)}


def _range_inputs(observed: fx.GraphModule, mapping: QConfigMapping) -> None:
    """Let what a sigmoid, tanh or softmax reads from a float layer have its own range: torch gives it the known range
    of what they return, 0 to 1, and cuts off the rest."""
    assert mapping.global_qconfig is not None
    known = _of_known_range(mapping)
    returned, read = set(), []
    for node in observed.graph.nodes:
        if node.op == "call_module" and issubclass(_kind(observed, node), FixedQParamsObserver):
            if kind_of(observed, node.args[0]) in known:
                returned.add(observed.get_submodule(node.target))  # a reshape after it may have the same one
            else:
                read.append(node.target)
    for path in read:
        if observed.get_submodule(path) not in returned:
            observed.set_submodule(path, mapping.global_qconfig.activation())


def _share_rounded(observed: fx.GraphModule, kept: set[str]) -> None:
    """Make all readers of an int8 layer read its rounded value: where a float layer read the unrounded one beside an
    int8 layer, torch's lowering would erase it while it is still read (`Tried to erase Node`)."""
    for node in list(observed.graph.nodes):
        seen_by = [user for user in node.users if str(user.target).startswith("activation_post_process")]
        if seen_by and public_name(_computed_by(observed, node)) not in kept:
            node.replace_all_uses_with(seen_by[0], delete_user_cb=lambda user, seen=seen_by: user not in seen)
    observed.recompile()


def _opened(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, with what torchvision's names keep whole spelled out: containers, squeeze-and-excitation, …

    The last node of each keeps the name of the whole.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        called = module.get_submodule(str(node.target))
        if type(called).__module__.startswith("torch.nn.") and not isinstance(called, nn.Sequential):
            continue
        try:
            inner, _ = record(called, leaf_modules=[_Nothing])
        except NotTraceable:
            continue  # it stays as it is, in float32
        inputs = [n for n in inner.nodes if n.op == "placeholder"]
        if any(str(n.target).startswith("*") for n in inputs):
            continue  # several arguments are one node
        given = dict(zip((n.target for n in inputs), node.args, strict=False)) | node.kwargs
        # What is not given has a default value.
        copies: dict[fx.Node, Any] = {n: given.get(n.target, *n.args) for n in inputs}
        with graph.inserting_before(node):
            for n in inner.nodes:
                if n.op in ("placeholder", "output"):
                    continue
                made = copies[n] = graph.node_copy(n, copies.__getitem__)
                if n.op in ("call_module", "get_attr"):
                    made.target = f"{node.target}.{n.target}"
                made.meta = {PATH: f"{public_name(node)}.{public_name(n)}"}
        result = copies[next(n for n in inner.nodes if n.op == "output").args[0]]
        if result not in node.all_input_nodes:
            result.meta[PATH] = public_name(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    module.recompile()
    return fork(module).eval()


class _Nothing(nn.Module):
    """A class that no module has: with it as the only leaf, every module is traced into."""


def _leave_in_float(module: fx.GraphModule, mapping: QConfigMapping, keep: Sequence[str]) -> set[str]:
    layer = {node: _computed_by(module, node) for node in module.graph.nodes}
    kept = set()
    for name in keep:
        meant = [node for node in module.graph.nodes if named(node, name)]
        if not meant:
            raise UnknownNode(f"there is no node {name!r} to keep in float32", name=name, suggestions=[])
        kept |= {layer[node] for node in meant}
    known = _of_known_range(mapping)
    kept |= untrusted(module, known)
    for node in module.graph.nodes:
        if layer[node] in kept:
            mapping.set_module_name(str(node.target) if node.op == "call_module" else public_name(node), None)
    for node in list(module.graph.nodes):
        if node in kept and kind_of(module, node) in known:
            # torch makes int8 of these wherever int8 follows, whatever the mapping says; an operation that it has no
            # int8 for, which gives what it is given, stands between.
            with module.graph.inserting_after(node):
                between = module.graph.call_function(torch.positive, (node,))
            node.replace_all_uses_with(between)
            between.update_arg(0, node)
            kept.add(between)
    return {public_name(node) for node in kept}


def _computed_by(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The layer that computes ``node``: for a batch norm or a ReLU that is the one before it."""
    while len(node.all_input_nodes) == 1:
        before = node.all_input_nodes[0]
        relu = node.target in (torch.relu, nn.functional.relu) or issubclass(_kind(module, node), nn.ReLU)
        if issubclass(_kind(module, node), _NORMS):
            fused = issubclass(_kind(module, before), _WEIGHTED)
        else:
            fused = relu and (before.op == "call_function" or issubclass(_kind(module, before), (*_WEIGHTED, *_NORMS)))
        if not fused:
            break
        node = before
    return node


def _kind(module: fx.GraphModule, node: fx.Node) -> type:
    """The class of the module that a node calls, or else of the one that holds it."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else type(module)


class _Floats(Interpreter):
    """Runs an observed module and remembers the value of every operation."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op not in ("placeholder", "get_attr"):
            self.values[n.name] = value
        return value


class _Rounded(_Floats):
    """Runs a reference module, in which every layer is a float operation between roundings, and compares.

    Args:
        floats: values of the float module by node name.
        alone: whether each layer is given the float module's values, or what the layers before it made.
    """

    def __init__(self, module: fx.GraphModule, floats: dict[str, Tensor], alone: bool) -> None:
        super().__init__(module)
        self._floats = floats
        self._alone = alone
        self.errors: dict[str, OutputErrors] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        made_by = n.args[0] if n.args else None
        if n.target is not torch.quantize_per_tensor or not isinstance(made_by, fx.Node):
            return value
        expected = self._floats.get(made_by.name)
        if expected is None:
            return value
        if made_by.name not in self.errors:
            self.errors[made_by.name] = verify(lambda: expected, lambda: value, ()).outputs["0"]
        if not self._alone:
            return value
        return torch.quantize_per_tensor(expected, value.q_scale(), value.q_zero_point(), value.dtype)


def _layer_errors(
    reference: fx.GraphModule, floats: dict[str, Tensor], paths: dict[str, str], inputs: Inputs
) -> list[LayerError]:
    alone, together = (_Rounded(reference, floats, alone) for alone in (True, False))
    alone.run(*inputs)
    together.run(*inputs)
    layers = [
        LayerError(
            name=paths[name],
            sqnr=-20 * math.log10(errors.relative) if errors.relative else math.inf,
            relative=errors.relative,
            cosine=errors.cosine,
            accumulated=together.errors[name].relative,
        )
        for name, errors in alone.errors.items()
        if name in paths
    ]
    return sorted(layers, key=lambda layer: layer.sqnr)


def _batches(module: fx.GraphModule, calibration: Calibration) -> list[Inputs]:
    """The positional inputs of each call that ranges are taken from; single rows are put together.

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
