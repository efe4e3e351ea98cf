"""Names of a graph's nodes, and other metadata that tracing records for them."""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fxcore.errors import NotTraceable

#: key in ``node.meta`` of torchvision's name for the node
PATH = "path"
#: key in ``node.meta`` of the path of the module that was running
MODULE = "module"
#: key in ``node.meta`` of the reason why a module cannot be traced into and became a leaf
UNTRACEABLE = "untraceable"
#: key in ``node.meta`` of values that the model computes without gradients, as under ``torch.no_grad()``
NO_GRAD = "no_grad"

# torch.fx writes names into string literals as they are.
_UNESCAPED = frozenset('"\\\n\r')

# Attributes of every GraphModule; no part of a model can have one of these names.
_RESERVED = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


def untraceable_modules(graph: fx.Graph) -> dict[str, str]:
    """Return the modules that ``leaf_modules="auto"`` kept whole, as a mapping from path to reason."""
    return {str(n.target): n.meta[UNTRACEABLE] for n in graph.nodes if UNTRACEABLE in n.meta}


def names(graph: fx.Graph) -> list[str]:
    """Return the names of the nodes in execution order, as ``get_graph_node_names`` returns them.

    The output, and parameters read by the graph itself, have no name.
    """
    return [node.meta[PATH] for node in graph.nodes if PATH in node.meta]


def name_nodes(graph: fx.Graph) -> None:
    """Name the nodes of a graph made by torchvision, which does not store names.

    Module calls get the module's path; other nodes, whose modules the graph does not show, get their fx names.
    """
    count: dict[str, int] = {}
    taken = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for node in graph.nodes:
        name = str(node.target) if node.op == "call_module" else node.name
        if node.op in ("output", "get_attr") or (node.op != "call_module" and name in taken):
            continue
        count[name] = count.get(name, -1) + 1
        node.meta.setdefault(PATH, f"{name}_{count[name]}" if count[name] else name)


def public_name(node: fx.Node) -> str:
    """Return torchvision's name for the node, or its fx name if it has none."""
    return str(node.meta.get(PATH, node.name))


def is_under(path: str, module: str) -> bool:
    """Return whether ``path`` is that of ``module`` or of something in it."""
    return path == module or path.startswith(f"{module}.")


def paths_to(path: str) -> list[str]:
    """Return a path and those above it, the outermost first.

    >>> paths_to("layer1.0.conv1")
    ['layer1', 'layer1.0', 'layer1.0.conv1']
    """
    return list(itertools.accumulate(path.split("."), "{}.{}".format)) if path else []


def operation_name(node: fx.Node) -> str:
    """Return the name of the function or method that the node calls; empty for other nodes.

    >>> graph = fx.symbolic_trace(lambda relu: nn.functional.relu(relu).mean()).graph
    >>> [operation_name(node) for node in graph.nodes]
    ['', 'relu', 'mean', '']
    """
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def check_names(graph: fx.Graph, model: nn.Module | Callable[..., Any]) -> None:
    """Check that a GraphModule can have the paths in ``graph``.

    torch.fx writes paths into Python code, and sets the modules as attributes next to its own.

    Raises:
        NotTraceable: a path has a keyword, a reserved attribute name, or a character that needs escaping.
    """
    for path in (str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")):
        parts = path.split(".")
        if word := next((part for part in parts if keyword.iskeyword(part)), None):
            why = f"{word!r} is a keyword of Python"
        elif parts[0] in _RESERVED:
            why = f"torch.fx uses the attribute {parts[0]!r} itself"
        elif character := next((one for one in path if one in _UNESCAPED), None):
            why = f"torch.fx writes the character {character!r} into code without escaping it"
        else:
            continue
        raise NotTraceable.because(
            f"{shown_name(model)} cannot be traced: no part of it can be named {path!r}, since {why}",
            "give that part of the model another name",
            kind="name",
            module=path,
        )


def rename_self(graph: fx.Graph) -> None:
    """Rename a node called ``self``, as after a layer of BERT's attention.

    torch.fx writes node names as variables into a method, where this one would hide the module.
    """
    for node in graph.nodes:
        if node.name == "self":
            node._rename("self_1")


def shown_name(model: nn.Module | Callable[..., Any]) -> str:
    """Return a module's class or a function's name, for messages."""
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "the function")
