"""Draw boxes and arrows as an SVG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape

from fxcore.rendering.boxes import LINE, PADDING, Box, Point, place

_STYLE = """
svg { font: 11px ui-monospace, Menlo, Consolas, monospace }
rect { fill: #f4f4f4; stroke: #999; rx: 5px } .paper { fill: #fff; stroke: none; rx: 0 }
.placeholder rect { fill: #d6f5d6 } .call_module rect { fill: #dce9f9 } .get_attr rect { fill: #f3e6f7 }
.marked rect { fill: #ffd166; stroke: #333; stroke-width: 2 } .mark { font-weight: bold; font-size: 14px }
text { fill: #222 } .name { font-weight: bold }
path { fill: none; stroke: #888; stroke-width: 1.2; marker-end: url(#arrow) }
""".strip()

# Control characters, and code points that XML cannot contain.
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """Substitute a replacement character for each character in ``text`` that XML cannot contain."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def draw(boxes: Sequence[Box], title: str) -> str:
    """Lay out ``boxes``, in place, and return an SVG document."""
    arrows, width, height = place(boxes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(printable(title))}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#888;stroke:none;marker-end:none"/></marker></defs>',
        '<rect class="paper" width="100%" height="100%"/>',
    ]
    parts += [_curve(arrow.points) if len(arrow.points) == 2 else _lines(arrow.points) for arrow in arrows]
    parts += [_box(box) for box in boxes]
    return "\n".join([*parts, "</svg>", ""])


def _curve(points: Sequence[Point]) -> str:
    (one, start), (other, end) = points
    bend = (start + end) / 2
    return f'<path d="M{one:.0f} {start:.0f}C{one:.0f} {bend:.0f} {other:.0f} {bend:.0f} {other:.0f} {end:.0f}"/>'


def _lines(points: Sequence[Point]) -> str:
    """Return a path of alternately vertical and horizontal lines."""
    (x, y), *others = points
    steps = "".join(f"V{y:.0f}" if i % 2 == 0 else f"H{x:.0f}" for i, (x, y) in enumerate(others))
    return f'<path d="M{x:.0f} {y:.0f}{steps}"/>'


def _box(box: Box) -> str:
    lines = [f'<g class="{escape(box.kind)}{" marked" if box.mark else ""}">']
    lines.append(f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}"/>')
    for i, line in enumerate(box.lines):
        name = ' class="name"' if i == 0 else ""
        lines.append(f'<text x="{box.x + PADDING:.0f}" y="{box.y + (i + 1) * LINE:.0f}"{name}>{escape(line)}</text>')
    if box.mark:
        x, y = box.x + box.width + PADDING, box.y + box.height / 2 + 5
        lines.append(f'<text class="mark" x="{x:.0f}" y="{y:.0f}">{escape(printable(box.mark))}</text>')
    return "".join([*lines, "</g>"])
