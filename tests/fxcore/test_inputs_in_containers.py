"""Extractors of modules whose arguments hold tensors in containers."""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcore
from fxcore.errors import FxError


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
