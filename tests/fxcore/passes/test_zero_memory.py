"""Memory that a model leaves uninitialised holds nothing of what others left there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from fxcore import build_extractor, load_model
from fxcore.graph.model_graph import trace_graph
from fxcore.models.user_models import UserModel, user_entry


@pytest.fixture
def _full_of_nan() -> Iterator[None]:
    """Make torch fill uninitialised memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Partial(nn.Module):
    """Writes one channel of three."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(x)
        made[:, :1] = x[:, :1]
        return made * 2


@pytest.mark.usefixtures("_full_of_nan")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty_like(x, memory_format=torch.preserve_format),
        lambda x: torch.empty(x.shape, memory_format=torch.contiguous_format),
        lambda x: torch.empty(x.shape),
        lambda x: torch.empty_permuted(x.shape, (0, 2, 3, 1)),
        lambda x: torch.empty_strided(x.shape, (3072, 1024, 32, 1)),
        lambda x: x.new_empty(x.shape, pin_memory=False),
        lambda x: x.new(x.shape[0], 3, 32, 32),
        lambda x: x.new_empty_strided(x.shape, (3072, 1024, 32, 1)),
    ],
)
def test_zeros(make: Callable[[Tensor], Tensor]) -> None:
    entry = user_entry("partial", UserModel(lambda: Partial(make), preprocessing={"crop_size": 32}))
    graph = trace_graph(entry)
    names = [node.name for node in graph.nodes if node.extractable]
    assert any(name.split("_")[0] in ("empty", "new") for name in names)
    x = torch.rand(2, 3, 32, 32)
    values = build_extractor(graph, load_model(entry, "builder"), graph.resolve(names)).module(x)
    assert not any(value.isnan().any() for value in values.values())
    expected = torch.zeros_like(x)
    expected[:, :1] = 2 * x[:, :1]
    assert torch.equal(values["mul"], expected)
