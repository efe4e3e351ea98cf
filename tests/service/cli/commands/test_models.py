"""What ``fxserve models``, ``nodes`` and ``graph`` print and write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.models import list_models
from torchvision.models.feature_extraction import get_graph_node_names

from fxcore import get_model, model_graph
from fxcore.rendering.render import render
from tests.service.cli.running import fails, fxserve, rows


def test_models_lists_what_torchvision_lists() -> None:
    result = fxserve("models", "--source", "torchvision")
    assert [row[0] for row in rows(result.stdout, "model")] == list_models()
    resnet50 = next(row for row in rows(result.stdout, "model") if row[0] == "resnet50")
    assert resnet50 == ["resnet50", "classification", "IMAGENET1K_V2", "IMAGENET1K_V1", "25.6 M", "no"]


def test_models_can_be_filtered() -> None:
    found = rows(fxserve("models", "--task", "segmentation", "-q", "ResNet").stdout, "model")
    assert [row[0] for row in found] == ["deeplabv3_resnet101", "deeplabv3_resnet50", "fcn_resnet101", "fcn_resnet50"]
    assert {row[1] for row in found} == {"segmentation"}


def test_models_sees_weights_on_disk() -> None:
    file = get_model("squeezenet1_1").weights_info("DEFAULT").file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"weights")
    assert rows(fxserve("models", "-q", "squeezenet1_1").stdout, "model")[0][-1] == "yes"


def test_nodes_shows_levels_first_and_then_each_node() -> None:
    result = fxserve("nodes", "resnet50")
    assert rows(result.stdout, "level") == [
        [name, level.node, str(level.channels), str(level.stride)]
        for name, level in model_graph("resnet50").levels.items()
    ]
    assert result.stdout.index("C5") < result.stdout.index("layout")
    listed = rows(result.stdout, "node")
    train, eval_ = get_graph_node_names(get_model("resnet50").build_weightless())
    assert [row[0] for row in listed] == eval_
    assert ["layer4.2.relu_2", "Nx2048x7x7", "NCHW", "layer4.2.relu"] in listed
    assert fxserve("nodes", "resnet50", "--train").stdout.split() == train


def test_nodes_shows_which_cannot_be_asked_for() -> None:
    result = fxserve("nodes", "vit_b_16")
    assert "level" not in result.stdout
    listed = rows(result.stdout, "node")
    assert ["encoder.layers.encoder_layer_0.ln", "Nx197x768", "tokens", "encoder.layers.encoder_layer_0.ln_1"] in listed
    assert ["encoder.dim", "-", "-", "dim"] in listed


def test_nodes_lists_untraceable_modules() -> None:
    result = fxserve("nodes", "fasterrcnn_resnet50_fpn")
    assert [row[0] for row in rows(result.stdout, "level")][-2:] == ["P5", "P6"]
    assert "closed: roi_heads: " in result.stdout


@pytest.mark.exhaustive
def test_nodes_of_a_model_that_only_eval_mode_can_trace(
    tmp_path: Path, own_models: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dropping.py").write_text(
        """
import torch

class Dropping(torch.nn.Module):
    def forward(self, x):
        return x * torch.rand(x.shape[0], 1, 1, 1) if self.training else x.relu()
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    own_models('[models.mine]\nbuilder = "dropping:Dropping"\n')
    assert [row[0] for row in rows(fxserve("nodes", "mine").stdout, "node")] == ["x", "relu"]
    fails(fxserve("nodes", "mine", "--train"), 1, "mine can be traced in eval mode only; leave out --train\n")


@pytest.mark.exhaustive
def test_nodes_of_weights_with_another_structure() -> None:
    assert "cat" in fxserve("nodes", "googlenet").stdout.split()  # its default weights come without auxiliary heads
    assert "cat" not in fxserve("nodes", "googlenet", "--weights", "random").stdout.split()
    result = fxserve("nodes", "vit_h_14", "--weights", "IMAGENET1K_SWAG_E2E_V1")
    assert "Nx3x518x518" in result.stdout


def test_a_pipe_gets_whole_lines_whatever_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stdout = fxserve("nodes", "vit_b_16").stdout
    assert re.search(r"^encoder\.layers\.encoder_layer_11\.self_attention +- ", stdout, re.MULTILINE)
    assert all(line == line.rstrip() for line in stdout.splitlines())


@pytest.mark.parametrize("format", ["table", "code", "dot", "svg", "mermaid"])
def test_graph_prints_each_format(format: str) -> None:
    assert fxserve("graph", "resnet18", "--format", format).stdout == render(model_graph("resnet18"), format)  # type: ignore[arg-type]


def test_graph_as_json_for_a_size() -> None:
    result = fxserve("graph", "resnet18", "--format", "json", "--height", 64, "--width", 96)
    document = json.loads(result.stdout)
    assert document["input_shape"] == [None, 3, 64, 96]
    assert next(n["shape"] for n in document["nodes"] if n["name"] == "layer4.1.relu_1") == [None, 512, 2, 3]


def test_graph_writes_the_format_of_the_suffix(tmp_path: Path) -> None:
    for suffix, start in ((".svg", "<svg"), (".dot", "digraph"), (".json", "{"), (".mmd", "flowchart"), (".py", "def")):
        out = tmp_path / f"graph{suffix}"
        result = fxserve("graph", "resnet18", "--out", out)
        assert result.stdout == f"wrote {out}\n"
        assert out.read_text().startswith(start)
    fxserve("graph", "resnet18", "--out", out, "--format", "dot")
    assert out.read_text().startswith("digraph")


@pytest.mark.parametrize("format", ["dot", "svg", "mermaid"])
def test_graph_draws_modules_of_a_depth_as_one_box(format: str, tmp_path: Path) -> None:
    graph = model_graph("resnet18")
    expected = render(graph, format, 1)  # type: ignore[arg-type]
    assert len(expected) < len(render(graph, format)) / 3  # type: ignore[arg-type]
    assert fxserve("graph", "resnet18", "--format", format, "--depth", 1).stdout == expected
    fxserve("graph", "resnet18", "--format", format, "--depth", 2, "--out", tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text() == render(graph, format, 2)  # type: ignore[arg-type]
