"""Models that are written for contiguous tensors, with channels_last images. The reference is the model itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from fxcore import build_extractor, create_extractor, trace
from fxcore.backends import BACKENDS, Options
from fxcore.graph.model_graph import trace_graph
from tests.fxcore.conftest import OwnEntry


@fx.wrap
def flat_in_a_helper(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


class FlatInALeaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


def written_through_a_view(x: Tensor) -> Tensor:
    flat = x.view(x.size(0), -1)
    flat[:, 3] += 1
    flat.mul_(2)
    return x.flatten(1) - flat.sum()


def written_in_place_after_a_view(x: Tensor) -> Tensor:
    return nn.functional.relu(x.view(x.size(0), -1), inplace=True) + x.view(x.size(0), -1)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(x.size(0), -1),
    "by name": lambda x: x.view(size=(x.size(0), -1)),
    "as": lambda x: x.view_as(x.flatten(1)),
    "pairs": lambda x: x.view(x.size(0), 4, 2, -1).flatten(1),
    "bytes": lambda x: x.view(torch.int32).view(torch.float32).flatten(1),
    "complex": lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs().flatten(1),
    "tokens": lambda x: x.flatten(2).view(x.size(0), -1),
    "strided": lambda x: x.as_strided((x.size(0), 8), (128, 1), 2),
    "strided function": lambda x: torch.as_strided(x, (x.size(0), 8), (128, 3)),
    "strided view": lambda x: x[:, 1:].as_strided((x.size(0), 8), (128, 2)),
    "own strides": lambda x: x.as_strided((x.size(0), 4), (x.stride(0), x.stride(1))),
    "strided by name": lambda x: torch.as_strided(input=x, size=(x.size(0), 8), stride=(128, 3)),
    "helper": flat_in_a_helper,
    "leaf": FlatInALeaf(),
    "written": written_through_a_view,
    "in place": written_in_place_after_a_view,
}


class Net(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.way, self.last = nn.Conv2d(3, 8, 8, 8), way, nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self.conv(x)))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_the_format_of_the_images_does_not_matter(way: Callable[[Tensor], Tensor], own_entry: OwnEntry) -> None:
    model = Net(way).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    leaves = ["way"] if isinstance(way, FlatInALeaf) else []
    with torch.no_grad():
        expected = model(x)
    extractors = [create_extractor(model, ["last"], x, leaf_modules=leaves)]
    if not leaves:
        graph = trace_graph(own_entry(lambda: Net(way)))
        extractors.append(build_extractor(graph, model, graph.resolve(["last"])).module)
    for extractor in extractors:
        run = BACKENDS["eager"].lower(extractor, (x,), Options())
        for images in (x, x.to(memory_format=torch.channels_last)):
            with torch.no_grad():
                torch.testing.assert_close(extractor(images)["last"], expected)
                torch.testing.assert_close(run(images)["last"], expected)


def test_a_trace_runs_in_the_eager_backend() -> None:
    model, x = Net(WAYS["view"]).eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(BACKENDS["eager"].lower(trace(model), (x,), Options())(x), model(x))
