"""Wrap a torch.nn layer that is the whole model and cannot be traced into.

Inside a model, such layers are leaf modules. On its own, the layer becomes the only submodule of a wrapper.
"""

from __future__ import annotations

from torch import nn

from fxcore.tracing.root_call import forward_to

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
