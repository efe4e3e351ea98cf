"""The layout of boxes within boxes: what contains what, and what lies where."""

import json

import pytest

from fxcore import model_graph
from fxcore.rendering.render import render


def layout(model, **options):
    return json.loads(render(model_graph(model), "layout", **options))


def contains(outer, inner):
    return (
        outer["x"] <= inner["x"]
        and outer["y"] <= inner["y"]
        and inner["x"] + inner["width"] <= outer["x"] + outer["width"]
        and inner["y"] + inner["height"] <= outer["y"] + outer["height"]
    )


def apart(one, other):
    return (
        one["x"] + one["width"] <= other["x"]
        or other["x"] + other["width"] <= one["x"]
        or one["y"] + one["height"] <= other["y"]
        or other["y"] + other["height"] <= one["y"]
    )


def _layer3_flops():
    """Of resnet18's four convolutions of 3 x 3 and its shortcut, at 14 x 14 positions."""
    return 2 * 14 * 14 * 256 * (9 * 128 + 3 * 9 * 256 + 128)


def test_modules_are_boxes_until_they_are_opened():
    graph = model_graph("resnet18")
    closed = layout("resnet18", opened=())
    names = [box["name"] for box in closed["boxes"]]
    assert names == list(dict.fromkeys(name.split(".")[0] for name in graph.eval_nodes))
    box = closed["boxes"][names.index("layer3")]
    assert (box["kind"], box["node"], box["mark"]) == ("module", graph.resolve(["layer3"])["layer3"], "C4")
    convolution = closed["boxes"][names.index("conv1")]
    flops = 2 * (3 * 7 * 7) * 64 * 112 * 112
    assert convolution["lines"] == ["conv1", "Conv2d", "[N, 64, 112, 112]", f"stride 2, {flops / 1e6:.0f} MFLOPs"]
    assert box["lines"][-2:] == ["[N, 256, 14, 14]", f"stride 16, {_layer3_flops() / 1e6:.0f} MFLOPs"]
    assert box["nodes"] == sum(name.startswith("layer3.") for name in graph.eval_nodes)
    assert layout("resnet18", depth=1) == closed
    opened = layout("resnet18", opened=("layer3", "layer3.0"))
    kinds = {box["name"]: box["kind"] for box in opened["boxes"]}
    assert {name for name, kind in kinds.items() if kind == "frame"} == {"layer3", "layer3.0"}
    assert kinds["layer3.1"] == "module"
    assert kinds["layer3.0.conv1"] == "call_module"
    assert kinds["layer3.0.downsample"] == "module"
    inner = next(box for box in opened["boxes"] if box["name"] == "layer3.0.conv1")
    assert inner["lines"][:2] == ["conv1", "Conv2d"]  # named within its frame


def test_boxes_of_maps_have_room_for_a_picture():
    boxes = {box["name"]: box for box in layout("resnet18", opened=("layer3",))["boxes"]}
    assert {name for name, box in boxes.items() if not box["picture"]} == {"layer3", "flatten", "fc", "avgpool"}
    for box in boxes.values():
        if box["picture"]:
            assert box["width"] >= max(map(len, box["lines"])) * 6 + 56 < box["width"] + box["height"]
            assert box["height"] >= 56


@pytest.mark.parametrize("model", ["resnet18", "swin_t", "googlenet"])
def test_frames_hold_their_parts_and_nothing_overlaps(model):
    graph = model_graph(model)
    found = layout(model)
    boxes = found["boxes"]
    nodes = [box for box in boxes if box["kind"] not in ("frame", "module")]
    assert [box["name"] for box in nodes] == [node.name for node in graph.nodes]
    frames = [box for box in boxes if box["kind"] == "frame"]
    assert frames
    whole = {"x": 0, "y": 0, "width": found["width"], "height": found["height"]}
    for i, box in enumerate(boxes):
        assert contains(whole, box)
        for other in boxes[i + 1 :]:
            within = box["kind"] == "frame" and contains(box, other)
            assert within or apart(box, other), (box["name"], other["name"])
    for frame in frames:
        inside = [box["name"] for box in nodes if contains(frame, box)]
        assert inside
        assert all(name.startswith(frame["name"] + ".") for name in inside if name in graph.by_name)
        assert len(inside) == frame["nodes"]


@pytest.mark.parametrize("model", ["googlenet", "swin_t"])
@pytest.mark.parametrize("opened", [None, (), ("layer1", "features", "inception3a")])
def test_edges_lead_down_from_all_that_a_node_needs(model, opened):
    """A path of edges, in and out of frames, joins the boxes of two nodes exactly where one needs the other's."""
    graph = model_graph(model)
    found = layout(model, opened=opened)
    boxes = found["boxes"]
    for edge in found["edges"]:
        ys = [y for _, y in edge["points"]]
        assert ys == sorted(ys)
        source, target = boxes[edge["source"]], boxes[edge["target"]]
        x, y = edge["points"][0]
        assert source["x"] <= x <= source["x"] + source["width"] + 6
        # Out of a box at its lower edge, and of a frame that holds the target at its upper one.
        inwards = source["kind"] == "frame" and contains(source, target)
        assert y == pytest.approx(source["y"] if inwards else source["y"] + source["height"], abs=0.2)

    def place(name):
        """The innermost box that shows a node."""
        return next(
            i
            for i, box in reversed(list(enumerate(boxes)))
            if box["kind"] != "frame" and (box["name"] == name or name.startswith(box["name"] + "."))
        )

    entered = {i: [] for i in range(len(boxes))}
    for edge in found["edges"]:
        entered[edge["target"]].append(edge["source"])

    def holders(i):
        return {j for j, box in enumerate(boxes) if box["kind"] == "frame" and j != i and contains(box, boxes[i])}

    for node in (node for node in graph.nodes if node.name in graph.by_name):
        target = place(node.name)
        for source in node.args:
            if source not in graph.by_name or (start := place(source)) == target:
                continue
            common = holders(start) & holders(target)
            ways = {start, *(holders(start) - common)}
            goals = {target, *(holders(target) - common)}
            assert any(ways & set(entered[goal]) for goal in goals), (source, node.name)


def test_parameters_lie_with_their_users():
    """They have no path of their own, and would part a module into pieces."""
    names = [box["name"] for box in layout("swin_t", opened=())["boxes"]]
    assert names == ["x", "features", "norm", "permute", "avgpool", "flatten", "head"]


def test_modules_are_opened_in_layouts_only():
    with pytest.raises(ValueError, match="for the format layout"):
        render(model_graph("resnet18"), "svg", opened=())
    with pytest.raises(ValueError, match="without a depth"):
        render(model_graph("resnet18"), "layout", depth=1, opened=())
