"""Resolve names to nodes of a graph.

Names are looked up and never matched as regular expressions. torchvision's extractor does match them, and uses each
node for only one name, so overlapping names return wrong tensors there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxcore.errors import BadArgument, DuplicateKey, UnknownNode
from fxcore.graph.levels import Level
from fxcore.graph.node_info import is_extractable
from fxcore.tensors import dtype_name
from fxcore.tracing.names import is_under, paths_to
from fxcore.tracing.parts import UntraceablePart

#: key in ``node.meta`` for values whose rows, as a run has shown, mix images
APART = "apart"

_LEVEL = re.compile(r"[CP]\d")
"""Names of levels."""


def is_group(name: object) -> bool:
    """Return whether a name stands for a group of nodes."""
    return isinstance(name, str) and "*" in name


@dataclass(frozen=True)
class Names:
    """The names of a graph's nodes.

    Attributes:
        model: the model's name, for errors.
        by_name: nodes by name, in execution order.
        levels: see :mod:`fxcore.graph.levels`.
        untraceable: parts that were not traced.
        extractable: returns whether a node's value can be extracted.
        plain: converts a name, but not its key, to the one to look up.
    """

    model: str
    by_name: Mapping[str, fx.Node]
    levels: Mapping[str, Level] = field(default_factory=dict)
    untraceable: Sequence[UntraceablePart] = ()
    extractable: Callable[[fx.Node], bool] = is_extractable
    plain: Callable[[str], str] = str

    def resolve(self, return_nodes: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
        """Map keys to exact names; see :meth:`fxcore.graph.model_graph.ModelGraph.resolve`."""
        if isinstance(return_nodes, str):
            return_nodes = [return_nodes]
        if not isinstance(return_nodes, Iterable):
            raise BadArgument(f"nodes are a list of names, or names with keys, not {return_nodes!r:.100}")
        if isinstance(return_nodes, Mapping):
            pairs = list(return_nodes.items())
        else:
            groups = (self._group(self.plain(name)) if is_group(name) else [name] for name in return_nodes)
            pairs = [(name, name) for group in groups for name in group]
        if wrong := [pair for pair in pairs if not all(isinstance(part, str) for part in pair)]:
            name, key = wrong[0]
            raise BadArgument(f"names of nodes and keys are text, not {key if isinstance(name, str) else name!r:.100}")
        if not pairs:
            raise UnknownNode("no node was requested; name at least one", name="", suggestions=self._examples())
        resolved: dict[str, str] = {}
        for name, key in pairs:
            if key in resolved:
                raise DuplicateKey(f"the key {key!r} is given twice; each name needs a key of its own", key=key)
            resolved[key] = self._resolve_one(self.plain(name))
        return resolved

    def _group(self, name: str) -> list[str]:
        """Return the paths that ``name`` matches, in execution order; ``*`` stands for one component of a path.

        Paths whose last node cannot be extracted are left out.

        Raises:
            UnknownNode: no path matches.
        """
        parts = name.split(".")
        found: dict[str, None] = {}
        for exact in self.by_name:
            path = exact.split(".")[: len(parts)]
            if len(path) == len(parts) and all(part in ("*", there) for part, there in zip(parts, path, strict=True)):
                found[".".join(path)] = None
        paths = [path for path in found if self.extractable(self.by_name[str(self._lookup(path))])]
        if not paths:
            above = reversed(paths_to(name)[:-1])
            near = [f"{path}.*" for path in above if "*" not in path and self._lookup(path)][:1]
            near = [one for one in near if one != name] or self._suggest(name.replace(".*", ""))
            hint = f"; did you mean {', '.join(near)}?" if near else "; see the list of nodes"
            raise UnknownNode(
                f"no path of {self.model} matches {name!r}, in which each * stands for one component{hint}",
                name=name,
                suggestions=near,
            )
        return paths

    def _resolve_one(self, name: str) -> str:
        """Return the exact name of the node that ``name`` means: an exact name, a level, or the last node under a path.

        Raises:
            UnknownNode: no node has that name, or its value is not a tensor with rows per image.
        """
        exact = self._lookup(name)
        if exact is None and is_group(name):
            raise UnknownNode(
                f"{name!r} stands for several nodes, whose keys are their paths: give a list of names without keys",
                name=name,
                suggestions=self._group(name)[:5],
            )
        if exact is None:
            if part := next((p for p in self.untraceable if is_under(name, p.path)), None):
                raise UnknownNode(
                    f"{name!r} is in {part.path}, which cannot be traced: {part.reason}",
                    name=name,
                    suggestions=self._examples(),
                )
            if _LEVEL.fullmatch(name):
                levels = ", ".join(self.levels)
                have = f"its levels are {levels}" if levels else "it has none; ask for one of its nodes"
                raise UnknownNode(
                    f"{self.model} has no level {name!r}: {have}", name=name, suggestions=self._examples()
                )
            suggestions = self._suggest(name)
            hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else "; see the list of nodes"
            raise UnknownNode(f"{self.model} has no node {name!r}{hint}", name=name, suggestions=suggestions)
        node = self.by_name[exact]
        if not self.extractable(node):
            near = self._extractable_near(exact)
            if node.meta.get("rows"):
                what = f"is {dtype_name(node.meta['value'].dtype)}, which outputs cannot have"
            elif node.meta.get("carries") and node.op == "get_attr":
                what = "does not depend on the images"
            elif node.meta.get(APART):
                what = "has rows that cannot be assigned to one image each"
            else:
                what = "is not a tensor with a row per image"
            raise UnknownNode(
                f"the value of {exact!r} {what}" + (f"; ask for {near[0]} instead" if near else ""),
                name=name,
                suggestions=near,
            )
        return exact

    def _lookup(self, name: str) -> str | None:
        if name in self.by_name:
            return name
        if name in self.levels:
            return self.levels[name].node
        under = [n for n in self.by_name if n.startswith(name + ".")] if name else []
        return under[-1] if under else None

    def _suggest(self, name: str) -> list[str]:
        """Return up to five nodes, levels and paths that are spelled like ``name``.

        Nodes are found by their targets too, which may differ: ViT's node ``…encoder_layer_0.ln`` calls ``ln_1``.
        """
        candidates = {level: level for level in self.levels}
        for exact, node in self.by_name.items():
            if self.extractable(node):
                candidates[exact] = exact
                for path in paths_to(exact)[:-1]:
                    candidates.setdefault(path, path)
                if node.op == "call_module":
                    candidates.setdefault(str(node.target), exact)
        lowered: dict[str, str] = {}
        for candidate, meaning in candidates.items():
            lowered.setdefault(candidate.lower(), meaning)
        near = difflib.get_close_matches(name[:200].lower(), lowered, n=5, cutoff=0.6)
        return list(dict.fromkeys(lowered[n] for n in near))

    def _extractable_near(self, exact: str) -> list[str]:
        """Return the three extractable nodes nearest to a node in execution order, the nearest first."""
        names = list(self.by_name)
        index = names.index(exact)
        order = sorted(range(len(names)), key=lambda i: (abs(i - index), i > index))
        return [names[i] for i in order if self.extractable(self.by_name[names[i]])][:3]

    def _examples(self) -> list[str]:
        return [*self.levels][:3] or [n for n, node in self.by_name.items() if self.extractable(node)][-3:]
