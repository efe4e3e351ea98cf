"""Detect side effects of a node: randomness, writes to memory, and unknown code."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.tracing.graph_module import called_module
from fxcore.tracing.names import operation_name
from fxcore.tracing.writes import IN_PLACE_OPERATORS, LIBRARIES, OVERLOAD, home, overwritten

_TRAINING = ("training", "train")
_RATES = ("p", "dropout_p", "dropout", "attention_dropout", "drop_prob")
# Arguments of random functions; unless one of them says otherwise, the function does not draw.
_MODES = (*_TRAINING, "dropout_p")

# Python functions that may draw random numbers and are not named like torch operators.
_RANDOM = {
    "dropout1d", "dropout2d", "dropout3d", "drop_block2d", "drop_block3d", "fractional_max_pool2d",
    "fractional_max_pool3d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices",
    "gumbel_softmax", "multi_head_attention_forward", "rrelu", "scaled_dot_product_attention", "stochastic_depth",
}  # fmt: skip
_OVERLOAD_PACKET = type(torch.ops.aten.relu)
_RANDOM_MODULES = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
# Functions that return uninitialised memory, which counts as random.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new", "new_empty", "new_empty_strided"}

# Modules whose functions have no side effects; torch's builtins have no module name.
_TRUSTED = ("", "torch", "torch.functional", "torch.nn.functional", "torch._C", "math", "_operator", "_collections_abc")
_TRUSTED_PACKAGES = ("torch._C.", "torchvision.ops.", "fxcore.")
_TRUSTED_BUILTINS = {"abs", "bool", "divmod", "float", "getattr", "int", "isinstance", "len", "max", "min", "pow",
                     "round", "slice", "sum", "tuple"}  # fmt: skip
# Methods of tensors, and of lists, that have side effects.
_EFFECTS = {"__setitem__", "__delitem__", *(f"__{write.__name__}__" for write in IN_PLACE_OPERATORS)} | {
    "backward",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "delitem",
    "sort",
}


def train_mode(module: nn.Module, node: fx.Node) -> str | None:
    """Return the argument, such as ``training=True``, that puts the function called by ``node`` in train mode; None in
    eval mode.

    Dropout with rate zero counts as eval mode.

    >>> import torch.nn.functional as F
    >>> model = fx.symbolic_trace(lambda x: F.dropout(F.dropout(F.relu(x), 0.0), 0.1))
    >>> [train_mode(model, node) for node in model.graph.nodes]
    [None, None, None, 'training=True', None]
    """
    if node.op != "call_function":
        return None
    given = _named_arguments(module, node)
    rates = {name: given[name] for name in _RATES if name in given}
    dropping = [name for name, rate in rates.items() if isinstance(rate, fx.Node) or (rate is not None and rate != 0)]
    for name in _TRAINING:
        if name in given:
            return f"{name}={given[name]}" if given[name] and (dropping or not rates) else None
    return f"dropout_p={given['dropout_p']}" if "dropout_p" in dropping else None


def _named_arguments(module: nn.Module, node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, including defaults."""
    assert callable(node.target)
    with contextlib.suppress(Exception):  # ambiguous overloads; a signature that cannot be read
        found = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
        if found is not None:
            return dict(found.kwargs)
    with contextlib.suppress(TypeError, ValueError):
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        return {**bound.arguments, **bound.arguments.get("kwargs", {})}
    return dict(node.kwargs)


def is_random(module: nn.Module, node: fx.Node) -> bool:
    """Return whether ``node`` may return different values for the same arguments.

    Dropout and the like are random only in train mode.

    >>> model = fx.symbolic_trace(lambda x: torch.rand_like(x) + x.bernoulli() + torch.dropout(x, 0.1, False))
    >>> [node.name for node in model.graph.nodes if is_random(model, node)]
    ['rand_like', 'bernoulli']
    """
    if (called := called_module(module, node)) is not None:
        return any(
            m.training or (isinstance(m, _RANDOM_MODULES) and m._random_samples is None) for m in called.modules()
        )
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    if train_mode(module, node) is not None:
        return "batch_norm" not in name  # it depends on the batch, but draws nothing
    return is_uninitialized(node) or ((name in _RANDOM or _is_seeded(name)) and not _draws_nothing(module, node))


