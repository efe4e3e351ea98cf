"""Graphs as text and drawings: complete, well-formed, and safe whatever the labels are."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from fxcore import build_extractor, get_model, load_model, model_graph
from fxcore.rendering.render import FORMATS, Format, render
from fxcore.tracing.names import PATH

SVG = "{http://www.w3.org/2000/svg}"
MODELS = ["vit_b_16", "densenet121"]


@pytest.fixture(scope="module")
def extractor_graph() -> fx.Graph:
    """resnet18 to C4, with three keys on two nodes."""
    graph = model_graph("resnet18")
    model = load_model(get_model("resnet18"), "random")
    keys = graph.resolve({"layer1": "first", "C2": "again", "C4": "C4"})
    return build_extractor(graph, model, keys).module.graph


def hostile_graph() -> fx.Graph:
    """A graph whose names try to leave the quotes, tags and lines that they are put in."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta[PATH] = 'x"]; <script>alert("1")</script> &amp; \\" `md` #35; \n\x00\x1b end'
    y = graph.call_method("relu", (x,))
    y.meta[PATH] = "</text></svg> --> -->"
    graph.output({'key"<b>\\': y})
    return graph


@pytest.mark.parametrize("model", MODELS)
def test_table_has_a_row_for_each_node_with_both_of_its_names(model: str) -> None:
    graph = model_graph(model)
    header, rule, *rows = render(graph, "table").splitlines()
    assert header.split() == ["opcode", "name", "target", "args", "kwargs", "shape", "dtype", "node"]
    assert set(rule) == {"-", " "}
    nodes = list(graph.graph.nodes)
    assert len(rows) == len(nodes)
    for row, node in zip(rows, nodes, strict=True):
        assert row.split()[:2] == [node.op, node.name]
        assert row.endswith(node.meta.get(PATH, ("}", "float32")))
        value = node.meta.get("value")
        if isinstance(value, Tensor) and node.meta["rows"] == 1:
            shape = ", ".join(["N", *map(str, value.shape[1:])])
            assert f"  [{shape}]  " in row
            assert f"  {str(value.dtype).removeprefix('torch.')}" in row
    assert "0x" not in "".join(rows)  # no memory addresses


def test_table_writes_arguments_as_torch_fx_does() -> None:
    graph = model_graph("vit_b_16").graph
    rows = render(graph, "table").splitlines()[2:]
    for row, node in zip(rows, graph.nodes, strict=True):
        assert f"  {node.args!r}  " in row
        assert f"  {node.kwargs!r}" in row


def test_table_has_no_empty_columns_and_shows_what_shape_prop_found() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    plain = render(module.graph, "table").splitlines()[0].split()
    assert plain == ["opcode", "name", "target", "args", "kwargs", "node"]
    ShapeProp(module).propagate(torch.zeros(3, 4))
    header, _, *rows = render(module.graph, "table").splitlines()
    assert "shape" in header
    assert [row.split("{}")[-1].split("  ")[-2:] for row in rows[:2]] == [["[3, 4]", "float32"], ["[3, 2]", "float32"]]


def test_code_is_what_torch_fx_generates() -> None:
    graph = model_graph("vit_b_16")
    code = render(graph, "code")
    assert code == fx.GraphModule(graph.traced_modules[""], graph.graph).code.lstrip("\n")
    compile(code, "vit_b_16", "exec")


