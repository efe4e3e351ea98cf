"""What is advised where int8 is too far from float32."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxcore import trace
from fxcore.int8.report import simulated
from service.engine.backends.int8_advice import KeepFloatSearch, shortest_paths
from service.engine.candidate import Candidate, CandidateState
from tests.service.engine.running import spec


@pytest.fixture
def search() -> KeepFloatSearch:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)).eval()
    module = trace(model)
    with torch.no_grad():
        model[2].weight[0] *= 1e3  # one channel takes the whole range of the others
    simulation = simulated(module, [(torch.rand(1, 3, 8, 8),) for _ in range(4)])
    return KeepFloatSearch(module, simulation, simulation.layers())


def measured(cosine: float) -> Candidate:
    state = CandidateState.AGREES if cosine >= 0.98 else CandidateState.DIFFERS
    return Candidate("eager", state, 1.0, 0.5, cosine, reason="is far")


def test_a_spec_is_advised_only_once_it_has_passed(search: KeepFloatSearch) -> None:
    """Twice as many layers where the first ones are not enough, and float32 where none are."""
    tried: list[list[str]] = []

    async def fails(module: fx.GraphModule) -> Candidate:
        tried.append(list(module.meta["keep_float"]))
        return measured(0.5)

    asyncio.run(search.run(fails))
    refusal = search.refusal(spec(precision="int8"), measured(0.5))
    assert refusal.extra["spec"]["precision"] == "float32"
    assert "precision=float32" in refusal.detail
    assert 0 < len(tried) < 3
    assert [len(nodes) for nodes in tried] == sorted(len(nodes) for nodes in tried)

    async def passes(module: fx.GraphModule) -> Candidate:
        return measured(0.99)

    asyncio.run(search.run(passes))
    found: dict[str, Any] = search.refusal(spec(precision="int8", backend="openvino"), measured(0.5)).extra["spec"]
    assert (found["precision"], found["backend"]) == ("int8", "auto")
    assert found["transforms"] == [{"name": "keep_float", "params": {"nodes": tried[0]}}]


def test_paths_mean_what_is_kept_and_nothing_else() -> None:
    every = ["a.conv", "a.b.conv", "a.b", "ab.conv", "c.1", "c.10", "d"]
    assert shortest_paths(["c.1", "d"], every) == ["c.1", "d"]
    assert shortest_paths(["a.conv", "a.b.conv", "a.b"], every) == ["a"]
    assert shortest_paths(["a.b.conv"], every) == ["a.b.conv"]
    assert shortest_paths(["a.b"], every) == ["a.b"]  # which means what is under it, too
    assert shortest_paths(["a.b.conv", "a.b"], [*every, "a.b.fc"]) == ["a.b"]
