"""Names that parts of a model can have in a graph, and those that torch.fx cannot write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fxcore import model_graph, trace
from fxcore.errors import NotTraceable
from tests.fxcore.conftest import OwnEntry


class Named(nn.Module):
    """Convolutions under the names of ``paths``."""

    def __init__(self, *paths: str) -> None:
        super().__init__()
        self.paths = paths
        for path in paths:
            first, _, key = path.partition(".")
            self._modules[first] = nn.ModuleDict({key: nn.Conv2d(3, 3, 1)}) if key else nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for path in self.paths:
            first, _, key = path.partition(".")
            x = self._modules[first][key](x) if key else self._modules[first](x)  # type: ignore[index, misc, operator]
        return x


@pytest.mark.parametrize("path", ["meta", "graph.stem", "heads.class"])
def test_a_name_that_no_graph_module_can_have_is_named(path: str, own_entry: OwnEntry) -> None:
    with pytest.raises(NotTraceable, match=f"no part of it can be named '{path}', since ") as caught:
        trace(Named("stem", path))
    assert caught.value.extra["module"] == path
    with pytest.raises(NotTraceable):
        model_graph(own_entry(lambda: Named("stem", path)))


@pytest.mark.parametrize("character", ['"', "\\", "\n", "\r"])
def test_characters_that_torch_fx_does_not_escape(character: str) -> None:
    path = f"stem.a{character}b"
    with pytest.raises(NotTraceable, match="without escaping it") as caught:
        trace(Named(path))
    assert caught.value.extra["module"] == path
    with pytest.raises((SyntaxError, AttributeError)):
        fx.symbolic_trace(Named(path))(torch.zeros(1, 3, 4, 4))
    odd = Named("stem.a'b {c} %s\té").eval()
    assert torch.equal(trace(odd)(torch.ones(1, 3, 4, 4)), odd(torch.ones(1, 3, 4, 4)))


def test_names_that_look_like_taken_ones_can_be_had() -> None:
    model = Named("heads.meta", "stem.code", "classes", "match").eval()
    x = torch.randn(1, 3, 4, 4)
    assert torch.equal(trace(model)(x), model(x))
