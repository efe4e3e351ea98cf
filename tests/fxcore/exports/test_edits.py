"""Exports of extractors with edits: the file takes scales and shifts, and gives what the extractor gives."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fxcore import Edit, Extractor, ModelEntry, build_extractor, load_model, model_graph
from fxcore.analysis.verify import verify
from fxcore.exports import FORMATS, export_folder
from fxcore.exports.subject import subject_of
from tests.fxcore.conftest import OwnEntry
from tests.fxcore.exports.test_export import computed
from tests.fxcore.model_list import small_swin

pytestmark = pytest.mark.usefixtures("in_this_process")


def edited(entry: str | ModelEntry, keys: Any, at: list[str], inputs: dict[str, str] | None = None) -> Extractor:
    graph = model_graph(entry)
    model = load_model(graph.entry, "random")
    return build_extractor(graph, model, graph.resolve(keys), inputs=inputs, edits=graph.resolve(at))


def small_net() -> nn.Module:
    """Build a model of two levels, of 8 and of 16 channels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()
    ).eval()


def two_blocks() -> nn.Module:
    torch.manual_seed(0)
    smaller = nn.Sequential(nn.Conv2d(8, 16, 1, 2), nn.BatchNorm2d(16))
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4), BasicBlock(8, 8), BasicBlock(8, 16, 2, smaller)).eval()


def given(extractor: Extractor, rows: int) -> tuple[Tensor, ...]:
    """Random inputs, and other factors for each channel and for the last row."""
    torch.manual_seed(rows)
    images = tuple(torch.rand(rows, *(spec.usual or spec.shape[1:])) for spec in extractor.inputs)
    edits = [Edit(node.key, scale=-0.5, shift=1.5) for node in extractor.edited]
    for at, node in enumerate(extractor.edited, 1):
        edits.append(Edit(node.key, scale=[3.0, 0.0], shift=[1.0, at], channels=[1, 2], images=[rows - 1]))
    return (*images, *extractor.factors(edits, *images))


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", FORMATS)
def test_files_run_elsewhere_and_take_edits(format: str, own_entry: OwnEntry, tmp_path: Path) -> None:
    """Two edits, of which one is of an output; edits of a part of a model, and of windows, several rows an image. The
    number of rows is free. Keys are not in the order of execution, one node has two, and one is the input."""
    for package in (*FORMATS[format].packages, *(["onnxruntime"] if format == "onnx" else [])):
        pytest.importorskip(package)
    begin = {"1.conv1": "1.conv1", "0": "0"}
    keys = {"C4": "late", "input": "image", "C3": "C3", "5": "again"}
    extractors = [
        edited(replace(own_entry(small_net), name="small"), keys, ["5", "2"]),
        edited(replace(own_entry(two_blocks), name="blocks"), "2", ["1.conv2"], begin),
        edited(own_entry(small_swin), "layers.0.blocks.0", ["layers.0.blocks.0.attn.qkv"]),
    ]
    cases = [(extractor, [given(extractor, rows) for rows in (1, 3)]) for extractor in extractors]
    for extractor, inputs, values in computed(cases, format, tmp_path):
        found = verify(extractor.module, lambda *x, v=values: v, inputs)
        assert found.relative < 1e-4, found
        kept = (*inputs[: len(extractor.inputs)], *extractor.factors([], *inputs[: len(extractor.inputs)]))
        assert verify(extractor.module, lambda *x, v=values: v, kept).relative > 1e-3


def test_a_folder_says_which_inputs_edit_which_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = edited("squeezenet1_1", "features.5", ["features.5", "features.3"])
    export_folder(extractor, tmp_path / "edited_squeezenet")
    about = json.loads((tmp_path / "edited_squeezenet" / "extractor.json").read_text())
    inputs, (last, inner) = about["inputs"], about["edits"]
    assert [spec["name"] for spec in inputs[1:]] == [last["scale"], last["shift"], inner["scale"], inner["shift"]]
    assert [last["node"], inner["node"]] == [node.name for node in extractor.edited]
    assert inputs[3] == {"name": inner["scale"], "layout": "NCHW", "shape": [None, 128, 1, 1]}
    readme = (tmp_path / "edited_squeezenet" / "README.md").read_text()
    assert f"`{inner['node']}` is multiplied by `{inner['scale']}`, then `{inner['shift']}` is added" in readme
    assert "torch.ones([1, 128, 1, 1]), torch.zeros([1, 128, 1, 1]))" in readme
    monkeypatch.syspath_prepend(tmp_path)
    images, *factors = given(extractor, 3)
    named = dict(zip([spec["name"] for spec in inputs[1:]], factors, strict=True))
    values = importlib.import_module("edited_squeezenet").load()(images, **named)["features.5"]
    torch.testing.assert_close(values, extractor.module(images, *factors)["features.5"])


@pytest.mark.parametrize(("node", "layout"), [("norm1", "NHWC"), ("attn.qkv", None)])
def test_the_layout_of_factors_is_said_if_it_is_known(node: str, layout: str | None, own_entry: OwnEntry) -> None:
    extractor = edited(own_entry(small_swin), "layers.0.blocks.0", [f"layers.0.blocks.0.{node}"])
    description = subject_of(extractor, None).description()
    assert [spec["layout"] for spec in description["inputs"]] == ["NCHW", layout, layout]
    assert [tuple(spec["shape"][1:]) for spec in description["inputs"][1:]] == [
        tuple(factor.shape[1:]) for factor in given(extractor, 1)[1:]
    ]
