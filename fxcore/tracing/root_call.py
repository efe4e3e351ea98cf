"""Trace the call of a module rather than the forward of its class.

torch.fx traces ``type(root).forward``. It misses hooks of the root, ``root.forward = ...``, and a ``__call__`` defined
by its class, all of which run when the root is called (pytorch#105445), and passes the root to a static forward too. It
traces into layers of torch.nn that are the root, which it keeps whole inside a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fxcore.copies import GENERATED, has_own_call, shallow_copy, takes_self

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def called_otherwise(root: nn.Module) -> bool:
    """Return whether calling ``root`` runs anything other than the forward of its class, or does not pass it ``root``.

    >>> model = nn.ReLU()
    >>> called_otherwise(model), called_otherwise(model.register_forward_hook(print) and model)
    (False, True)
    """
    if root._forward_hooks or root._forward_pre_hooks:
        return True
    if isinstance(root, fx.GraphModule):
        return False
    return "forward" in vars(root) or has_own_call(type(root)) or not takes_self(type(root), "forward")


def entry(root: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a module to trace in place of ``root``, whose forward calls a copy of ``root``, and that copy.

    Both share the submodules and tensors of ``root``.

    >>> model = nn.Linear(2, 3)
    >>> _ = model.register_forward_hook(lambda module, inputs, output: output * 0 + 1)
    >>> import torch
    >>> made, _ = entry(model)
    >>> made.forward(torch.ones(2)).tolist()
    [1.0, 1.0, 1.0]
    """
    made, inner = shallow_copy(root), shallow_copy(root)
    made.__dict__.pop("forward", None)
    forward = forward_to("_fxcore_inner", root, _fxcore_inner=inner)
    made.__class__ = type(type(root).__name__, (type(root),), {"forward": forward})
    return made, inner


def is_layer(root: object) -> bool:
    """Return whether ``root`` is one of torch.nn's own modules and not a container.

    >>> is_layer(nn.GRU(2, 3)), is_layer(nn.Sequential(nn.GRU(2, 3)))
    (True, False)
    """
    return type(root).__module__.startswith("torch.nn.modules.") and not isinstance(root, _CONTAINERS)


def enclosed(layer: nn.Module) -> nn.Module:
    """Wrap ``layer`` in a module that takes the same arguments; its only submodule is named after the layer's class, in
    lower case.

    >>> made = enclosed(nn.Linear(2, 3))
    >>> [path for path, _ in made.named_modules()], type(made).__name__
    (['', 'linear'], 'Linear')
    """
    name = type(layer).__name__
    made: nn.Module = type(name, (nn.Module,), {"forward": forward_to(f"self.{name.lower()}", layer)})()
    made.add_module(name.lower(), layer)
    made.training = layer.training
    return made


def forward_to(called: str, root: nn.Module, **names: Any) -> Callable[..., Any]:
    """Return a method with the parameters of ``root`` that calls the expression ``called`` with them.

    Args:
        names: names that the expression may use in addition to ``self``, unlike those of any parameter.
    """
    parameters = _parameters(root)
    kinds = inspect.Parameter
    stars: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    taken, passed, defaults = ["self"], [], {}
    keyword_only = False
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        if kind is kinds.KEYWORD_ONLY and not keyword_only:
            taken.append("*")
        keyword_only = keyword_only or kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        given = ""
        if parameter.default is not parameter.empty:
            defaults[name], given = parameter.default, f"=_fxcore_defaults[{name!r}]"
        taken.append(stars.get(kind, "") + name + given)
        passed.append(f"{name}={name}" if kind is kinds.KEYWORD_ONLY else stars.get(kind, "") + name)
    scope: dict[str, Any] = {**names, "_fxcore_defaults": defaults}
    # torch.fx reads the names of the inputs from the code object.
    source = f"def forward({', '.join(taken)}): return {called}({', '.join(passed)})"
    exec(compile(source, GENERATED, "exec"), scope)
    made: Callable[..., Any] = scope["forward"]
    return made


def _parameters(root: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of a call of ``root``: those of its own ``__call__``, or of its forward if there is no such
    ``__call__`` or it has only ``*args, **kwargs``."""
    calls: list[Any] = [root.__call__] if has_own_call(type(root)) else []
    found: list[inspect.Parameter] = []
    plain = shallow_copy(root)
    plain.__dict__.pop("forward", None)
    for function in (*calls, root.forward, plain.forward):
        found = [*inspect.signature(function).parameters.values()]
        if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
            break
    return found
