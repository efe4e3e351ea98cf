"""Copy modules without copying their tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def shared_copy(model: nn.Module, *, own_parameters: bool = False) -> nn.Module:
    """Deep-copy ``model``; the copy shares the storages of its tensors.

    Args:
        own_parameters: give the copy new Parameters over the same storages, so that moving, casting or freezing it does
            not affect the model. In-place writes to them still do.

    Raises:
        Exception: of any kind, if something in the model cannot be copied.

    >>> model = nn.Linear(2, 2)
    >>> frozen = shared_copy(model, own_parameters=True).requires_grad_(False)
    >>> model.weight.requires_grad, frozen.weight.data_ptr() == model.weight.data_ptr()
    (True, True)
    >>> shared_copy(model).weight is model.weight
    True
    """
    # Attributes that are tensors too: copy.deepcopy raises for tensors that are not leaves of autograd.
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    if own_parameters:
        for tensor in tensors:
            if type(tensor) is nn.Parameter:
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    return copy.deepcopy(model, memo)


def shallow_copy(model: nn.Module) -> nn.Module:
    """Copy a module, but not its submodules and tensors; attributes of the copy can be set.

    Not copy.copy, which some classes do not support.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> other = shallow_copy(model)
    >>> other.append(nn.ReLU())[0] is model[0], len(model)
    (True, 1)
    """
    made: nn.Module = object.__new__(type(model))
    made.__dict__.update(vars(model))
    made.__dict__.update({key: dict(vars(model)[key]) for key in ("_parameters", "_buffers", "_modules")})
    return made


def narrowed(model: nn.Module, taken: Sequence[str], fixed: Mapping[str, Any] | None = None) -> nn.Module:
    """A shallow copy of ``model`` whose forward takes the arguments ``taken`` only.

    torch.fx makes an input of every argument, even of ``mask=None``, whose proxy is not None.

    Args:
        fixed: values of other arguments; the rest have their defaults.

    >>> class Scaled(nn.Module):
    ...     def forward(self, x, factor=2, bias=None):
    ...         return x * factor if bias is None else x * factor + bias
    >>> narrowed(Scaled(), ["x"], {"factor": 3})(5)
    15
    """
    # torch.fx reads the names of the inputs from the code object.
    scope: dict[str, Any] = {"forward": type(model).forward, "fixed": dict(fixed or {})}
    passed = ", ".join(f"{name}={name}" for name in taken)
    exec(f"def narrow(self, {', '.join(taken)}): return forward(self, {passed}, **fixed)", scope)
    made = shallow_copy(model)
    made.__class__ = type(type(model).__name__, (type(model),), {"forward": scope["narrow"]})
    return made
