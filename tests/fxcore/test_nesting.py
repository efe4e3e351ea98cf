"""Tensors in nested containers, also as arguments of modules."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxcore
from fxcore.errors import FxError
from fxcore.nesting import map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any = field(init=False, default=None)


class Ordered(OrderedDict[str, Any]):
    """A class that pytree does not know."""


class Rows(list[Any]):
    """Another."""


def test_tensors_are_found_in_dataclasses_and_other_classes_of_dicts() -> None:
    value = [Record(torch.zeros(1), {"a": Record(Record, torch.zeros(2))}), Ordered(a=(torch.zeros(3),), b=3)]
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3]


def test_tensors_are_found_and_replaced_in_every_container() -> None:
    def nested(make: Any) -> Any:
        return {"list": [make(1), None], "tuple": (make(2), "text"), "named": Pair(make(3), [make(4)])}

    value = nested(lambda size: torch.zeros(size))
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3, 4]
    replaced = map_tensors(lambda tensor: tensor.numel(), value)
    assert replaced == nested(lambda size: size)
    assert type(replaced["named"]) is Pair
    assert all(isinstance(tensor, Tensor) for tensor in tensors_in(value))  # the original is untouched


def test_tensors_are_replaced_in_dataclasses_and_other_classes_of_containers() -> None:
    def nested(make: Any) -> Any:
        inner = [Record(make(1), {"a": Record(Record, make(2))}), UserDict(x=make(3)), Frozen([make(4)])]
        return Ordered(a=(inner, Rows([make(5)])), b="text")

    value = nested(lambda size: torch.zeros(size))
    assert map_tensors(lambda tensor: tensor.numel(), value) == nested(lambda size: size)
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3, 4, 5]


@dataclass
class Masked:
    x: Tensor
    mask: Tensor


class Attributes(nn.Module):
    def forward(self, given: Any, write: bool = False) -> Tensor:
        product: Tensor = (given.x.mul_(2) if write else given.x) * given.mask
        return product


class Items(nn.Module):
    def forward(self, given: Any, write: bool = False) -> Tensor:
        product: Tensor = (given["x"].mul_(2) if write else given["x"]) * given["mask"]
        return product


@pytest.mark.parametrize(("module", "container"), [(Attributes(), Masked), (Items(), dict), (Items(), UserDict)])
def test_the_module_runs_on_copies_of_them(module: nn.Module, container: Callable[..., Any]) -> None:
    given = container(x=torch.ones(3), mask=torch.arange(3.0))
    other = container(x=torch.rand(3), mask=torch.rand(3))
    extractor = fxcore.create_extractor(module, ["mul"], (given,))
    assert torch.equal(extractor(other)["mul"], module(other))
    with contextlib.suppress(FxError):  # such writes cannot be rewritten
        fxcore.create_extractor(module, ["mul"], {"given": given, "write": True})
    assert torch.equal(module(given), torch.arange(3.0))


class Wrapping(MutableMapping[str, Tensor]):
    """A mapping whose copies share its items."""

    def __init__(self, **items: Tensor) -> None:
        self.items_by_name = items

    def __getitem__(self, name: str) -> Tensor:
        return self.items_by_name[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.items_by_name[name] = value

    def __delitem__(self, name: str) -> None:
        del self.items_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


def test_those_that_cannot_be_copied_stay_as_they_are() -> None:
    x, mask = torch.ones(3), torch.arange(3.0)
    for given in (Wrapping(x=x, mask=mask), MappingProxyType({"x": x, "mask": mask})):
        extractor = fxcore.create_extractor(Items(), ["mul"], (given,))
        assert torch.equal(extractor(given)["mul"], mask)
        assert given["x"] is x
        assert torch.equal(x, torch.ones(3))
