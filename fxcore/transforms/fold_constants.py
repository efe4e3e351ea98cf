"""What depends on no input, computed once.

Swin's relative position biases, ViT's reshaped parameters: the graph computes them anew for every batch.

``torch.fx.experimental.const_fold`` is not used: it computes at the first forward pass (so that two threads may do it
at once), makes parameters of the results, renames every module, and loses node names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxcore.annotate import mutable
from fxcore.transforms.base import add, attribute, erase_dead, transform
from fxcore.transforms.writes import mutated_argument

_RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli",
    "multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "empty", "empty_like", "new_empty", "rrelu",
}  # fmt: skip


@transform
def fold_constants(module: fx.GraphModule) -> int:
    """Compute once whatever depends on parameters and buffers alone, and keep the results as buffers.

    Nodes that something overwrites in place stay (run ``out_of_place`` first), and so do random ones, and those whose
    value is a device or a dtype, which change when a module is moved or cast.

    >>> import torch
    >>> from torch import fx, nn
    >>> class Scaled(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = nn.Parameter(torch.zeros(4))
    ...     def forward(self, x):
    ...         return x * self.scale.exp().view(1, 4)
    >>> [n.op for n in fold_constants(fx.symbolic_trace(Scaled().eval())).graph.nodes]
    ['placeholder', 'get_attr', 'call_function', 'output']
    """
    values = _constants(module)
    count = 0
    for node in list(module.graph.nodes):
        if node not in values or node.op == "get_attr" or all(user in values for user in node.users):
            continue
        if _fold(module, node, values[node]):
            count += 1
    return count


def _constants(module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Value of each node that no input reaches and that always comes out the same."""
    overwritten = _overwritten(module)
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node in overwritten:
            continue
        if node.op == "get_attr":
            value = attribute(module, str(node.target))
            if isinstance(value, Tensor):
                values[node] = value
        elif (
            node.op.startswith("call_") and all(n in values for n in node.all_input_nodes) and _repeatable(module, node)
        ):
            try:
                values[node] = _run(module, node, values)
            except Exception:
                continue  # then it will fail, or not, where it always did
    return values


def _overwritten(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose value something writes to, and all nodes that may share memory with them."""
    modules = dict(module.named_modules())
    found = set()
    for node in module.graph.nodes:
        hit = mutated_argument(node, modules)
        inputs = node.all_input_nodes
        waiting = [*([hit] if hit is not None else []), *(inputs[i] for i in node.meta.get("mutates", ()))]
        if waiting:
            found.add(node)
        while waiting:
            base = waiting.pop()
            if base not in found:
                found.add(base)
                waiting += base.all_input_nodes
    return found


def _repeatable(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return bool(node.all_input_nodes) and not any(m.training for m in called.modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name not in _RANDOM and not node.is_impure()


def _run(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = (mutable(fx.node.map_arg(a, lambda n: values[n])) for a in (node.args, node.kwargs))
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _fold(module: fx.GraphModule, node: fx.Node, value: Any) -> bool:
    """Put ``value`` where ``node`` is, if a graph can hold it."""
    inputs = node.all_input_nodes
    if isinstance(value, Tensor):
        target = add(module, f"folded_{node.name}", value.detach())
        with module.graph.inserting_before(node):
            kept = module.graph.get_attr(target)
        kept.meta = dict(node.meta)
        node.replace_all_uses_with(kept, propagate_meta=False)
    elif isinstance(value, (int, float, bool, torch.Size)):
        plain = tuple(value) if isinstance(value, torch.Size) else value
        for user in list(node.users):
            if user.op == "output":
                return False
            user.args = fx.node.map_arg(user.args, lambda n: plain if n is node else n)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda n: plain if n is node else n)
    else:
        return False
    module.graph.erase_node(node)
    erase_dead(module.graph, *inputs)
    return True
