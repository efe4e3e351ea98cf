"""What is called with the wrong thing says what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxcore
from fxcore import FxError

MODEL = fxcore.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval())
GRAPH = fxcore.model_graph("squeezenet1_1")
ROWS = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fxcore.get_model(3), "'resnet50', not 3"),
        (lambda: fxcore.get_model(None), "'resnet50', not None"),
        (lambda: fxcore.list_models("nope"), "there are torchvision, timm, own"),
        (lambda: fxcore.model_graph(3), "'resnet50', not 3"),
        (lambda: GRAPH.resolve(3), "a list of names, or names with keys, not 3"),
        (lambda: GRAPH.resolve([3]), "are text, not 3"),
        (lambda: GRAPH.resolve({"features.5": 3}), "are text, not 3"),
        (lambda: fxcore.build_extractor(3, nn.ReLU(), {}), "what model_graph returns"),
        (lambda: fxcore.build_extractor(GRAPH, nn.ReLU(), ["features.5"]), "what graph.resolve returns"),
        (lambda: fxcore.build_extractor(GRAPH, nn.ReLU(), {"features.5": "nope"}), "what graph.resolve returns"),
        (lambda: fxcore.load_model("squeezenet1_1", "random"), "what get_model returns"),
        (lambda: fxcore.load_model(fxcore.get_model("squeezenet1_1"), 3), "'random', not by 3"),
        (lambda: fxcore.load_model(fxcore.get_model("squeezenet1_1"), "nope"), "ask for one of DEFAULT"),
        (lambda: fxcore.open_image("cat.jpg"), "the bytes of its file"),
        (lambda: fxcore.open_image(None), "the bytes of its file"),
        (lambda: fxcore.render(MODEL, "gif"), "there are table, code, dot, svg, mermaid"),
        (lambda: fxcore.render(MODEL, "svg", depth="a"), "at least 1, not 'a'"),
        (lambda: fxcore.render(nn.ReLU(), "svg"), "trace the model first"),
        (lambda: fxcore.apply_transforms(MODEL, 3), "['fuse_conv_bn'], not 3"),
        (lambda: fxcore.apply_transforms(MODEL, "remove"), "['fuse_conv_bn'], not 'remove'"),
        (lambda: fxcore.apply_transforms(MODEL, [3]), "a transform is a name, or an object"),
        (lambda: fxcore.apply_transforms(nn.ReLU(), ["remove"]), "trace the model first"),
        (lambda: fxcore.profile(MODEL, ROWS, runs=0), "runs is at least 1"),
        (lambda: fxcore.profile(MODEL, ROWS, runs="many"), "runs is at least 1"),
        (lambda: fxcore.profile(MODEL, ROWS, warmup=-1), "warmup at least 0"),
    ],
)
def test_says_what_would_be_right(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(FxError) as raised:
        call()
    assert said in raised.value.detail
