"""Replace in-place operations by out-of-place ones, in a graph and in the modules that it calls.

An in-place ReLU after a batch norm overwrites the batch norm's output: an extractor that returns both would return the
same tensor twice, and one that returns only the batch norm would return a wrong value. The rewritten graph computes the
same as the original, and every node keeps its own value.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from fxcore.copies import shallow_copy
from fxcore.layer_types import has_inplace_setting
from fxcore.passes.base import replace_modules, transform
from fxcore.passes.functionalize import functionalize


@transform
def out_of_place(module: fx.GraphModule) -> int:
    """Replace in-place operations, in the graph and in the modules that it calls, by out-of-place ones.

    Raises:
        CannotTransform: see :func:`~fxcore.passes.functionalize.functionalize`.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)).eval())
    >>> out_of_place(model).get_submodule("1")
    ReLU()
    """
    count = functionalize(module.graph, dict(module.named_modules()))
    replace_modules(module, _pure_module)
    return count


def _pure_module(module: nn.Module) -> nn.Module:
    """Return ``module``, or an out-of-place copy with the same parameters if it or a part of it is in-place."""
    if isinstance(module, torch.jit.ScriptModule):
        return module  # functionalize has made it overwrite copies
    if isinstance(module, fx.GraphModule):
        return module  # its graph would have to be rewritten too; no model has one inside
    children = {name: child and _pure_module(child) for name, child in module._modules.items()}
    in_place = has_inplace_setting(module)
    if not in_place and all(child is module._modules[name] for name, child in children.items()):
        return module
    made = shallow_copy(module)
    made.__dict__["_modules"] = children
    if in_place:
        made.inplace = False  # type: ignore[assignment]
    return made
