"""Copy modules without copying their tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

GENERATED = "<fxcore>"
"""File name of generated functions, which explanations of failures do not show as the model's."""

# Attributes of modules that hold registered tensors and submodules.
_REGISTERED = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def shared_copy(model: M, *, own_parameters: bool = False) -> M:
    """Deep-copy ``model``; the copy shares the storages of its tensors.

    Args:
        own_parameters: give the copy new Parameters over the same storages, so that moving, casting or freezing it does
            not affect the model. In-place writes to them still do.

    Raises:
        Exception: any exception, if an object in the model cannot be copied.

    >>> model = nn.Linear(2, 2)
    >>> frozen = shared_copy(model, own_parameters=True).requires_grad_(False)
    >>> model.weight.requires_grad, frozen.weight.data_ptr() == model.weight.data_ptr()
    (True, True)
    >>> shared_copy(model).weight is model.weight
    True
    """
    # Include plain tensor attributes: copy.deepcopy raises for tensors that are not leaves of autograd.
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [value for part in model.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    if own_parameters:
        for tensor in tensors:
            if type(tensor) is nn.Parameter:
                memo[id(tensor)] = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    made: M = copy.deepcopy(model, memo)
    return made


def shallow_copy(model: nn.Module) -> nn.Module:
    """Copy a module, but not its submodules and tensors; attributes, submodules and hooks of the copy can be set.

    Unlike copy.copy, this works for all classes.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> other = shallow_copy(model)
    >>> other.append(nn.ReLU())[0] is model[0], len(model)
    (True, 1)
    """
    made: nn.Module = object.__new__(type(model))
    for key, value in vars(model).items():
        if is_copied(key):
            value = copy.copy(value)
        elif isinstance(value, MethodType) and value.__self__ is model:
            value = MethodType(value.__func__, made)  # model.forward = MethodType(...)
        made.__dict__[key] = value
    return made


def is_copied(attribute: str) -> bool:
    """Return whether :func:`shallow_copy` copies the dictionary in ``attribute``, rather than share it."""
    return attribute in _REGISTERED or is_hooks(attribute)


def is_hooks(attribute: str) -> bool:
    """Return whether a module's ``attribute`` is a dictionary of hooks."""
    return attribute.endswith(_HOOKS)


def private_copy(model: nn.Module, copies: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Copy a module and its submodules, but neither tensors nor other attributes, so that its mode is independent.

    Scripted modules are not copied.

    Args:
        copies: copies by module of the modules that are already copied; new copies are added.

    >>> model = nn.Sequential(nn.Linear(2, 2)).eval()
    >>> other = private_copy(model)
    >>> _ = model.train()
    >>> other[0].training, other[0].weight is model[0].weight
    (False, True)
    """
    copies = {} if copies is None else copies
    if model not in copies and isinstance(model, torch.jit.ScriptModule):
        copies[model] = model
    if model not in copies:
        made = copies[model] = shallow_copy(model)
        for name, child in vars(model)["_modules"].items():
            vars(made)["_modules"][name] = None if child is None else private_copy(child, copies)
    return copies[model]


def own_modules(module: nn.Module, copies: dict[nn.Module, nn.Module] | None = None) -> None:
    """Replace the modules that a GraphModule calls by private copies.

    The containers on the way to them are plain Modules that torch.fx creates for each GraphModule.
    """
    copies = {} if copies is None else copies
    for name, child in module._modules.items():
        if type(child) is nn.Module:
            own_modules(child, copies)
        elif child is not None:
            module._modules[name] = private_copy(child, copies)


def narrowed(
    model: nn.Module, taken: Sequence[str], fixed: Mapping[str, Any] | None = None, *, copied: bool = True
) -> nn.Module:
    """Return a shallow copy of ``model`` whose forward has only the arguments ``taken``.

    If the class of ``model`` has its own ``__call__``, that is narrowed instead. torch.fx makes every argument an
    input, even ``mask=None``, and the proxy is not None.

    Args:
        fixed: values of other arguments; the rest have their defaults.
        copied: False to change ``model`` itself, so that hooks that refer to it see its later changes.

    >>> class Scaled(nn.Module):
    ...     def forward(self, x, factor=2, bias=None):
    ...         return x * factor if bias is None else x * factor + bias
    >>> narrowed(Scaled(), ["x"], {"factor": 3})(5)
    15
    """
    made = shallow_copy(model) if copied else model
    name = "__call__" if has_own_call(type(model)) else "forward"
    own = made.__dict__.pop(name, None)
    function, rest = own or getattr(type(model), name), dict(fixed or {})
    passed = ["self"] if own is None and takes_self(type(model), name) else []
    parameters = [*inspect.signature(function).parameters.values()][len(passed) :]
    positions = {p.name: rest.pop(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_ONLY}
    passed += [n if n in taken else f"_fxcore_positions[{n!r}]" for n in positions]
    passed += [f"{n}={n}" for n in taken if n not in positions]
    # The names begin with _fxcore since those of arguments hide them.
    scope: dict[str, Any] = {"_fxcore_function": function, "_fxcore_positions": positions, "_fxcore_fixed": rest}
    # torch.fx reads the names of the inputs from the code object.
    call = f"_fxcore_function({', '.join(passed)}, **_fxcore_fixed)"
    exec(compile(f"def narrow(self, {', '.join(taken)}): return {call}", GENERATED, "exec"), scope)
    made.__class__ = type(type(model).__name__, (type(model),), {name: scope["narrow"]})
    return made


def takes_self(kind: type, name: str) -> bool:
    """Return whether a function of a class is called with the instance: it is not static, nor a functools.partial."""
    function = inspect.getattr_static(kind, name)
    return hasattr(function, "__get__") and not isinstance(function, (staticmethod, classmethod))


def has_own_call(kind: type) -> bool:
    """Return whether a class outside torch defines ``__call__``, which runs in place of forward."""
    home = next(base for base in kind.__mro__ if "__call__" in vars(base))
    return home.__module__.split(".")[0] != "torch"
