"""Copies of modules that take no memory for tensors."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def shared_copy(model: nn.Module, *, own_parameters: bool = False) -> nn.Module:
    """A deep copy of ``model`` over the model's own memory.

    Args:
        own_parameters: give the copy Parameters of its own, so that the model stays where it is when the copy is moved,
            cast or frozen. What is written into them is written into the model's; assign instead.

    Raises:
        Exception: of any kind, if something in the model cannot be copied.

    >>> model = nn.Linear(2, 2)
    >>> frozen = shared_copy(model, own_parameters=True).requires_grad_(False)
    >>> model.weight.requires_grad, frozen.weight.data_ptr() == model.weight.data_ptr()
    (True, True)
    >>> shared_copy(model).weight is model.weight
    True
    """
    # Attributes that are tensors, too: copy.deepcopy refuses computed ones.
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    if own_parameters:
        for tensor in tensors:
            if type(tensor) is nn.Parameter:
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    return copy.deepcopy(model, memo)
