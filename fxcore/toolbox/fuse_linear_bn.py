"""Fold batch norms into the linear layers before them.

``torch.nn.utils.fusion.fuse_linear_bn_eval`` is right only for ``[N, C]``, and does not check this: a batch norm works
along dimension 1, a linear layer along the last, so for ``[N, L, C]`` with L equal to C it is silently wrong.
"""

from __future__ import annotations

from torch import fx, nn

from fxcore.copies import shallow_copy
from fxcore.passes.base import add, hooked, transform
from fxcore.passes.fuse_conv_bn import Affine, affine_of, operation_of, replace_norm, scaled
from fxcore.tracing.names import operation_name
from fxcore.tracing.writes import first_input

# Modules whose output is [N, C] for an input [N, C].
_KEEP_RANK = (
    nn.Linear,
    nn.BatchNorm1d,
    nn.Dropout,
    nn.Identity,
    nn.LayerNorm,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
)


@transform
def fuse_linear_bn(module: fx.GraphModule, *, assume_2d: bool = False) -> int:
    """Fold each batch norm into the linear layer before it, if that layer's output is ``[N, C]``.

    The fused node has the batch norm's names. The number of dimensions is known if the graph is annotated, or after a
    flatten; other pairs are not fused.

    Args:
        assume_2d: also fold if the number of dimensions is unknown.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4)).eval())
    >>> [type(m).__name__ for m in fuse_linear_bn(model).children()]
    ['Flatten', 'Linear']
    """
    made: dict[tuple[object, ...], str] = {}
    count = 0
    for node in list(module.graph.nodes):
        affine = affine_of(module, node)
        linear = first_input(node)
        if affine is None or linear is None or linear.op != "call_module" or len(linear.users) != 1:
            continue
        called = module.get_submodule(str(linear.target))
        if type(called) is not nn.Linear or hooked(called):
            continue
        if called.out_features != affine.scale.numel() or not (assume_2d or _is_2d(module, linear)):
            continue
        key = (str(linear.target), *operation_of(node))
        if key not in made:
            made[key] = add(module, str(linear.target), _fused(called, affine))
        linear.target = made[key]
        replace_norm(module, node, [linear])
        count += 1
    return count


def _fused(linear: nn.Linear, affine: Affine) -> nn.Linear:
    made = shallow_copy(linear)
    assert isinstance(made, nn.Linear)
    made.weight, made.bias = scaled(linear.weight, linear.bias, affine, transposed=False, groups=1)
    return made


def _is_2d(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether the node's value is known to be ``[N, C]``."""
    while True:
        value = node.meta.get("value", node.meta.get("tensor_meta"))
        shape = getattr(value, "shape", None)
        if shape is not None:
            return len(shape) == 2
        if _flattens(module, node):
            return True
        keeps = node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), _KEEP_RANK)
        if not keeps or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]


def _flattens(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return isinstance(called, nn.Flatten) and called.start_dim == 1 and called.end_dim == -1
    name = operation_name(node)
    if name == "flatten":
        start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
        end = node.args[2] if len(node.args) > 2 else node.kwargs.get("end_dim", -1)
        return bool(start == 1 and end == -1)
    if name in ("view", "reshape"):
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)):
            sizes = tuple(sizes[0])
        # A single argument that is a node may be a whole shape.
        return len(sizes) == 2
    return False
