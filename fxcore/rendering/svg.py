"""Boxes and arrows → an SVG, laid out in layers from top to bottom.

A box lies one layer below the lowest of its sources. Arrows to the next layer are drawn straight down; longer ones run
through lanes to the right of the boxes, so that none crosses a box.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# Pixels. The font is monospace: a character of 11 px is about 6.7 px wide.
_CHARACTER = 6.7
_MARK_CHARACTER = 9
_LINE = 14
_PADDING = 8
_GAP = 24
_LAYER_GAP = 34
_LANE = 7

_STYLE = """
svg { font: 11px ui-monospace, Menlo, Consolas, monospace }
rect { fill: #f4f4f4; stroke: #999; rx: 5px } .paper { fill: #fff; stroke: none; rx: 0 }
.placeholder rect { fill: #d6f5d6 } .call_module rect { fill: #dce9f9 } .get_attr rect { fill: #f3e6f7 }
.marked rect { fill: #ffd166; stroke: #333; stroke-width: 2 } .mark { font-weight: bold; font-size: 14px }
text { fill: #222 } .name { font-weight: bold }
path { fill: none; stroke: #888; stroke-width: 1.2; marker-end: url(#arrow) }
""".strip()


@dataclass
class Box:
    """A node to draw.

    Attributes:
        lines: what is written in it, the name first.
        kind: its CSS class, an fx opcode.
        mark: text beside it, which also highlights it.
        sources: the boxes that arrows come from, by index; all come before this one.
    """

    lines: list[str]
    kind: str
    mark: str | None
    sources: list[int]
    layer: int = field(default=0, init=False)
    x: float = field(default=0.0, init=False)
    y: float = field(default=0.0, init=False)
    #: lower end of the layer, below every box of it
    floor: float = field(default=0.0, init=False)

    @property
    def width(self) -> float:
        return max(map(len, self.lines)) * _CHARACTER + 2 * _PADDING

    @property
    def reach(self) -> float:
        """Width with the mark beside the box."""
        return self.width + (len(self.mark) * _MARK_CHARACTER + _PADDING if self.mark else 0)

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + _PADDING

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


# Control characters and the code points that XML cannot hold.
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """``text`` with a replacement character for every character that no drawing can hold."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def draw(boxes: Sequence[Box], title: str) -> str:
    """An SVG document; boxes are given their places."""
    layers = _layers(boxes)
    right, bottom = _place(layers)
    edges = [(boxes[i], target) for target in boxes for i in target.sources]
    long = [(source, target) for source, target in edges if target.layer - source.layer > 1]
    lanes = _lanes(long)
    lane_start = right + _GAP
    width = lane_start + (max(lanes, default=-1) + 1) * _LANE + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom:.0f}" '
        f'viewBox="0 0 {width:.0f} {bottom:.0f}">',
        f"<title>{escape(printable(title))}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#888;stroke:none;marker-end:none"/></marker></defs>',
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    parts += [_down(source, target) for source, target in edges if target.layer - source.layer == 1]
    parts += [_around(*edge, lane_start + lane * _LANE) for edge, lane in zip(long, lanes, strict=True)]
    parts += [_box(box) for box in boxes]
    return "\n".join([*parts, "</svg>", ""])


def _layers(boxes: Sequence[Box]) -> list[list[Box]]:
    """Boxes by layer, each layer ordered by where its arrows come from."""
    for box in boxes:
        box.layer = 1 + max((boxes[i].layer for i in box.sources), default=-1)
    # Parameters have no sources; they belong beside what uses them, not at the top.
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
    """Give each box its corner; the right and the lower end of them all."""
    widths = [sum(box.reach for box in layer) + _GAP * (len(layer) - 1) for layer in layers]
    widest = max(widths, default=0.0)
    y = float(_GAP)
    for layer, width in zip(layers, widths, strict=True):
        x = _GAP + (widest - width) / 2
        floor = y + max(box.height for box in layer)
        for box in layer:
            box.x, box.y, box.floor = x, y, floor
            x += box.reach + _GAP
        y = floor + _LAYER_GAP
    return _GAP + widest, y


def _lanes(edges: Sequence[tuple[Box, Box]]) -> list[int]:
    """A lane for each edge, so that no two in one lane overlap; the shortest edges get the nearest."""
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


def _down(source: Box, target: Box) -> str:
    start, end = source.y + source.height, target.y
    bend = (start + end) / 2
    one, other = source.middle, target.middle
    return f'<path d="M{one:.0f} {start:.0f}C{one:.0f} {bend:.0f} {other:.0f} {bend:.0f} {other:.0f} {end:.0f}"/>'


def _around(source: Box, target: Box, lane: float) -> str:
    """Out below the source, through the lane, in above the target: the gaps between layers are free of boxes."""
    out, into = source.floor + 8, target.y - 12
    return (
        f'<path d="M{source.middle + 6:.0f} {source.y + source.height:.0f}V{out:.0f}H{lane:.0f}V{into:.0f}'
        f'H{target.middle + 6:.0f}V{target.y:.0f}"/>'
    )


def _box(box: Box) -> str:
    lines = [f'<g class="{escape(box.kind)}{" marked" if box.mark else ""}">']
    lines.append(f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}"/>')
    for i, line in enumerate(box.lines):
        name = ' class="name"' if i == 0 else ""
        lines.append(f'<text x="{box.x + _PADDING:.0f}" y="{box.y + (i + 1) * _LINE:.0f}"{name}>{escape(line)}</text>')
    if box.mark:
        x, y = box.x + box.width + _PADDING, box.y + box.height / 2 + 5
        lines.append(f'<text class="mark" x="{x:.0f}" y="{y:.0f}">{escape(printable(box.mark))}</text>')
    return "".join([*lines, "</g>"])
