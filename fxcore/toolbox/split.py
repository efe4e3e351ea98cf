"""Split a module in two after a node."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from fxcore.passes.base import CannotTransform, finish, fork, require_eval
from fxcore.toolbox.insert import find_node
from fxcore.tracing.graph_module import GraphModule
from fxcore.tracing.names import public_name


class Halves(NamedTuple):
    """The two halves of a module: ``back(*front(*inputs))`` equals ``module(*inputs)``.

    Attributes:
        front: takes the inputs and returns a tuple of the values that cross the cut.
        back: takes those values and returns the output of the module.
        crossing: public names of the nodes whose values cross the cut, in order.

    >>> import torch
    >>> halves = split_at(fx.symbolic_trace(lambda x: torch.exp(x) + x).eval(), "exp")
    >>> halves.crossing
    ('x', 'exp')
    >>> halves.back(*halves.front(torch.tensor(0.0)))
    tensor(1.)
    """

    front: fx.GraphModule
    back: fx.GraphModule
    crossing: tuple[str, ...]

    def __call__(self, *inputs: Any) -> Any:
        return self.back(*self.front(*inputs))


def split_at(module: fx.GraphModule, node: str) -> Halves:
    """Split ``module`` in two right after ``node``, in execution order.

    The nodes up to ``node`` run in the front, the others in the back; values that the back needs, tensors or sizes,
    cross the cut. Both halves share the module's parameters.

    ``torch.fx.passes.split_module`` is not used: it needs a partition of every node, passes parameters across as
    arguments, renames modules, and loses node names.

    Raises:
        CannotTransform: there is no such node, or the module is in train mode.

    >>> import torch
    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval())
    >>> halves = split_at(model, "_1")
    >>> halves.crossing, [type(m).__name__ for m in halves.back.children()]
    (('_1',), ['Linear'])
    >>> x = torch.ones(1, 4)
    >>> torch.equal(halves(x), model(x))
    True
    """
    require_eval(module, "split_at")
    module = fork(module)
    cut = find_node(module, node, "split_at")
    if cut.op == "get_attr":
        raise CannotTransform(
            f"{node!r} is a parameter; cut after a node that computes something", transform="split_at", node=node
        )
    # Inputs may be used on both sides, but all of them belong to the front.
    nodes = list(module.graph.nodes)
    end = 1 + max(nodes.index(n) for n in (cut, *module.graph.find_nodes(op="placeholder")))
    ahead, behind = nodes[:end], nodes[end:]
    read_ahead = {m for n in ahead for m in n.all_input_nodes}
    read_behind = {m for n in behind for m in n.all_input_nodes}
    crossing = [n for n in ahead if n.op != "get_attr" and n in read_behind]
    front = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for n in ahead:
        if n.op != "get_attr" or n in read_ahead:
            copies[n] = front.node_copy(n, lambda m: copies[m])
    front.output(tuple(copies[n] for n in crossing))
    back = fx.Graph()
    moved: dict[fx.Node, fx.Node] = {}
    for n in crossing:
        moved[n] = back.placeholder(n.name)
        moved[n].meta = dict(n.meta)
    parameters = [n for n in ahead if n.op == "get_attr" and n in read_behind]
    for n in parameters + behind:
        if n.op == "output":
            back.output(fx.node.map_arg(n.args[0], lambda m: moved[m]))
        else:
            moved[n] = back.node_copy(n, lambda m: moved[m])
    name = type(module).__name__
    halves = (GraphModule(module, front, f"{name}_front"), GraphModule(module, back, f"{name}_back"))
    return Halves(finish(halves[0]), finish(halves[1]), tuple(public_name(n) for n in crossing))
