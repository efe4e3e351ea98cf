"""Lay out a graph's modules as nested boxes: an open module is a frame around its parts, a closed module is a box.

Arrows enter and leave a frame in the middle of its upper and lower edges.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxcore.rendering.boxes import GAP, PADDING, Arrow, Box, place
from fxcore.tracing.names import PATH, public_name

#: returns whether the module with a path is shown with its parts
IsOpen = Callable[[str], bool]
#: takes nodes, and the path of their module or "" for a single node; returns the text of the box, its mark, and whether
#: its output is a map that a picture can show
Label = Callable[[Sequence[fx.Node], str], tuple[list[str], str | None, bool]]


PICTURE = 56
"""Side in pixels of the square at the right end of a box that is reserved for a picture of its output."""


@dataclass
class _Level:
    """The contents of a frame, or of the whole drawing, with the upper edge at y = 0.

    The first and the last box have no size; arrows enter and leave there.
    """

    boxes: list[Box]
    #: for each box between the two, its name, its nodes, and its contents if it is a frame
    names: list[str]
    groups: list[list[fx.Node]]
    insides: list[_Level | None]
    arrows: list[Arrow]
    width: float
    height: float
    pictured: set[int] = field(default_factory=set)


def write(graph: fx.Graph, title: str, is_open: IsOpen, label: Label) -> str:
    """Write the layout as JSON: ``{"model", "width", "height", "boxes", "edges"}``, in pixels.

    A box has ``name`` (a module's path or a node's name), ``node`` (its last node), ``nodes`` (number of nodes),
    ``kind`` (an fx opcode; ``module``; or ``frame`` for an open module, which precedes its contents), ``lines`` (text:
    the name relative to its frame first, in a model's graph stride and FLOPs last), ``mark`` (level or key),
    ``picture`` (whether a square at its right end is reserved for one), ``x``, ``y``, ``width``, ``height``. An edge
    has ``source`` and ``target``, indices of boxes, and ``points``: a curve between two, or straight lines through
    more. Edges into and out of a frame end and start at the frame.
    """
    level = _level([node for node in graph.nodes if node.op != "output"], 1, is_open, label)
    boxes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    _flatten(level, 0.0, GAP, None, boxes, edges)
    size = {"width": round(level.width, 1), "height": round(level.height + 2 * GAP, 1)}
    return json.dumps({"model": title, **size, "boxes": boxes, "edges": edges}, separators=(",", ":"))


def module_of(node: fx.Node, depth: int) -> str:
    """Return the path, with ``depth`` parts, of the module that contains a node; empty if there is none."""
    parts = _parts(node)
    return ".".join(parts[:depth]) if len(parts) > depth else ""


def _parts(node: fx.Node) -> list[str]:
    """Return the parts of the node's path; a parameter that the graph reads itself has the path of its first user."""
    if node.op == "get_attr" and PATH not in node.meta and node.users:
        return [*_parts(next(iter(node.users)))[:-1], node.name]
    return public_name(node).split(".")


def runs(nodes: Iterable[fx.Node], depth: int | None) -> Iterator[tuple[str, list[fx.Node]]]:
    """Group consecutive nodes of a module whose path has ``depth`` parts; other nodes are groups of one.

    A module that is called again later gets another group, so that there are no cycles between groups.

    Yields:
        The path of the module, or an empty string, and the nodes.
    """
    for module, run in itertools.groupby(nodes, lambda node: "" if depth is None else module_of(node, depth)):
        if module:
            yield module, list(run)
        else:
            yield from (("", [node]) for node in run)


def _level(nodes: Sequence[fx.Node], depth: int, is_open: IsOpen, label: Label) -> _Level:
    here = set(nodes)
    number: dict[fx.Node, int] = {}
    level = _Level([Box([], "entry", None, [], (0.0, 0.0))], [], [], [], [], 0.0, 0.0)
    hidden: set[tuple[int, int]] = set()  # edges that keep boxes below the entry and above the exit; not drawn
    leaving: list[int] = []
    for module, group in runs(nodes, depth):
        this = len(level.boxes)
        inside = _level(group, depth + 1, is_open, label) if module and is_open(module) else None
        lines, mark, mapped = label(group, module)
        # Within a frame, show only the rest of the path.
        lines[0] = ".".join(lines[0].split(".")[depth - 1 :]) or lines[0]
        kind = "frame" if inside else "module" if module else group[-1].op
        box = Box(lines, kind, None if inside else mark, [])
        if inside:
            box.size = (max(inside.width, box.width), inside.height)
        elif mapped:
            box.size = (box.width + PICTURE + PADDING, max(box.height, PICTURE + PADDING))
            level.pictured.add(this)
        own = set(group)
        sources = (source for node in group for source in node.all_input_nodes if source not in own)
        box.sources = list(dict.fromkeys(number.get(source, 0) for source in sources))
        if not box.sources:
            box.sources = [0]
            hidden.add((0, this))
        number |= dict.fromkeys(group, this)
        if any(user not in here and user.op != "output" for node in group for user in node.users):
            leaving.append(this)
        level.boxes.append(box)
        level.names.append(module or public_name(group[-1]))
        level.groups.append(group)
        level.insides.append(inside)
    used = {source for box in level.boxes for source in box.sources}
    ends = [i for i in range(len(level.boxes)) if i not in used and i not in leaving]
    hidden |= {(i, len(level.boxes)) for i in ends}
    level.boxes.append(Box([], "exit", None, leaving + ends, (0.0, 0.0)))
    arrows, level.width, _ = place(level.boxes)
    top, middle = level.boxes[0].y, level.boxes[0].x
    level.height = level.boxes[-1].y - top
    # Lanes are on the right. Equal space on the left keeps the entry and the exit in the middle of the frame.
    left = max(0.0, level.width - 2 * middle)
    level.width += left
    for box in level.boxes:
        box.x, box.y = box.x + left, box.y - top
    level.arrows = [
        Arrow(a.source, a.target, [(x + left, y - top) for x, y in a.points])
        for a in arrows
        if (a.source, a.target) not in hidden
    ]
    return level


def _flatten(
    level: _Level, x: float, y: float, frame: int | None, boxes: list[dict[str, Any]], edges: list[dict[str, Any]]
) -> None:
    """Add the contents of ``level``, whose corner is at ``x, y``, to ``boxes`` and ``edges``."""
    number: list[int | None] = [frame]
    shown = zip(level.boxes[1:-1], level.names, level.groups, level.insides, strict=True)
    for index, (box, name, group, inside) in enumerate(shown, 1):
        number.append(len(boxes))
        corner = (round(x + box.x, 1), round(y + box.y, 1))
        boxes.append(
            {"name": name, "node": public_name(group[-1]), "nodes": len(group), "kind": box.kind, "lines": box.lines}
            | {"mark": box.mark, "picture": index in level.pictured, "x": corner[0], "y": corner[1]}
            | {"width": round(box.width, 1), "height": round(box.height, 1)}
        )
        if inside:
            # Centre contents that are narrower than the frame's title.
            _flatten(inside, corner[0] + (box.width - inside.width) / 2, corner[1], number[-1], boxes, edges)
    number.append(frame)
    for arrow in level.arrows:
        points = [(round(x + px, 1), round(y + py, 1)) for px, py in arrow.points]
        edges.append({"source": number[arrow.source], "target": number[arrow.target], "points": points})
