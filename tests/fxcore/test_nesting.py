"""Tensors in nested containers."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