def test_code_written_by_many_threads_leaves_the_graph_as_it_was() -> None:
    graph = model_graph("vit_b_16")
    expected = render(graph, "code")
    responses: list[str] = []

    def write() -> None:
        responses.extend(render(graph, "code") for _ in range(20))

    threads = [threading.Thread(target=write) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert set(responses) == {expected}
    assert all(repr(node) == node.name for node in graph.graph.nodes)


def drawn(svg: str) -> tuple[ET.Element, list[ET.Element]]:
    root = ET.fromstring(svg)
    return root, root.findall(f"{SVG}g")


def marks(groups: list[ET.Element]) -> dict[str | None, str | None]:
    """The texts beside the highlighted boxes, by name."""
    marked = [group.findall(f"{SVG}text") for group in groups if "marked" in group.attrib["class"]]
    return {texts[0].text: texts[-1].text for texts in marked}


@pytest.mark.parametrize("model", MODELS)
def test_svg_shows_each_node_with_what_it_runs_and_its_shape(model: str) -> None:
    graph = model_graph(model)
    root, groups = drawn(render(graph, "svg"))
    names = [group.findtext(f"{SVG}text") for group in groups]
    assert names == [node.name for node in graph.nodes]
    for group, node in zip(groups, graph.nodes, strict=True):
        texts = [text.text or "" for text in group.findall(f"{SVG}text")]
        if node.module_type:
            assert node.module_type.rsplit(".", 1)[1] in texts[1]
        if node.shape and node.rows_per_image == 1 and node.shape[0] is None:
            assert "[" + ", ".join(["N", *map(str, node.shape[1:])]) + "]" in texts
    edges = sum(len(node.args) for node in graph.nodes)
    assert len(root.findall(f"{SVG}path")) == edges


@pytest.mark.parametrize("model", MODELS)
def test_svg_boxes_lie_apart_inside_the_drawing(model: str) -> None:
    root, groups = drawn(render(model_graph(model), "svg"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    places = []
    for group in groups:
        rect = group.find(f"{SVG}rect")
        assert rect is not None
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        places.append((y, x, x + w, y + h))
    places.sort()
    for upper, lower in itertools.pairwise(places):
        assert lower[0] >= upper[3] or lower[1] > upper[2], "two boxes overlap"


def test_svg_arrows_lead_downwards_and_long_ones_pass_no_box() -> None:
    root, groups = drawn(render(model_graph("densenet121"), "svg"))
    rects = [rect.attrib for group in groups if (rect := group.find(f"{SVG}rect")) is not None]
    right = max(float(r["x"]) + float(r["width"]) for r in rects)
    lanes: dict[float, list[tuple[float, float]]] = {}
    for path in root.findall(f"{SVG}path"):
        if "V" not in path.attrib["d"]:
            continue
        _, top, _, lane, bottom, _, end = map(float, re.findall(r"[-\d.]+", path.attrib["d"]))
        assert top < bottom < end
        assert lane > right
        lanes.setdefault(lane, []).append((top, bottom))
    for spans in lanes.values():
        for upper, lower in itertools.pairwise(sorted(spans)):
            assert lower[0] > upper[1], "two arrows lie on each other"


def test_levels_are_highlighted() -> None:
    graph = model_graph("resnet18")
    _, groups = drawn(render(graph, "svg"))
    marked = {mark: name for name, mark in marks(groups).items()}
    assert marked == {name: level.node for name, level in graph.levels.items()}
    assert marked["C4"] == "layer3.1.relu_1"
    dot = [line for line in render(graph, "dot").splitlines() if "penwidth=2" in line]
    assert [re.search(r'label="(C\d): ([\w.]+)\\n', line).groups() for line in dot] == list(marked.items())  # type: ignore[union-attr]
    mermaid = render(graph, "mermaid")
    assert len(re.search(r"class (n\d+(?:,n\d+)*) marked", mermaid)[1].split(",")) == 5  # type: ignore[index]
    assert '["C4: layer3.1.relu_1<br/>ReLU layer3.1.relu<br/>[N, 256, 14, 14]"]' in mermaid


def test_an_extractors_graph_shows_its_keys(extractor_graph: fx.Graph) -> None:
    _, groups = drawn(render(extractor_graph, "svg"))
    assert marks(groups) == {"layer1.1.relu_1": "first, again", "layer3.1.relu_1": "C4"}
    assert "C4: layer3.1.relu_1" in render(extractor_graph, "dot")
    assert "return {'first': layer1_1_relu_1, 'again': layer1_1_relu_1, 'C4':" in render(extractor_graph, "code")
    assert "layer4" not in render(extractor_graph, "table")


@pytest.mark.parametrize("model", ["vit_b_16", None])
def test_dot_and_mermaid_hold_nothing_but_nodes_and_edges(model: str | None) -> None:
    graph = model_graph(model) if model else hostile_graph()
    plain = graph if isinstance(graph, fx.Graph) else graph.graph
    nodes = sum(node.op != "output" for node in plain.nodes)
    edges = sum(len(node.all_input_nodes) for node in plain.nodes if node.op != "output")
    for format, node, edge, frame in (
        (
            "dot",
            r'  n\d+ \[label="(?:[^"\\\n]|\\["\\n])*", fillcolor="#\w+"(?:, penwidth=2)?\];',
            r"  n\d+ -> n\d+;",
            3,
        ),
        ("mermaid", r'  n\d+\["(?:[\w .,:()\[\]-]|#\d+;|<br/>)*"\]', r"  n\d+ --> n\d+", 1),
    ):
        lines = render(graph, format).splitlines()  # type: ignore[arg-type]
        assert sum(bool(re.fullmatch(node, line)) for line in lines) == nodes
        assert sum(bool(re.fullmatch(edge, line)) for line in lines) == edges
        styles = sum("marked" in line for line in lines if line.startswith("  class"))
        assert len(lines) == nodes + edges + frame + styles


def test_hostile_labels_stay_text() -> None:
    graph = hostile_graph()
    root, groups = drawn(render(graph, "svg"))
    assert len(groups) == 2
    assert (
        groups[0].findtext(f"{SVG}text")
        == 'x"]; <script>alert("1")</script> &amp; \\" `md` #35; \ufffd\ufffd\ufffd end'
    )
    assert [text.text for text in groups[1].findall(f"{SVG}text")][-1] == 'key"<b>\\'
    assert not root.findall(f".//{SVG}script")
    assert '&amp;amp; \\\\\\" `md`' in render(graph, "dot")  # a literal &amp;, a backslash, a quote
    assert "<script" not in render(graph, "mermaid")


def test_shapes_say_what_grows_with_the_batch() -> None:
    swin = render(model_graph("swin_t"), "mermaid")
    assert "[N, 56, 56, 96]" in swin
    vit = render(model_graph("vit_b_16"), "mermaid")
    assert "encoder.encoder_pos_embedding<br/>get encoder.pos_embedding<br/>[1, 197, 768]" in vit


def test_a_graph_without_annotations_can_be_drawn() -> None:
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.ReLU())).graph
    texts = {format: render(graph, format) for format in FORMATS}
    assert all("ReLU" in texts[format] for format in ("dot", "svg", "mermaid"))
    assert all("_1" in texts[format] for format in ("table", "code"))
    assert drawn(render(fx.Graph(), "svg"))[1] == []


@pytest.mark.parametrize("format", ["dot", "svg", "mermaid"])
def test_drawings_collapse_by_module(format: Format) -> None:
    """A box for each module of that depth, with its edges in and out; one more level shows the blocks."""
    graph = model_graph("resnet18")
    one, two, all_nodes = (render(graph, format, depth) for depth in (1, 2, None))
    edges = {"dot": " -> ", "mermaid": " --> ", "svg": "<path "}[format]
    assert one.count(edges) < two.count(edges) < all_nodes.count(edges)
    assert "layer1.0" not in one
    assert "layer1.0" in two
    assert "layer1.0.conv1" not in two
    assert "14 nodes" in one
    if format == "dot":
        assert one.count(edges) == 11
        assert two.count(edges) == 15
    with pytest.raises(ValueError, match="at least 1"):
        render(graph, format, 0)
