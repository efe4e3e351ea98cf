"""Extractors of modules whose arguments hold tensors in containers."""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcore
from fxcore.errors import BadTensor, FxError


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


class Holder:
    def __init__(self) -> None:
        self.x, self.mask = torch.ones(3), torch.arange(3.0)


class Frozen(tuple[Any, ...]):
    """A class that is neither known to pytree nor can be written to."""


@pytest.mark.parametrize("value", [Holder(), [Holder()], Frozen([torch.ones(3)])])
def test_tensors_in_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(BadTensor, match=r"'given' of Attributes has tensors in a (Holder|Frozen).*dataclasses"):
        fxcore.create_extractor(Attributes(), ["mul"], (value,))


HELD = Holder()


def test_those_of_defaults_are_fixed() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, held: Any = HELD) -> Tensor:
            product: Tensor = x * held.mask
            return product

    extractor = fxcore.create_extractor(Net(), ["mul"], torch.ones(3))
    assert torch.equal(extractor(torch.ones(3))["mul"], torch.arange(3.0))
