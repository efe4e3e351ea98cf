"""Modules with sparse tensors, which have no storage of their own, as in graph networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcore
from fxcore import transforms
from fxcore.errors import NotTraceable

_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
_EDGES = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.25, 0.5, 0.25]])


class Held(nn.Module):
    edges: Tensor

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 2)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = torch.sparse.mm(self.edges, x) @ self.mix.weight.T
        return mixed


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        mixed: Tensor = torch.sparse.mm(edges, x) @ self.mix.weight.T
        return mixed


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("held", [True, False])
def test_sparse_buffers_and_arguments(held: bool, layout: str) -> None:
    edges = _LAYOUTS[layout](_EDGES)
    model = (Held(edges) if held else Given()).eval()
    x = torch.rand(3, 4)
    inputs: tuple[Any, ...] = (x,) if held else (x, edges)
    expected = x.new_tensor(_EDGES.tolist()) @ x @ model.mix.weight.T
    torch.testing.assert_close(fxcore.trace(model)(*inputs), expected)
    extractor = fxcore.create_extractor(model, {"matmul": "m"}, inputs)
    torch.testing.assert_close(extractor(*inputs)["m"], expected)
    torch.testing.assert_close(transforms.fold_constants(extractor)(*inputs)["m"], expected)
    assert fxcore.verify(extractor, extractor, inputs).allclose
    assert all(node.milliseconds > 0 for node in fxcore.profile(extractor, inputs).slowest(1))


def test_a_write_to_a_sparse_buffer_is_refused() -> None:
    class Counting(Held):
        def forward(self, x: Tensor) -> Tensor:
            self.edges._values().mul_(2)
            return super().forward(x)

    model = Counting(_EDGES.to_sparse()).eval()
    with pytest.raises(NotTraceable, match="writes to edges"):
        fxcore.trace(model)
    assert torch.equal(model.edges.to_dense(), _EDGES)
