"""profile: which node takes the time and the memory."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, fx, nn
from torchvision.models import resnet18

from fxcore import trace
from fxcore.analysis.profile import profile


def sleepy(x: Tensor) -> Tensor:
    time.sleep(0.3)
    return x + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return sleepy(y.view(-1)) * 2


@pytest.fixture
def net() -> fx.GraphModule:
    model = Net().eval()
    return trace(model, leaf_functions=(sleepy,))


@pytest.mark.exhaustive
def test_the_slow_node_is_found(net: fx.GraphModule) -> None:
    found = profile(net, torch.ones(2, 8), runs=3)
    assert found.slowest(1)[0].name == "sleepy"
    assert found.slowest(1)[0].milliseconds >= 300
    assert found.slowest(1)[0].share > 0.5
    assert sum(n.share for n in found.nodes) == pytest.approx(1)
    assert found.milliseconds >= 300
    assert found.runs == 3


def test_memory(net: fx.GraphModule) -> None:
    nodes = {n.name: n for n in profile(net, torch.ones(2, 8), runs=1).nodes}
    assert nodes["linear"].bytes == 2 * 16 * 4
    assert nodes["view"].bytes == 0
    assert nodes["x"].live_bytes == 2 * 8 * 4
    # The input is given back once the linear layer has run; the view keeps what it looks at.
    assert nodes["linear"].live_bytes == 2 * 8 * 4 + 2 * 16 * 4
    assert nodes["mul"].live_bytes == 2 * 2 * 16 * 4
    assert nodes["mul"].peak_bytes is None


def test_a_real_model_under_its_nodes_names() -> None:
    model = resnet18().eval()
    module = trace(model)
    found = profile(module, torch.randn(1, 3, 64, 64), runs=2)
    assert "layer1.0.conv1" in {n.name for n in found.nodes}
    assert found.peak_bytes == max(n.live_bytes for n in found.nodes)
    # The widest point: the stem's map, its batch norm and the input, give or take.
    assert 64 * 32 * 32 * 4 <= found.peak_bytes < 4 * 64 * 32 * 32 * 4


def test_inputs_that_the_module_writes_to_stay() -> None:
    x = torch.ones(3)
    profile(trace(lambda x: x.add_(1) * 2), x, runs=2)
    assert torch.equal(x, torch.ones(3))
