"""Render a graph as text or as a drawing.

SVGs are written without Graphviz. A box shows the node's name, its target, and the shape of its value; levels (of a
model) and keys (of an extractor) are highlighted. All labels are escaped, since they come from users' models.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from fxcore.errors import BadArgument
from fxcore.graph.model_graph import ModelGraph
from fxcore.graph.node_info import NodeInfo, target_name
from fxcore.rendering import modules
from fxcore.rendering.boxes import Box
from fxcore.rendering.svg import draw, printable
from fxcore.tensors import dtype_name
from fxcore.tracing.interpreter import require_graph
from fxcore.tracing.names import PATH, public_name

Format = Literal["table", "code", "dot", "svg", "mermaid", "layout"]
FORMATS: tuple[Format, ...] = get_args(Format)

_COLUMNS = ("opcode", "name", "target", "args", "kwargs", "shape", "dtype", "node")
_SHAPE = _COLUMNS.index("shape")
# Longer cells (DenseNet's lists) do not widen their column.
_WIDEST = 60
# torch.fx replaces the repr of a graph's nodes while it generates code, which is not thread-safe.
_CODE_LOCK = threading.Lock()


def render(
    graph: fx.Graph | fx.GraphModule | ModelGraph,
    format: Format,
    depth: int | None = None,
    opened: Collection[str] | None = None,
    title: str | None = None,
) -> str:
    """Write ``graph`` in one of :data:`FORMATS`.

    Args:
        graph: a model's graph, whose levels are highlighted; or the graph of an extractor or any graph module, whose
            outputs are highlighted.
        format: ``table``: torch.fx's opcode/name/target/args/kwargs table, with shapes and dtypes if the graph is
            annotated (or torch's ``ShapeProp`` has run on it), and torchvision's names in the last column;
            ``code``: the Python that torch.fx generates; ``dot``, ``svg``, ``mermaid``: drawings; ``layout``:
            positions of nested boxes as JSON, see :func:`fxcore.rendering.modules.write`.
        depth: draw modules whose path has this many parts as one box each: 1 for ``layer1``, 2 for ``layer1.0``. None
            draws all nodes.
        opened: the modules that the layout shows with their parts; all others are a single box.
        title: title of a drawing, except of Mermaid's, which have none; by default the model's name, or "graph".

    Raises:
        NotAGraph: ``graph`` is not a graph; for example, it is a module that was not traced.
        BadArgument: the format is unknown, the depth is below 1, or ``opened`` is given with a depth or another format.

    >>> from fxcore import model_graph
    >>> print(render(model_graph("resnet18"), "mermaid", depth=1).splitlines()[6])
      n5["C2: layer1<br/>14 nodes<br/>[N, 64, 56, 56]"]
    """
    if format not in FORMATS:
        raise BadArgument(f"there is no graph format {format!r}; there are {', '.join(FORMATS)}")
    if depth is not None and not (isinstance(depth, int) and depth >= 1):
        raise BadArgument(f"a depth is a whole number, at least 1, not {depth!r:.100}")
    if opened is not None and (format != "layout" or depth is not None):
        raise BadArgument("opened is for the format layout, without a depth")
    original = graph
    if isinstance(graph, ModelGraph):
        marks, name, nodes = {level.node: name for name, level in graph.levels.items()}, graph.entry.name, graph.graph
    else:
        if not isinstance(graph, fx.Graph):
            require_graph(graph)
            graph = graph.graph
        marks, name, nodes = _keys(graph), "graph", graph
    title = name if title is None else title
    if format in _TEXTS:
        return _TEXTS[format](nodes)
    if format == "layout":
        label = _with_costs(marks, original.nodes if isinstance(original, ModelGraph) else [])
        return modules.write(nodes, title, _is_open(depth, opened), label)
    return _DRAWINGS[format](_boxes(nodes, marks, depth), title)


def _keys(graph: fx.Graph) -> dict[str, str]:
    """Return the output keys by node name, for a graph that returns a dictionary."""
    marks: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "output" and isinstance(node.args[0], dict):
            for key, value in node.args[0].items():
                if isinstance(value, fx.Node):
                    name = public_name(value)
                    marks[name] = f"{marks[name]}, {key}" if name in marks else str(key)
    return marks


def _table(graph: fx.Graph) -> str:
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for n in graph.nodes:
        cells = (n.op, n.name, target_name(n), _text(n.args), _text(n.kwargs))
        rows.append((*cells, _shape(n), _dtype(n), n.meta.get(PATH, "")))
    if not any(row[_SHAPE] for row in rows[1:]):
        rows = [(*row[:_SHAPE], row[-1]) for row in rows]
    widths = [max(len(cell) for row in rows if len(cell := row[i]) <= _WIDEST) for i in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def _text(value: Any) -> str:
    """Return an argument as torch.fx prints it, without the memory addresses in the reprs of functions."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _code(graph: fx.Graph) -> str:
    with _CODE_LOCK:
        return graph.python_code("self").src.lstrip("\n")


def _boxes(graph: fx.Graph, marks: dict[str, str], depth: int | None) -> list[Box]:
    """Return a box for each node except the output, or for each module at ``depth``, in execution order."""
    numbers: dict[fx.Node, int] = {}
    boxes: list[Box] = []
    for module, group in modules.runs((n for n in graph.nodes if n.op != "output"), depth):
        sources = [numbers[s] for n in group for s in n.all_input_nodes if s in numbers]
        lines, mark = _label(group, module, marks)
        numbers |= dict.fromkeys(group, len(boxes))
        boxes.append(Box(lines, "call_module" if module else group[-1].op, mark, list(dict.fromkeys(sources))))
    return boxes


def _label(group: Sequence[fx.Node], module: str, marks: dict[str, str]) -> tuple[list[str], str | None]:
    """Return text and mark of the box for a module, or for a single node if ``module`` is empty."""
    last = group[-1]
    what = (f"{len(group)} nodes" if len(group) > 1 else "1 node") if module else _what(last, last.graph)
    lines = [printable(line) for line in (module or public_name(last), what, _shape(last)) if line]
    return lines, ", ".join(marks[public_name(n)] for n in group if public_name(n) in marks) or None


def _with_costs(marks: dict[str, str], known: Sequence[NodeInfo]) -> modules.Label:
    """Return labels whose last line has the stride of the box's output and the FLOPs of its nodes, if ``known``."""
    by_name = {info.fx_name: info for info in known}

    def label(group: Sequence[fx.Node], module: str) -> tuple[list[str], str | None, bool]:
        lines, mark = _label(group, module, marks)
        infos = [by_name[node.name] for node in group if node.name in by_name]
        stride = infos[-1].stride if infos else None
        flops = sum(info.flops for info in infos)
        costs = [f"stride {stride}" if stride else "", f"{_scaled(flops)}FLOPs" if flops else ""]
        mapped = bool(infos) and infos[-1].extractable and (infos[-1].stride or infos[-1].tokens) is not None
        return [*lines, ", ".join(filter(None, costs))] if any(costs) else lines, mark, mapped

    return label


def _scaled(number: float) -> str:
    """Format ``number`` with three digits and an SI prefix."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            share = number / size
            return f"{share:.0f} {prefix}" if share >= 100 else f"{share:.3g} {prefix}"
    return f"{number:g} "


def _is_open(depth: int | None, opened: Collection[str] | None) -> modules.IsOpen:
    if opened is not None:
        return frozenset(opened).__contains__
    return lambda module: depth is None or module.count(".") + 1 < depth


def _what(node: fx.Node, graph: fx.Graph) -> str:
    """Describe a node's target; include a module's path if it differs from the node's name (ViT's ``ln`` calls
    ``ln_1``)."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"get {node.target}"
    if node.op == "call_method":
        return f".{node.target}()"
    if node.op == "call_function":
        return f"{target_name(node)}()"
    target = str(node.target)
    try:
        kind = type(graph.owning_module.get_submodule(target)).__name__ if graph.owning_module is not None else ""
    except AttributeError:
        kind = ""
    return " ".join(part for part in (kind, target if target != public_name(node) or not kind else "") if part)


