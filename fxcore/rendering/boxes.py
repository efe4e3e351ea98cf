"""Lay out boxes and arrows in layers from top to bottom.

A box is one layer below the lowest of its sources. Arrows to the next layer go straight down; longer ones go through
lanes to the right of the boxes, so that no arrow crosses a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Pixels. The font is monospace: a character of 11 px is about 6.7 px wide.
_CHARACTER = 6.7
_MARK_CHARACTER = 9
LINE = 14
PADDING = 8
GAP = 24
LAYER_GAP = 34
_LANE = 7


@dataclass
class Box:
    """A node to draw.

    Attributes:
        lines: lines of text, the name first.
        kind: CSS class, an fx opcode.
        mark: text beside the box, which also highlights it.
        sources: indices of the boxes that arrows come from, all before this one.
        size: width and height in pixels; by default those of the text.
        layer: index of the layer, from the top.
        x, y: upper left corner, in pixels.
        floor: lower edge of the layer.
    """

    lines: list[str]
    kind: str
    mark: str | None
    sources: list[int]
    size: tuple[float, float] | None = None
    layer: int = field(default=0, init=False)
    x: float = field(default=0.0, init=False)
    y: float = field(default=0.0, init=False)
    floor: float = field(default=0.0, init=False)

    @property
    def width(self) -> float:
        return self.size[0] if self.size else max(map(len, self.lines)) * _CHARACTER + 2 * PADDING

    @property
    def reach(self) -> float:
        """Width including the mark beside the box."""
        return self.width + (len(self.mark) * _MARK_CHARACTER + PADDING if self.mark else 0)

    @property
    def height(self) -> float:
        return self.size[1] if self.size else len(self.lines) * LINE + PADDING

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


Point = tuple[float, float]


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes, by index: a curve between two points, or straight lines through more."""

    source: int
    target: int
    points: list[Point]


def place(boxes: Sequence[Box]) -> tuple[list[Arrow], float, float]:
    """Set the position of each box; return the arrows, and the width and height of the drawing in pixels."""
    layers = _layers(boxes)
    right, bottom = _place(layers)
    edges = [(i, number) for number, target in enumerate(boxes) for i in target.sources]
    long = [(i, j) for i, j in edges if boxes[j].layer - boxes[i].layer > 1]
    lanes = _lanes([(boxes[i], boxes[j]) for i, j in long])
    start = right + GAP
    arrows = [Arrow(i, j, _down(boxes[i], boxes[j])) for i, j in edges if boxes[j].layer - boxes[i].layer == 1]
    arrows += [
        Arrow(i, j, _around(boxes[i], boxes[j], start + lane * _LANE)) for (i, j), lane in zip(long, lanes, strict=True)
    ]
    return arrows, right + GAP + (len(set(lanes)) * _LANE + GAP if lanes else 0), bottom


def _layers(boxes: Sequence[Box]) -> list[list[Box]]:
    """Return the boxes by layer, each layer sorted by the positions of the sources."""
    for box in boxes:
        box.layer = 1 + max((boxes[i].layer for i in box.sources), default=-1)
    # Parameters have no sources; they are placed above their users, not at the top.
    users: dict[int, list[Box]] = {}
    for box in boxes:
        for i in box.sources:
            users.setdefault(i, []).append(box)
    for i, box in enumerate(boxes):
        if box.kind == "get_attr" and i in users:
            box.layer = min(user.layer for user in users[i]) - 1
    layers: list[list[Box]] = [[] for _ in range(max((box.layer for box in boxes), default=-1) + 1)]
    for box in boxes:
        layers[box.layer].append(box)
    rank: dict[int, float] = {}
    for layer in layers:
        wanted = {id(b): sum(rank.get(id(boxes[i]), 0.0) for i in b.sources) / max(1, len(b.sources)) for b in layer}
        layer.sort(key=lambda b: wanted[id(b)])
        rank |= {id(box): place - (len(layer) - 1) / 2 for place, box in enumerate(layer)}
    return layers


def _place(layers: list[list[Box]]) -> tuple[float, float]:
    """Set the corner of each box; return the right and lower edges of the drawing."""
    # Ignore the mark of the last box, so that a chain of single boxes is aligned.
    widths = [sum(box.reach for box in layer[:-1]) + GAP * (len(layer) - 1) + layer[-1].width for layer in layers]
    marks = [layer[-1].reach - layer[-1].width for layer in layers]
    widest = max((width + 2 * mark for width, mark in zip(widths, marks, strict=True)), default=0.0)
    y = float(GAP)
    for layer, width in zip(layers, widths, strict=True):
        x = GAP + (widest - width) / 2
        floor = y + max(box.height for box in layer)
        for box in layer:
            box.x, box.y, box.floor = x, y, floor
            x += box.reach + GAP
        y = floor + LAYER_GAP
    return GAP + widest, y


def _lanes(edges: Sequence[tuple[Box, Box]]) -> list[int]:
    """Return a lane for each edge, so that edges in a lane do not overlap; the shortest edges get the nearest lanes."""
    lanes: list[int] = [0] * len(edges)
    taken: list[list[tuple[int, int]]] = []
    for i in sorted(range(len(edges)), key=lambda i: edges[i][1].layer - edges[i][0].layer):
        start, end = edges[i][0].layer, edges[i][1].layer
        lane = next((n for n, spans in enumerate(taken) if all(end <= s or e <= start for s, e in spans)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((start, end))
        lanes[i] = lane
    return lanes


def _down(source: Box, target: Box) -> list[Point]:
    return [(source.middle, source.y + source.height), (target.middle, target.y)]


def _around(source: Box, target: Box, lane: float) -> list[Point]:
    """Return a path from below the source through the lane to above the target, in the gaps between layers."""
    one, other = source.middle + 6, target.middle + 6
    out, into = source.floor + 8, target.y - 12
    return [(one, source.y + source.height), (one, out), (lane, out), (lane, into), (other, into), (other, target.y)]
