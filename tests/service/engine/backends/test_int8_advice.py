"""What is refused where int8 is too far from float32."""

from __future__ import annotations

import torch
from torch import nn

from fxcore import trace
from fxcore.int8.report import simulated
from service.engine.backends.int8_advice import int8_refusal
from service.engine.runtime.candidate import Candidate, CandidateState


def test_the_error_and_the_worst_layers_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)).eval()
    with torch.no_grad():
        model[2].weight[0] *= 1e3  # one channel takes the whole range of the others
    layers = simulated(trace(model), [(torch.rand(1, 3, 8, 8),) for _ in range(4)])
    far = Candidate("eager", CandidateState.DIFFERS, 1.0, 0.5, 0.5, reason="is far")
    refusal = int8_refusal(far, layers)
    assert refusal.extra["min_cosine"] == 0.5
    assert [layer["name"] for layer in refusal.extra["layers"]] == [layer.name for layer in layers]
    assert f"most is lost in {layers[0].name} (" in refusal.detail
    assert "keep_float" in refusal.detail
    assert "keep_float" not in int8_refusal(far, []).detail
