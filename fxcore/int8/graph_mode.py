"""Quantization by torch.ao's FX graph mode. No other module imports torch.ao.

Only :mod:`fxcore.int8.quantize` imports this module, if :mod:`fxcore.models.torch_ao` reports that torch.ao is
available. Graph mode works from torch 2.11 to 2.15. Its successor PT2E (torchao 0.18) fails on ResNets ("Input
partition has more than one output node"), and is slower than float32 without a compiler.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.ao.quantization import FixedQParamsObserver, ObserverBase, QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.fx.fuse import fuse
from torch.ao.quantization.fx.prepare import prepare
from torch.ao.quantization.quantize_fx import convert_fx

from fxcore.errors import UnknownNode
from fxcore.int8.calls import (
    INSERTED,
    call_functional_relu,
    floating_dimensions,
    pass_positionally,
    separate,
    share_weights,
)
from fxcore.int8.kernels import kind_of, miscomputed, ranges
from fxcore.int8.layers import WEIGHTED, class_of, computed_by, is_relu6
from fxcore.int8.report import Rounding
from fxcore.layer_types import BATCH_NORMS
from fxcore.passes.base import fork, hooked
from fxcore.passes.keep_float import named
from fxcore.tensors import Tensors
from fxcore.tracing.names import public_name

# torch warns on every call. Filter once for the process, since ``catch_warnings`` is not thread-safe.
warnings.filterwarnings("ignore", message=r"\s*torch\.ao\.quantization is deprecated", category=DeprecationWarning)
warnings.filterwarnings("ignore", message="torch.quantize_per_tensor, .* are deprecated", category=UserWarning)


def converted(
    module: fx.GraphModule, batches: Sequence[Tensors], keep: Sequence[str]
) -> tuple[fx.GraphModule, dict[str, Rounding]]:
    """Quantize ``module`` to torch's int8 kernels.

    Args:
        module: a graph whose leaves are inlined; see :func:`fxcore.int8.layers.inline_leaves`.
        batches: calibration inputs.
        keep: names of nodes that stay in float32.

    Returns:
        The int8 module, and the rounding of inputs and of each layer's value, by public name.

    Raises:
        UnknownNode: a name in ``keep`` matches no node.
    """
    with torch.no_grad():
        observed, kept, copies = observe(module, batches[0], keep)
        for inputs in batches:
            observed(*inputs)
        roundings: dict[str, Rounding] = {}
        for node in observed.graph.nodes:
            if (rounding := _rounding(observed, node)) is None:
                continue
            made_by = node.args[0]
            name = public_name(computed_by(observed, made_by))
            if made_by.op != "get_attr" and INSERTED not in made_by.meta and name not in kept:
                roundings.setdefault(name, rounding)
        made = convert_fx(observed).eval()
        share_weights(made, copies)
        return made, roundings


def _rounding(observed: fx.GraphModule, node: fx.Node) -> Rounding | None:
    """Return the rounding that the observer called by ``node`` found; None if ``node`` does not call an observer."""
    observer = observed.get_submodule(str(node.target)) if node.op == "call_module" else None
    if not isinstance(observer, ObserverBase) or observer.dtype != torch.quint8:
        return None
    scale, zero_point = observer.calculate_qparams()  # type: ignore[no-untyped-call]
    found: Any = observer
    return Rounding(float(scale), int(zero_point), found.quant_min, found.quant_max)


def observe(
    module: fx.GraphModule, example: Tensors, keep: Sequence[str]
) -> tuple[fx.GraphModule, set[str], dict[str, str]]:
    """Copy ``module``, fuse its batch norms and insert observers.

    Returns:
        The copy, the names of nodes that stay float, and the copies of layers that :func:`separate` made.

    ``prepare_fx`` would trace the module again, which patches nn.Module for all threads, so only its other two steps
    are called.
    """
    private = copy.deepcopy(fork(module)).eval()
    copies = separate(private)
    pass_positionally(private)
    call_functional_relu(private)
    hidden = _hide_hooked(private)
    mapping = get_default_qconfig_mapping(ranges(private))
    for path in hidden:
        mapping.set_module_name(path, None)
    kept = _leave_in_float(private, mapping, keep, set(floating_dimensions(private, example)))
    scopes = {node.name: (public_name(node), class_of(private, node)) for node in private.graph.nodes}
    fused = fuse(private, is_qat=False)
    observed = prepare(fused, mapping, False, scopes, example_inputs=example).eval()
    _range_inputs(observed, mapping)
    _range_before_relu6(observed)
    _share_rounded(observed, kept)
    return observed, kept, copies


def _hide_hooked(module: fx.GraphModule) -> list[str]:
    """Wrap layers with hooks or a forward of their own, which torch would fuse or replace without these.

    Return the paths of all modules in the wrappers.
    """
    hidden = []
    for path in dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module"):
        if hooked(layer := module.get_submodule(path)):
            wrapper = _Opaque(layer)
            module.set_submodule(path, wrapper)
            hidden += [f"{path}.{name}" for name, _ in wrapper.named_modules() if name]
    return hidden


class _Opaque(nn.Module):
    """A layer of a type that torch does not know."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def _of_known_range(mapping: QConfigMapping) -> set[Any]:
    """Return the kinds of nodes that torch assigns fixed ranges without observers: sigmoid, tanh, softmax."""
    configs = mapping.object_type_qconfigs.items()
    return {target for target, config in configs if config and isinstance(config.activation(), FixedQParamsObserver)}


