"""Python code that creates layers like given ones, without their weights, and without importing this library."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.exports.subject import CannotExport
from fxcore.passes.base import hooked


def _has_bias(layer: nn.Module) -> bool:
    """Return whether a torch.nn layer has a bias; recurrent layers have the argument in place of the tensor."""
    bias = next((getattr(layer, name) for name in ("bias", "in_proj_bias") if hasattr(layer, name)), None)
    return bias if isinstance(bias, bool) else bias is not None


# Arguments of layers that are not attributes of the same name, with a function that reads the value from the layer.
_FROM_LAYER: dict[str, Callable[[Any], bool]] = {
    "bias": _has_bias,
    "add_bias_kv": lambda m: m.bias_k is not None,
}
_EVERY_MODULE = frozenset(vars(nn.Module()))
_OURS = ("fxcore", "service", "__main__")

ASSEMBLE = '''def _assemble(kind: type, attributes: dict, layers: dict, parameters: dict, buffers: dict) -> nn.Module:
    """Make a layer of the class ``kind`` from its attributes, layers and tensors, without calling its __init__."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(attributes)
    for name, layer in layers.items():
        made.add_module(name, layer)
    for name, parameter in parameters.items():
        made.register_parameter(name, parameter)
    for name, buffer in buffers.items():
        made.register_buffer(name, buffer)
    return made
'''
"""The function that the code calls for layers whose arguments are unknown."""


def layer_code(target: str, layer: nn.Module, imported: dict[str, Any]) -> str:
    """Return an expression that creates a layer like ``layer``, without its weights.

    Args:
        target: path of the layer, for errors.
        imported: gets the classes and functions that the expression uses besides torch.nn's layers, by name.

    Raises:
        CannotExport: the layer's class cannot be imported without this library, it has attributes that are neither
            plain values nor functions that can be imported, or it has hooks or its own ``forward``.
    """
    kind = type(layer)
    if hooked(layer):
        own = "a forward of its own" if "forward" in vars(layer) else "hooks"
        raise CannotExport(
            f"{target} has {own}, which the format fx cannot contain; use another format",
            format="fx",
            module=target,
        )
    if getattr(nn, kind.__name__, None) is kind and kind is not nn.Sequential:
        arguments = _arguments(layer)
        if arguments is not None:
            return f"nn.{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    # Not named_children, which leaves out None and the second name of a layer.
    children = {
        name: "None" if child is None else layer_code(f"{target}.{name}", child, imported)
        for name, child in layer._modules.items()
    }
    numbered = list(children) == [str(place) for place in range(len(children))]
    if isinstance(layer, nn.Sequential) and kind.forward is nn.Sequential.forward and numbered:
        return f"nn.Sequential({', '.join(children.values())})"
    return _assembled(target, layer, children, imported)


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a layer by name, of all names of a tensor, and non-persistent ones too."""
    return {
        **dict(layer.named_parameters(remove_duplicate=False)),
        **dict(layer.named_buffers(remove_duplicate=False)),
    }


def empty_code(tensor: Tensor | None) -> str:
    """Return an expression that creates a tensor, or a parameter, like ``tensor`` without its values."""
    if tensor is None:
        return "None"
    empty = f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
    return f"nn.Parameter({empty}, requires_grad=False)" if isinstance(tensor, nn.Parameter) else empty


def import_of(name: str, value: Any) -> str:
    """Return the statement that imports ``value`` as ``name``.

    Raises:
        CannotExport: ``value`` is an object of this library, or cannot be imported by name.
    """
    if not _is_importable(value):
        shown = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
        raise CannotExport(
            f"the graph calls {shown}, which a folder without this package cannot import; use another format",
            format="fx",
            function=shown,
        )
    own = value.__name__
    return f"from {value.__module__} import {own}" + (f" as {name}" if own != name else "")


def _arguments(layer: nn.Module) -> dict[str, Any] | None:
    """Return the arguments that a torch.nn layer was created with; None if its attributes do not show them."""
    kind = type(layer)
    arguments: dict[str, Any] = {}
    for name, parameter in _parameters(kind).items():
        if name in ("device", "dtype") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        from_layer = _FROM_LAYER.get(name)
        if from_layer is None and not hasattr(layer, name):
            continue
        value = from_layer(layer) if from_layer is not None else getattr(layer, name)
        if parameter.default is parameter.empty or value != parameter.default:
            arguments[name] = value
    if not all(_is_literal(value) for value in arguments.values()):
        return None
    try:
        with torch.device("meta"):
            again = kind(**arguments)
    except (TypeError, ValueError):
        return None
    # The state dict, since the file's tensors are loaded into that.
    same = {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in tensors_of(layer).items()}
    return arguments if same and repr(again) == repr(layer) else None


def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a torch.nn class; recurrent layers pass theirs on to a common base with a mode."""
    if not issubclass(kind, nn.RNNBase):
        return dict(inspect.signature(kind).parameters)
    found = dict(inspect.signature(nn.RNNBase).parameters)
    del found["mode"]
    return {**found, "nonlinearity": inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY)}


def _assembled(target: str, layer: nn.Module, children: dict[str, str], imported: dict[str, Any]) -> str:
    """Return an expression that assembles a layer from its attributes and parts, as unpickling does."""
    kind = type(layer)
    where = f"{target} ({kind.__module__}.{kind.__qualname__})"
    if kind.__module__.split(".")[0] in _OURS or "." in kind.__qualname__ or isinstance(layer, fx.GraphModule):
        raise CannotExport(
            f"{where} cannot be imported without this package; use another format", format="fx", module=target
        )
    attributes = {}
    for key, value in vars(layer).items():
        if key in _EVERY_MODULE:
            continue
        if _is_literal(value):
            attributes[key] = repr(value)
        elif callable(value) and _is_importable(value):
            attributes[key] = _imported(value, imported)
        else:
            detail = f"{where} has {key!r}, which is neither a plain value nor a function that can be imported"
            raise CannotExport(f"{detail}; use another format", format="fx", module=target)
    parts = [
        attributes,
        children,
        # With those that are None, which the layer reads too. Buffers that are not persistent become persistent, since
        # their values come from the file.
        {name: empty_code(parameter) for name, parameter in layer._parameters.items()},
        {name: empty_code(buffer) for name, buffer in layer._buffers.items()},
    ]
    return f"_assemble({', '.join([_imported(kind, imported), *map(_dict, parts)])})"


def _imported(value: Any, imported: dict[str, Any]) -> str:
    """Add a class or function to ``imported`` and return its name there."""
    # Use a name without dots: the module torchvision.ops.stochastic_depth is hidden by the function of that name.
    name = f"{value.__module__}.{value.__name__}".replace(".", "_")
    imported[name] = value
    return name


def _dict(items: dict[str, str]) -> str:
    """Return the expression of a dict with expressions as values."""
    return f"{{{', '.join(f'{key!r}: {value}' for key, value in items.items())}}}"


def _is_literal(value: object) -> bool:
    if isinstance(value, (tuple, list)):  # not a named tuple, whose repr is a call of its class
        return type(value) in (tuple, list, torch.Size) and all(_is_literal(v) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _is_importable(value: Any) -> bool:
    """Return whether ``value`` can be imported by its name, and not from this library."""
    # Not by __qualname__, which is not a name of torch.relu.
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    ours = module is None or module.split(".")[0] in _OURS
    return not ours and getattr(sys.modules.get(str(module)), str(name), None) is value
