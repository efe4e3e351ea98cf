"""A module of torch.nn that is all of a model, and cannot be traced from inside.

Inside a model, such modules are kept whole. Alone, they are the only part of a module around them.
"""

from __future__ import annotations

from torch import nn

from fxcore.tracing.root_call import forward_to

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def is_layer(root: object) -> bool:
    """Return whether ``root`` is one of torch.nn's own modules, but no container of others.

    >>> is_layer(nn.GRU(2, 3)), is_layer(nn.Sequential(nn.GRU(2, 3)))
    (True, False)
    """
    return type(root).__module__.startswith("torch.nn.modules.") and not isinstance(root, _CONTAINERS)


def enclosed(layer: nn.Module) -> nn.Module:
    """Return a module whose only part is ``layer``, under the name of its class in lower case; it takes the same
    arguments.

    >>> made = enclosed(nn.Linear(2, 3))
    >>> [path for path, _ in made.named_modules()], type(made).__name__
    (['', 'linear'], 'Linear')
    """
    name = type(layer).__name__
    made: nn.Module = type(name, (nn.Module,), {"forward": forward_to(f"self.{name.lower()}", layer)})()
    made.add_module(name.lower(), layer)
    made.training = layer.training
    return made