def _tensor(node: fx.Node) -> Any:
    """Return an object with the shape and dtype of the node's value, or None if it is not a tensor."""
    value = node.meta.get("value", node.meta.get("tensor_meta"))
    return value if isinstance(value, (Tensor, TensorMetadata)) else None


def _dtype(node: fx.Node) -> str:
    tensor = _tensor(node)
    return "" if tensor is None else dtype_name(tensor.dtype)


def _shape(node: fx.Node) -> str:
    tensor = _tensor(node)
    if tensor is None:
        return ""
    shape = [str(size) for size in tensor.shape]
    rows = node.meta.get("rows")
    if rows and shape:
        shape[0] = "N" if rows == 1 else f"{rows}N"
    return "[" + ", ".join(shape) + "]"


_FILL = {
    "placeholder": "#d6f5d6",
    "call_module": "#dce9f9",
    "call_function": "#f4f4f4",
    "call_method": "#f4f4f4",
    "get_attr": "#f3e6f7",
}
_MARKED = "#ffd166"


def _dot(boxes: list[Box], title: str) -> str:
    lines = [
        f'digraph "{_dot_text([title])}" {{',
        '  node [shape=box, style="rounded,filled", fontname="monospace", fontsize=10];',
    ]
    for i, box in enumerate(boxes):
        look = f'fillcolor="{_MARKED}", penwidth=2' if box.mark else f'fillcolor="{_FILL[box.kind]}"'
        lines.append(f'  n{i} [label="{_dot_text(_labels(box))}", {look}];')
    lines += [f"  n{source} -> n{i};" for i, source in _edges(boxes)]
    return "\n".join([*lines, "}", ""])


def _dot_text(lines: Iterable[str]) -> str:
    """Escape lines for a quoted DOT string, in which ampersands start HTML entities."""
    return "\\n".join(line.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def _mermaid(boxes: list[Box], title: str) -> str:
    lines = ["flowchart TD"]
    lines += [f'  n{i}["{_mermaid_text(_labels(box))}"]' for i, box in enumerate(boxes)]
    lines += [f"  n{source} --> n{i}" for i, source in _edges(boxes)]
    if marked := ",".join(f"n{i}" for i, box in enumerate(boxes) if box.mark):
        lines += [f"  classDef marked fill:{_MARKED},stroke:#333,stroke-width:2px", f"  class {marked} marked"]
    return "\n".join([*lines, ""])


def _mermaid_text(lines: Iterable[str]) -> str:
    """Escape special characters, including those of Markdown and HTML, as Mermaid's ``#code;``."""
    return "<br/>".join(re.sub(r"[^\w .,:()\[\]-]", lambda m: f"#{ord(m[0])};", line) for line in lines)


def _labels(box: Box) -> list[str]:
    return [f"{printable(box.mark)}: {box.lines[0]}", *box.lines[1:]] if box.mark else box.lines


def _edges(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    return [(i, source) for i, box in enumerate(boxes) for source in box.sources]


_TEXTS: dict[str, Callable[[fx.Graph], str]] = {"table": _table, "code": _code}
_DRAWINGS: dict[str, Callable[[list[Box], str], str]] = {"dot": _dot, "svg": draw, "mermaid": _mermaid}
