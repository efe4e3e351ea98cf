"""check_health: at which node NaN, infinity or saturation first appears, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import resnet18

from fxcore import trace
from fxcore.toolbox.health import check_health
from tests.fxcore.capture import traced


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.sqrt(self.linear(x)) + 1)


def test_the_operation_that_makes_a_nan() -> None:
    model = Root()
    nn.init.constant_(model.linear.weight, -1)
    found = check_health(traced(model), torch.ones(1, 4))
    assert found.first_nan == "sqrt"
    assert found.first_inf is None
    assert found.cause == "operation"
    assert not found.healthy
    assert {n.name: n.nan for n in found.nodes}["linear"] == 0


def test_bad_weights() -> None:
    model = resnet18()
    model.layer3[0].conv1.weight.data[5, 3, 1, 1] = float("nan")
    found = check_health(traced(model), torch.randn(1, 3, 32, 32))
    assert found.first_nan == "layer3.0.conv1"
    assert found.cause == "weights"


def test_bad_input() -> None:
    found = check_health(traced(Root()), torch.tensor([[1.0, float("inf"), 0, 0]]))
    assert found.first_inf == "x"
    assert found.cause == "input"


def test_a_sound_model() -> None:
    found = check_health(traced(resnet18()), torch.randn(1, 3, 64, 64))
    assert found.healthy
    assert found.cause is None
    assert len(found.nodes) > 60


@pytest.mark.parametrize("activation", [nn.Sigmoid(), nn.Tanh(), nn.ReLU6(), nn.Hardsigmoid()])
def test_saturation_at_the_bounds(activation: nn.Module) -> None:
    module = traced(nn.Sequential(nn.Identity(), activation))
    assert check_health(module, torch.full((8,), 50.0)).first_saturated == "1"
    assert check_health(module, torch.linspace(0.2, 0.9, 8)).first_saturated is None


def test_a_dead_relu() -> None:
    module = traced(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    module.get_submodule("0").weight.data.fill_(-1)
    found = check_health(module, torch.ones(1, 4) * 9)
    assert found.first_saturated == "1"
    assert found.nodes[-1].saturated == 1


@pytest.mark.parametrize("relu", [torch.relu, torch.relu_, F.relu, F.relu_, lambda x: x.relu_()])
def test_a_dead_relu_that_is_a_function(relu: Callable[[Tensor], Tensor]) -> None:
    assert check_health(trace(lambda x: relu(x - 9)), torch.ones(1, 4)).nodes[-1].saturated == 1


def test_sparse_values_are_looked_at() -> None:
    module = trace(lambda x: torch.log(x.to_sparse().to_dense()))
    assert check_health(module, torch.eye(3)).first_inf == "log"
    module = trace(lambda x: x.to_sparse() / 0)
    assert check_health(module, torch.eye(3)).first_inf == "truediv"


def test_nested_values_are_looked_at() -> None:
    def parts(x: Tensor) -> Tensor:
        nested: Tensor = torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)
        return nested

    module = trace(lambda x: parts(x), leaf_functions=(parts,))
    assert check_health(module, torch.ones(2, 3)).nodes[-1].name == "parts"


def test_what_half_precision_cannot_hold() -> None:
    module = trace(lambda x: (x * 1e4).square().sqrt())
    assert check_health(module, torch.ones(3)).healthy
    assert check_health(module, torch.ones(3), limit=torch.finfo(torch.float16).max).first_saturated == "square"


def test_inputs_that_the_module_writes_to_stay() -> None:
    x = torch.ones(3)
    assert check_health(trace(lambda x: x.add_(1) * 2), x).healthy
    assert torch.equal(x, torch.ones(3))
