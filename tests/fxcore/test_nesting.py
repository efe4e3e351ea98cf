"""Tensors in nested containers, with torch's private pytree and without it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fxcore import nesting
from fxcore.nesting import map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture(params=[True, False], ids=["pytree", "no pytree"])
def with_or_without_pytree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(nesting, "_pytree", None)


@dataclass
class Record:
    first: Any
    second: Any


class Ordered(OrderedDict[str, Any]):
    """A class that pytree does not know."""


@pytest.mark.usefixtures("with_or_without_pytree")
def test_tensors_are_found_in_dataclasses_and_other_classes_of_dicts() -> None:
    value = [Record(torch.zeros(1), {"a": Record(Record, torch.zeros(2))}), Ordered(a=(torch.zeros(3),), b=3)]
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3]


@pytest.mark.usefixtures("with_or_without_pytree")
def test_tensors_are_found_and_replaced_in_every_container() -> None:
    def nested(make: Any) -> Any:
        return {"list": [make(1), None], "tuple": (make(2), "text"), "named": Pair(make(3), [make(4)])}

    value = nested(lambda size: torch.zeros(size))
    assert [len(tensor) for tensor in tensors_in(value)] == [1, 2, 3, 4]
    replaced = map_tensors(lambda tensor: tensor.numel(), value)
    assert replaced == nested(lambda size: size)
    assert type(replaced["named"]) is Pair
    assert all(isinstance(tensor, Tensor) for tensor in tensors_in(value))  # the original is untouched
