"""Make a graph compute the same for tensors of any memory format.

Images and convolutions are channels_last where this is faster, but models are written for contiguous tensors:
``x.view(x.size(0), -1)`` fails after a channels_last convolution, and ``x.as_strided(...)`` returns other elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.tracing.names import operation_name
from fxcore.tracing.writes import LIBRARIES, ON_COPY, home, is_view, mutated_argument, viewed

# Operations whose result depends on strides.
_STRIDED = {"as_strided", "is_contiguous", "storage_offset", "stride", "view_as_complex"}
_RESHAPED = {"view": "reshape", "view_as": "reshape_as"}


def ignore_memory_formats(graph: fx.Graph, modules: dict[str, nn.Module]) -> None:
    """Rewrite operations of ``graph`` that depend on the memory format, as if all tensors were contiguous.

    ``view`` becomes ``reshape``, unless its result is written to. Other such operations get contiguous tensors. In an
    annotated graph, leaf functions and leaf modules that are not torch's get contiguous tensors too.

    Args:
        graph: a graph without in-place operations, except those on copies; it is modified, so pass a copy.
        modules: the traced model's modules by path.

    >>> model = fx.symbolic_trace(lambda x: x.view(x.size(0), -1))
    >>> ignore_memory_formats(model.graph, {})
    >>> _ = model.recompile()
    >>> x = torch.arange(24.0).view(2, 3, 2, 2)
    >>> torch.equal(model(x.contiguous(memory_format=torch.channels_last)), x.flatten(1))
    True
    """
    for node in list(graph.nodes):
        if not node.op.startswith("call_") or ON_COPY in node.meta:
            continue
        name = operation_name(node)
        if node.op == "call_method" and name in _RESHAPED and not _by_dtype(node):
            if not _is_written(node):
                node.target = _RESHAPED[name]
                node.kwargs = {"shape" if key == "size" else key: value for key, value in node.kwargs.items()}
        elif name == "as_strided":
            _stride_base(graph, node)
        elif name in (*_STRIDED, *_RESHAPED) or _is_foreign(node, modules):
            for argument in node.all_input_nodes:
                _pin(graph, node, argument)


def _by_dtype(node: fx.Node) -> bool:
    """Return whether ``view`` reinterprets the bytes of its argument."""
    return "dtype" in node.kwargs or any(isinstance(argument, torch.dtype) for argument in node.args)


def _is_written(node: fx.Node) -> bool:
    """Return whether the value of ``node``, or a view of it, is written to."""
    return any(
        ON_COPY in user.meta or mutated_argument(user, {}) is node or (is_view(user, {}) and _is_written(user))
        for user in node.users
    )


def _is_foreign(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether ``node`` calls code outside the libraries that support any memory format."""
    if node.op == "call_function":
        return home(node.target) not in LIBRARIES
    called = modules.get(str(node.target)) if node.op == "call_module" else None
    return called is not None and not LIBRARIES.issuperset(map(home, called.modules()))


def _stride_base(graph: fx.Graph, node: fx.Node) -> None:
    """Make ``as_strided`` read the contiguous tensor that its argument is a view of, at the same offset."""
    given: dict[str, Any] = dict(zip(("input", "size", "stride", "storage_offset"), node.args, strict=False)) | dict(
        node.kwargs
    )
    source = given["input"]
    value, base = source.meta.get("value"), viewed(source)
    if base is not source and isinstance(value, Tensor):
        offset = given.get("storage_offset")
        offset = value.storage_offset() if offset is None else offset
        node.args, node.kwargs = (base, given["size"], given["stride"], offset), {}
        source = base
    _pin(graph, node, source)


def _pin(graph: fx.Graph, node: fx.Node, argument: fx.Node) -> None:
    """Pass ``argument`` to ``node`` as a contiguous tensor, if it is contiguous in the original model."""
    value = argument.meta.get("value")
    known = isinstance(value, Tensor) and value.is_contiguous() and not value.is_quantized and value.ndim > 1
    guessed = "value" not in argument.meta and viewed(argument) is argument and node.target in _STRIDED
    if known or guessed:
        with graph.inserting_before(node):
            made = graph.call_method("contiguous", (argument,))
        made.meta.update({key: argument.meta[key] for key in ("value", "carries") if key in argument.meta})
        node.replace_input_with(argument, made)
