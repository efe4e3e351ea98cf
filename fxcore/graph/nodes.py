"""Resolve names to nodes of a graph.

Names are looked up and never matched as regular expressions. torchvision's extractor does match them, and uses each
node for only one name, so overlapping names return wrong tensors there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import fx

from fxcore.errors import BadArgument, DuplicateKey, UnknownNode
from fxcore.graph.levels import Level
from fxcore.tensors import dtype_name
from fxcore.tracing.parts import UntraceablePart

#: key in ``node.meta`` for values whose rows, as a run has shown, mix images
APART = "apart"

_LEVEL = re.compile(r"[CP]\d")
"""Names of levels."""


class Named(Protocol):
    """A graph to look up names in, such as a :class:`~fxcore.graph.model_graph.ModelGraph`."""

    eval_nodes: list[str]
    levels: dict[str, Level]
    untraceable: list[UntraceablePart]

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def by_name(self) -> Mapping[str, fx.Node]:
        """Nodes by name."""
        ...

    def extractable(self, node: fx.Node) -> bool:
        """Return whether the node's value can be extracted."""
        ...


def resolve(
    graph: Named, return_nodes: Sequence[str] | Mapping[str, str], plain: Callable[[str], str] = str
) -> dict[str, str]:
    """Map keys to exact node names; see :meth:`fxcore.graph.model_graph.ModelGraph.resolve`.

    Args:
        plain: converts a name, but not its key, to the one to look up.
    """
    if isinstance(return_nodes, str):
        return_nodes = [return_nodes]
    if not isinstance(return_nodes, Iterable):
        raise BadArgument(f"nodes are a list of names, or names with keys, not {return_nodes!r:.100}")
    pairs = list(return_nodes.items()) if isinstance(return_nodes, Mapping) else [(name, name) for name in return_nodes]
    if not isinstance(return_nodes, Mapping):
        pairs = [(one, one) for name, _ in pairs for one in (group(graph, plain(name)) if is_group(name) else [name])]
    if wrong := [pair for pair in pairs if not all(isinstance(part, str) for part in pair)]:
        name, key = wrong[0]
        raise BadArgument(f"names of nodes and keys are text, not {key if isinstance(name, str) else name!r:.100}")
    if not pairs:
        raise UnknownNode("no node was requested; name at least one", name="", suggestions=_examples(graph))
    resolved: dict[str, str] = {}
    for name, key in pairs:
        if key in resolved:
            raise DuplicateKey(f"the key {key!r} is given twice; each name needs a key of its own", key=key)
        resolved[key] = resolve_one(graph, plain(name))
    return resolved


def is_group(name: object) -> bool:
    """Return whether a name stands for a group of nodes."""
    return isinstance(name, str) and "*" in name


def group(graph: Named, name: str) -> list[str]:
    """Return the paths that ``name`` matches, in execution order; ``*`` stands for one component of a path.

    Paths whose last node cannot be extracted are left out.

    Raises:
        UnknownNode: no path matches.
    """
    parts = name.split(".")
    found: dict[str, None] = {}
    for exact in graph.eval_nodes:
        path = exact.split(".")[: len(parts)]
        if len(path) == len(parts) and all(part in ("*", there) for part, there in zip(parts, path, strict=True)):
            found[".".join(path)] = None
    paths = [path for path in found if graph.extractable(graph.by_name[str(_lookup(graph, path))])]
    if not paths:
        above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        near = [f"{path}.*" for path in reversed(above) if "*" not in path and _lookup(graph, path)][:1]
        near = [one for one in near if one != name] or suggest(graph, name.replace(".*", ""))
        hint = f"; did you mean {', '.join(near)}?" if near else "; see the list of nodes"
        raise UnknownNode(
            f"no path of {graph.model} matches {name!r}, in which each * stands for one component{hint}",
            name=name,
            suggestions=near,
        )
    return paths


def resolve_one(graph: Named, name: str) -> str:
    """Return the exact name of the node that ``name`` means: an exact name, a level, or the last node under a path.

    Raises:
        UnknownNode: no node has that name, or its value is not a tensor with rows per image.
    """
    exact = _lookup(graph, name)
    if exact is None and is_group(name):
        raise UnknownNode(
            f"{name!r} stands for several nodes, whose keys are their paths: give a list of names without keys",
            name=name,
            suggestions=group(graph, name)[:5],
        )
    if exact is None:
        if part := next((p for p in graph.untraceable if name == p.path or name.startswith(p.path + ".")), None):
            raise UnknownNode(
                f"{name!r} is in {part.path}, which cannot be traced: {part.reason}",
                name=name,
                suggestions=_examples(graph),
            )
        if _LEVEL.fullmatch(name):
            have = (
                f"its levels are {', '.join(graph.levels)}" if graph.levels else "it has none; ask for one of its nodes"
            )
            raise UnknownNode(f"{graph.model} has no level {name!r}: {have}", name=name, suggestions=_examples(graph))
        suggestions = suggest(graph, name)
        hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; see the list of nodes"
        raise UnknownNode(f"{graph.model} has no node {name!r}{hint}", name=name, suggestions=suggestions)
    node = graph.by_name[exact]
    if not graph.extractable(node):
        near = _extractable_near(graph, exact)
        if node.meta.get("rows"):
            what = f"is {dtype_name(node.meta['value'].dtype)}, which outputs cannot have"
        elif node.meta.get("carries") and node.op == "get_attr":
            what = "does not depend on the images"
        elif node.meta.get(APART):
            what = "has rows in which the images of a batch are mixed"
        else:
            what = "is not a tensor with a row per image"
        raise UnknownNode(
            f"the value of {exact!r} {what}" + (f"; ask for {near[0]} instead" if near else ""),
            name=name,
            suggestions=near,
        )
    return exact


def _lookup(graph: Named, name: str) -> str | None:
    if name in graph.by_name:
        return name
    if name in graph.levels:
        return graph.levels[name].node
    under = [n for n in graph.eval_nodes if n.startswith(name + ".")] if name else []
    return under[-1] if under else None


def suggest(graph: Named, name: str) -> list[str]:
    """Return up to five nodes, levels and paths that are spelled like ``name``.

    Nodes are found by their targets too, which may differ: ViT's node ``…encoder_layer_0.ln`` calls ``ln_1``.
    """
    candidates: dict[str, str] = {}
    for level in graph.levels:
        candidates[level] = level
    for exact, node in graph.by_name.items():
        if graph.extractable(node):
            candidates[exact] = exact
            parts = exact.split(".")
            for depth in range(1, len(parts)):
                path = ".".join(parts[:depth])
                candidates.setdefault(path, path)
            if node.op == "call_module":
                candidates.setdefault(str(node.target), exact)
    lowered: dict[str, str] = {}
    for candidate, meaning in candidates.items():
        lowered.setdefault(candidate.lower(), meaning)
    near = difflib.get_close_matches(name[:200].lower(), lowered, n=5, cutoff=0.6)
    return list(dict.fromkeys(lowered[n] for n in near))


def _extractable_near(graph: Named, exact: str) -> list[str]:
    """Return the three extractable nodes nearest to a node in execution order, the nearest first."""
    index = graph.eval_nodes.index(exact)
    order = sorted(range(len(graph.eval_nodes)), key=lambda i: (abs(i - index), i > index))
    return [graph.eval_nodes[i] for i in order if graph.extractable(graph.by_name[graph.eval_nodes[i]])][:3]


def _examples(graph: Named) -> list[str]:
    return [*graph.levels][:3] or [n for n, node in graph.by_name.items() if graph.extractable(node)][-3:]