def is_uninitialized(node: fx.Node) -> bool:
    """Return whether ``node`` returns uninitialised memory, such as ``torch.empty_like(x)``."""
    return node.op in ("call_function", "call_method") and _name(node) in UNINITIALIZED


def _draws_nothing(module: nn.Module, node: fx.Node) -> bool:
    """Return whether the arguments of a random function that is not in train mode show that it draws nothing: it has a
    mode, or gets its random numbers as an argument."""
    given = _named_arguments(module, node) if node.op == "call_function" else {}
    return any(given.get(name) is not None for name in (*_MODES, "_random_samples"))


@functools.cache
def _is_seeded(name: str) -> bool:
    """Return whether torch has an operator of that name that is tagged as drawing random numbers."""
    packet = getattr(torch.ops.aten, name, None) if name and name.isidentifier() else None
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in packet.overloads()
    )


def is_pure(module: nn.Module, node: fx.Node) -> bool:
    """Return whether ``node`` is deterministic and has no side effects.

    True for torch's own functions and modules that neither draw random numbers nor write to memory. Other code is
    assumed to have side effects.

    >>> model = fx.symbolic_trace(lambda x: torch.rand_like(x.add_(1).exp()))
    >>> [node.name for node in model.graph.nodes if is_pure(model, node)]
    ['exp']
    """
    if node.op == "get_attr":
        return True
    if node.op not in ("call_module", "call_function", "call_method") or node.meta.get("mutates"):
        return False
    if overwritten(module, node) is not None or is_random(module, node) or "out" in node.kwargs:
        return False
    if train_mode(module, node) is not None:  # batch normalisation, which updates its statistics
        return False
    if (called := called_module(module, node)) is not None:
        return _is_pure_module(called)
    name = _name(node)
    if name in _EFFECTS or (name.endswith("_") and not name.endswith("__")):
        return False
    if node.op == "call_method":
        return hasattr(Tensor, name)
    if node.is_impure():
        return False
    origin = getattr(node.target, "__module__", None) or ""
    if origin == "builtins":
        return name in _TRUSTED_BUILTINS
    overload = isinstance(node.target, (OVERLOAD, _OVERLOAD_PACKET))
    return overload or origin in _TRUSTED or origin.startswith(_TRUSTED_PACKAGES)


def _is_pure_module(module: nn.Module) -> bool:
    return all(
        type(part).__module__.split(".")[0] in ("torch", "torchvision")
        and not isinstance(part, (fx.GraphModule, torch.jit.ScriptModule))
        and getattr(part, "inplace", None) is not True
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in module.modules()
    )


def may_branch(module: nn.Module, node: fx.Node) -> bool:
    """Return whether ``node`` may branch on the size of its input: it runs code that is neither traced nor that of
    torch, torchvision or timm. Hooks of torch, such as those of weight normalisation, do not branch.

    >>> from fxcore import trace
    >>> model = trace(lambda x: torch.relu(x) * max(x.shape[-1], 8), leaf_functions=[max])
    >>> [node.name for node in model.graph.nodes if may_branch(model, node)]
    ['max_1']
    """
    if (called := called_module(module, node)) is not None:
        return any(
            isinstance(part, torch.jit.ScriptModule)
            or "forward" in vars(part)
            or not LIBRARIES.issuperset(
                map(home, (part, *part._forward_hooks.values(), *part._forward_pre_hooks.values()))
            )
            for part in called.modules()
        )
    return node.op == "call_function" and (home(node.target) not in LIBRARIES or node.target in (max, min))


def _name(node: fx.Node) -> str:
    if isinstance(node.target, OVERLOAD):
        return str(node.target.overloadpacket.__name__)
    return operation_name(node)
