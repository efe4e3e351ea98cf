"""Autocast that a model turns on is refused by name. The reference is the module itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxcore import create_extractor, trace
from fxcore.errors import NotTraceable


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.mix(x)


class HalfOperation(Half):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.mT


class Full(Half):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.mix(x.float())


@pytest.mark.parametrize("part", [Half(), HalfOperation()])
def test_autocast_that_a_model_turns_on_is_refused(part: nn.Module) -> None:
    model, x = nn.Sequential(part, nn.Tanh()).eval(), torch.randn(3, 4)
    with pytest.raises(NotTraceable, match=r"in 0 \(Half.*runs under an autocast that the model turns on") as caught:
        trace(model)
    assert (caught.value.extra["kind"], caught.value.extra["module"]) == ("context", "0")
    for leaves in ("auto", ("0",)):  # as the error advises
        assert torch.equal(trace(model, leaf_modules=leaves)(x), model(x))


def test_autocast_around_the_trace_is_no_matter() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Full(), nn.Tanh()).eval(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        extractor = create_extractor(model, ["0", "2"], x, leaf_modules=["1"])
        assert extractor(x)["0"].dtype is torch.bfloat16
    assert torch.equal(extractor(x)["2"], model(x))
