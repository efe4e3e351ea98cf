"""Remove operations that do nothing in eval mode."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx, nn
from torchvision import ops

from fxcore.layer_types import DROPOUTS
from fxcore.passes.base import BadParameter, erase_dead, hooked, transform
from fxcore.tracing.graph_module import called_module

_DROPOUT_MODULES = {*DROPOUTS, ops.StochasticDepth, ops.DropBlock2d, ops.DropBlock3d}
_DROPOUT_FUNCTIONS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    ops.stochastic_depth,
    ops.drop_block2d,
    ops.drop_block3d,
}


@transform
def remove(module: fx.GraphModule, *, dropout: bool = True, identity: bool = True) -> int:
    """Remove dropout (with stochastic depth and drop block) and identity, which do nothing in eval mode.

    Readers of a removed node read its input.

    Raises:
        BadParameter: both ``dropout`` and ``identity`` are False.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Dropout()).eval())
    >>> [n.name for n in remove(model).graph.nodes]
    ['input_1', '_1', 'output']
    """
    if not dropout and not identity:
        raise BadParameter(
            "remove: dropout and identity are both false, so there is nothing to remove", parameter="dropout"
        )
    count = 0
    for node in list(module.graph.nodes):
        source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("x"))
        if not isinstance(source, fx.Node) or not _does_nothing(module, node, dropout, identity):
            continue
        node.replace_all_uses_with(source, propagate_meta=False)
        erase_dead(module, node)
        count += 1
    return count


def _does_nothing(module: fx.GraphModule, node: fx.Node, dropout: bool, identity: bool) -> bool:
    if (called := called_module(module, node)) is not None:
        # Compare exact types: a subclass may do more.
        nothing = (dropout and type(called) in _DROPOUT_MODULES) or (identity and type(called) is nn.Identity)
        return nothing and not hooked(called)
    return dropout and node.target in _DROPOUT_FUNCTIONS  # in eval mode or with rate zero, as all passes require
