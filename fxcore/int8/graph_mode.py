"""The one place that knows torch.ao: torch's own int8, by torch.fx's graph mode.

Only :mod:`fxcore.int8.quantize` and the processes that load what it made import it, where :mod:`fxcore.torch_ao` says
that it can be. Graph mode works from torch 2.11 to 2.15; with torchao 0.18 its successor PT2E was seen to refuse
ResNets ("Input partition has more than one output node") and to take three to four times as long as float32 where it
worked, unless a compiler follows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.ao.nn.quantized.modules.conv import _ConvNd
from torch.ao.quantization import FixedQParamsObserver, ObserverBase, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.fx.fuse import fuse
from torch.ao.quantization.fx.prepare import prepare
from torch.ao.quantization.quantize_fx import convert_fx

from fxcore.errors import UnknownNode
from fxcore.int8.kernels import kind_of, ranges, untrusted
from fxcore.int8.layers import class_of, computed_by, spelled_out
from fxcore.int8.report import Rounding
from fxcore.tracing.tracer import public_name
from fxcore.transforms.base import fork
from fxcore.transforms.keep_float import named

Inputs = tuple[Tensor, ...]

# Said by torch on every call; once for the process, since ``catch_warnings`` is made for one thread.
warnings.filterwarnings("ignore", message=r"\s*torch\.ao\.quantization is deprecated", category=DeprecationWarning)
warnings.filterwarnings("ignore", message="torch.quantize_per_tensor, .* are deprecated", category=UserWarning)


def converted(
    module: fx.GraphModule, batches: Sequence[Inputs], keep: Sequence[str]
) -> tuple[fx.GraphModule, dict[str, Rounding]]:
    """``module`` on torch's int8 kernels, and how it rounds the value of each layer, and inputs, by public name.

    Args:
        batches: inputs to take ranges from.
        keep: names of nodes that stay in float32.
    """
    with torch.no_grad():
        observed, kept = observe(module, batches[0], keep)
        for inputs in batches:
            observed(*inputs)
        roundings: dict[str, Rounding] = {}
        for node in observed.graph.nodes:
            if (rounding := _rounding(observed, node)) is None:
                continue
            made_by = node.args[0]
            name = public_name(computed_by(observed, made_by))
            if made_by.op != "get_attr" and name not in kept:
                roundings.setdefault(name, rounding)
        return convert_fx(observed).eval(), roundings


def _rounding(observed: fx.GraphModule, node: fx.Node) -> Rounding | None:
    """How an observer would have its input rounded; None of a node that calls none."""
    observer = observed.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(observer, ObserverBase) or observer.dtype != torch.quint8:
        return None
    scale, zero_point = observer.calculate_qparams()  # type: ignore[no-untyped-call]
    found: Any = observer
    return Rounding(float(scale), int(zero_point), found.quant_min, found.quant_max)


def let_int8_convolutions_load() -> None:
    """Torch's int8 convolutions set attributes when unpickled, before ``nn.Module.__init__`` has run: run it first."""
    fill = _ConvNd.__setstate__

    def module_first(self: Any, state: Any) -> None:
        nn.Module.__init__(self)
        fill(self, state)

    _ConvNd.__setstate__ = module_first  # type: ignore[method-assign]


def observe(module: fx.GraphModule, example: Inputs, keep: Sequence[str]) -> tuple[fx.GraphModule, set[str]]:
    """A private copy with batch norms fused and observers placed, and the names of the nodes that stay in float.

    ``prepare_fx`` would trace the module again, and a trace patches nn.Module for every thread; it has been traced, so
    its two other steps are called.
    """
    private = spelled_out(copy.deepcopy(fork(module)).eval())
    mapping = get_default_qconfig_mapping(ranges(private))
    kept = _leave_in_float(private, mapping, keep)
    scopes = {node.name: (public_name(node), class_of(private, node)) for node in private.graph.nodes}
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
        if node.op == "call_module" and issubclass(class_of(observed, node), FixedQParamsObserver):
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
        if seen_by and public_name(computed_by(observed, node)) not in kept:
            node.replace_all_uses_with(seen_by[0], delete_user_cb=lambda user, seen=seen_by: user not in seen)
    observed.recompile()


def _leave_in_float(module: fx.GraphModule, mapping: QConfigMapping, keep: Sequence[str]) -> set[str]:
    layer = {node: computed_by(module, node) for node in module.graph.nodes}
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
