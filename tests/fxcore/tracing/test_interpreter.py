"""Graphs run node by node, and what is no graph is refused by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxcore import FxError, Interpreter, Transformer, check_health, profile, render, trace
from fxcore.transforms import insert_after

X = torch.ones(2, 4)


def test_lists_are_lists() -> None:
    module = trace(lambda x: torch.sum(x, dim=[0, 1]))
    seen = []

    class Kinds(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            seen.append(type(kwargs["dim"]))
            return super().call_function(target, args, kwargs)

    assert float(Kinds(module).run(X)) == 8
    assert seen == [list]


class Named(OrderedDict[str, Any]):
    """A dictionary whose members are attributes too, as transformers' ModelOutput."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Listed(list[Any]):
    @property
    def first(self) -> Any:
        return self[0]


@pytest.mark.parametrize(("make", "read"), [(Named, "double"), (Listed, "first")])
def test_other_classes_of_lists_and_dicts_are_kept(make: Callable[[Any], Any], read: str) -> None:
    class Leaf(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make({"double": 2 * x}) if make is Named else make([2 * x])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Leaf()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(getattr(self.leaf(x), read))

    assert torch.equal(Interpreter(trace(Net(), leaf_modules=["leaf"])).run(X), Net()(X))


@pytest.mark.parametrize("given", [nn.Linear(4, 4), torch.relu, None, X])
@pytest.mark.parametrize(
    "function",
    [
        Interpreter,
        Transformer,
        lambda m: profile(m, X),
        lambda m: check_health(m, X),
        lambda m: render(m, "table"),
    ],
    ids=["Interpreter", "Transformer", "profile", "check_health", "render"],
)
def test_what_is_no_graph_is_refused_by_name(function: Callable[[Any], Any], given: Any) -> None:
    with pytest.raises(FxError, match=f"not a {type(given).__name__}; trace the model first"):
        function(given)


def test_a_graph_module_can_be_rendered_as_its_graph_can() -> None:
    module = trace(nn.Linear(4, 4).eval())
    assert render(module, "table") == render(module.graph, "table")


@pytest.mark.parametrize("given", [None, 3, X])
def test_only_functions_can_be_inserted(given: Any) -> None:
    with pytest.raises(FxError, match=f"not a {type(given).__name__}"):
        insert_after(trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), "0", given)
