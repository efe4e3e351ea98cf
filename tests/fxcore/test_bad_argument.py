"""What is called with the wrong thing says what would be right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import fxcore
from fxcore import FxError

MODEL = fxcore.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval())
GRAPH = fxcore.model_graph("squeezenet1_1")
ROWS = torch.ones(1, 2)
WIDE = torch.ones(1, 3)
IMAGES = fxcore.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval())
SUMS = fxcore.trace(lambda x, y: x.relu() + y)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fxcore.get_model(3), "'resnet50', not 3"),
        (lambda: fxcore.list_models("nope"), "there are torchvision, timm, packaged, own"),
        (lambda: fxcore.model_graph(3), "'resnet50', not 3"),
        (lambda: GRAPH.resolve(3), "a list of names, or names with keys, not 3"),
        (lambda: GRAPH.resolve({"features.5": 3}), "are text, not 3"),
        (lambda: fxcore.build_extractor(3, nn.ReLU(), {}), "what model_graph returns"),
        (lambda: fxcore.build_extractor(GRAPH, nn.ReLU(), ["features.5"]), "what graph.resolve returns"),
        (lambda: fxcore.build_extractor(GRAPH, nn.ReLU(), {"features.5": "nope"}), "what graph.resolve returns"),
        (lambda: fxcore.load_model("squeezenet1_1", "random"), "a model entry from get_model"),
        (lambda: fxcore.load_model(fxcore.get_model("squeezenet1_1"), 3), "'random', not by 3"),
        (lambda: fxcore.load_model(fxcore.get_model("squeezenet1_1"), "nope"), "ask for one of DEFAULT"),
        (lambda: fxcore.open_image("cat.jpg"), "the bytes of its file"),
        (lambda: fxcore.trace(MODEL, leaf_modules=3), "leaf_modules is a list of module classes and of paths"),
        (lambda: fxcore.trace(MODEL, leaf_modules=[nn.ReLU()]), "or 'auto', and holds ReLU()"),
        (lambda: fxcore.trace(MODEL, leaf_functions=len), "leaf_functions is a list of functions, not <built-in"),
        (lambda: fxcore.trace(MODEL, concrete_args=["input"]), "argument to value, not ['input']"),
        (lambda: fxcore.render(MODEL, "gif"), "there are table, code, dot, svg, mermaid"),
        (lambda: fxcore.render(MODEL, "svg", depth="a"), "at least 1, not 'a'"),
        (lambda: fxcore.render(nn.ReLU(), "svg"), "trace the model first"),
        (lambda: fxcore.apply_transforms(MODEL, 3), "['fuse_conv_bn'], not 3"),
        (lambda: fxcore.apply_transforms(MODEL, "remove"), "['fuse_conv_bn'], not 'remove'"),
        (lambda: fxcore.apply_transforms(MODEL, [3]), "a transform is a name, or an object"),
        (lambda: fxcore.apply_transforms(nn.ReLU(), ["remove"]), "trace the model first"),
        (lambda: fxcore.profile(MODEL, ROWS, runs=0), "runs must be at least 1"),
        (lambda: fxcore.profile(MODEL, ROWS, warmup=-1), "warmup at least 0"),
        (lambda: fxcore.profile(MODEL, WIDE), "0 expects float32 […, 2], but got float32 [1, 3]"),
        (lambda: fxcore.check_health(MODEL, WIDE), "0 expects float32 […, 2], but got float32 [1, 3]"),
        (lambda: fxcore.quantize(MODEL, WIDE), "0 expects float32 […, 2], but got float32 [1, 3]"),
        (lambda: fxcore.verify(MODEL, MODEL, WIDE), "0 expects float32 […, 2], but got float32 [1, 3]"),
        (lambda: fxcore.verify(nn.Linear(2, 2), MODEL, WIDE), "Linear does not take float32 [1, 3]: RuntimeError"),
        (lambda: fxcore.verify(lambda x: x, MODEL, WIDE), "0 expects float32 […, 2], but got float32 [1, 3]"),
        (
            lambda: fxcore.profile(IMAGES, torch.ones(1, 4, 4, 3)),
            "0 expects float32 [N, 3, height, width], but got float32 [1, 4, 4, 3]",
        ),
        (
            lambda: fxcore.profile(IMAGES, torch.ones(1, 3, 4, 4, dtype=torch.uint8)),
            "0 expects float32 [N, 3, height, width], but got uint8 [1, 3, 4, 4]",
        ),
        (
            lambda: fxcore.profile(IMAGES, torch.ones(1, 3, 8, 8)),
            "does not take float32 [1, 3, 8, 8]: 3 expects float32 […, 16], but got float32 [1, 144]",
        ),
        (
            lambda: fxcore.profile(SUMS, (ROWS, WIDE)),
            "at add, which got float32 [1, 2], float32 [1, 3]: RuntimeError: The size of tensor a (2) must match",
        ),
    ],
)
def test_says_what_would_be_right(call: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(FxError) as raised:
        call()
    assert said in raised.value.detail
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_shapes_do_not_explain_passes_as_it_is() -> None:
    """A want of threads or memory, a value that is not taken: not the fault of the inputs' shape."""

    def short(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, FakeTensor):
            raise RuntimeError("can't start new thread")
        return x

    module = fxcore.trace(lambda x: short(x) + 1, leaf_functions=[short])
    for call in (fxcore.profile, fxcore.check_health, lambda m, x: fxcore.verify(m, m, x)):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            call(module, ROWS)