def _range_inputs(observed: fx.GraphModule, mapping: QConfigMapping) -> None:
    """Observe the inputs of sigmoid, tanh and softmax that come from float layers.

    torch assigns them the fixed range of the output, such as 0 to 1, and clips the rest.
    """
    assert mapping.global_qconfig is not None
    known = _of_known_range(mapping)
    returned, read = set(), []
    for node in observed.graph.nodes:
        if node.op == "call_module" and issubclass(class_of(observed, node), FixedQParamsObserver):
            if kind_of(observed, node.args[0]) in known:
                returned.add(observed.get_submodule(node.target))  # a reshape after it may share the observer
            else:
                read.append(node.target)
    for path in read:
        if observed.get_submodule(path) not in returned:
            observed.set_submodule(path, mapping.global_qconfig.activation())


def _range_before_relu6(observed: fx.GraphModule) -> None:
    """Observe values that only ReLU6 reads as clipped to its range.

    torch would assign both the wider range, in which few of the integers are between 0 and 6.
    """
    for node in observed.graph.nodes:
        if not str(node.target).startswith("activation_post_process") or not node.users:
            continue
        if all(is_relu6(observed, user) for user in node.users):
            observer = observed.get_submodule(str(node.target))
            observer.register_forward_pre_hook(lambda _, args: (torch.nn.functional.relu6(args[0]),))


def _share_rounded(observed: fx.GraphModule, kept: set[str]) -> None:
    """Make all readers of an int8 layer read its rounded value.

    If both a float layer and an int8 layer read it, torch's lowering erases the unrounded value although it is still
    used (`Tried to erase Node`).
    """
    for node in list(observed.graph.nodes):
        seen_by = [user for user in node.users if str(user.target).startswith("activation_post_process")]
        if seen_by and public_name(computed_by(observed, node)) not in kept:
            node.replace_all_uses_with(seen_by[0], delete_user_cb=lambda user, seen=seen_by: user not in seen)
    observed.recompile()


def _leave_in_float(
    module: fx.GraphModule, mapping: QConfigMapping, keep: Sequence[str], floating: set[fx.Node]
) -> set[str]:
    """Exclude nodes named in ``keep``, and those without correct int8 kernels, from ``mapping``; return their names."""
    layer = {node: computed_by(module, node) for node in module.graph.nodes}
    kept = set()
    for name in keep:
        meant = [node for node in module.graph.nodes if named(node, name) and INSERTED not in node.meta]
        if not meant:
            raise UnknownNode(f"there is no node {name!r} to keep in float32", name=name, suggestions=[])
        kept |= {layer[node] for node in meant}
    known = _of_known_range(mapping)
    kept |= miscomputed(module, known) & floating
    for node in module.graph.nodes:
        if layer[node] in kept:
            mapping.set_module_name(str(node.target) if node.op == "call_module" else public_name(node), None)
    for node in list(module.graph.nodes):
        fused = issubclass(class_of(module, node), BATCH_NORMS) and layer[node] is not node
        if node in kept & floating and not fused and not issubclass(class_of(module, node), WEIGHTED):
            # Regardless of the mapping, torch quantizes many operations before an int8 layer unless an operation
            # without an int8 kernel is in between. Insert an identity.
            with module.graph.inserting_after(node):
                between = module.graph.call_function(torch.positive, (node,))
            node.replace_all_uses_with(between)
            between.update_arg(0, node)
            kept.add(between)
    return {public_name(node) for node in kept}
