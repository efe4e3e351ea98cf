"""Insert operations after or around a node."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from fxcore.passes.base import CannotTransform, add, erase_dead, transform
from fxcore.toolbox.replace import alias_readers, named_function, redirect_readers
from fxcore.tracing.names import PATH, public_name
from fxcore.tracing.writes import overwritten


def find_node(module: fx.GraphModule, name: str, transform: str) -> fx.Node:
    """Return the node with the public or fx name ``name``.

    Args:
        transform: name of the pass, for the error.

    Raises:
        CannotTransform: there is no such node.
    """
    named: list[fx.Node] = [node for node in module.graph.nodes if node.meta.get(PATH) == name]
    named += [node for node in module.graph.nodes if node.name == name and node.op != "output"]
    if not named:
        raise CannotTransform(
            f"{transform}: the graph has no node {name!r}; name one of its nodes", transform=transform, node=name
        )
    return named[0]


@transform
def insert_after(
    module: fx.GraphModule,
    node: str,
    function: str | Callable[..., Any] | nn.Module,
    *,
    outputs: bool = False,
    name: str | None = None,
) -> int:
    """Apply ``function`` to a node's value before the nodes after it read it.

    Nodes that later read the value that an in-place node overwrites read the new one, too.

    Args:
        node: public or fx name.
        function: a function of one argument, a module, or the name of an activation function. A module is set to
            eval mode.
        outputs: whether to replace the value in the graph's outputs, too.
        name: last part of the new node's name, which follows that of ``node``; by default the function's name.

    Raises:
        CannotTransform: there is no such node, nothing would read the new value, or other nodes read the old one
            through views.

    >>> import torch
    >>> from torch import fx
    >>> model = fx.symbolic_trace(lambda x: torch.neg(x) + 1).eval()
    >>> float(insert_after(model, "neg", torch.exp)(torch.tensor(0.0)))
    2.0
    """
    found = find_node(module, node, "insert_after")
    base = overwritten(module, found)
    if base is not None and found.target is not operator.setitem:  # it returns nothing to read
        base.replace_all_uses_with(found, delete_user_cb=lambda user: user > found, propagate_meta=False)
    if alias_readers(module, found):
        raise CannotTransform(f"{node!r} overwrites memory that other nodes read later through views; use wrap")
    readers = [user for user in found.users if outputs or user.op != "output"]
    if not found.users:
        raise CannotTransform(f"nothing reads {node!r}")
    if not readers:
        raise CannotTransform(f"only the output reads {node!r}, and its value stays the same; set outputs to change it")
    with module.graph.inserting_after(found):
        if isinstance(function, nn.Module):
            function.eval()
            made = module.graph.call_module(
                add(module, f"{found.name}_{name or type(function).__name__.lower()}", function), (found,)
            )
        else:
            made = module.graph.call_function(named_function(function), (found,))
    made.meta = {PATH: f"{public_name(found)}.{name or made.name}"}
    for reader in readers:
        reader.replace_input_with(found, made)
    return 1


@transform
def wrap(module: fx.GraphModule, node: str, wrapper: Callable[..., Any]) -> int:
    """Replace ``y = f(x, …)`` by ``y = wrapper(f, x, …)``.

    ``wrapper`` runs once, with proxies, and its operations become nodes; it may call ``f`` any number of times. Its
    result gets the node's name and replaces the node in the outputs. If ``f`` is in-place, it gets copies, and later
    readers of the overwritten value read the result of ``wrapper``. If views of that value are read later too, the
    result is copied into it, and must have its shape.

    Raises:
        CannotTransform: there is no such node, or it is not a call.

    >>> import torch
    >>> from torch import fx
    >>> model = fx.symbolic_trace(lambda x: torch.exp(x)).eval()
    >>> round(float(wrap(model, "exp", lambda f, x: f(x) - f(-x))(torch.tensor(1.0))), 4)
    2.3504
    """
    found = find_node(module, node, "wrap")
    if found.op in ("placeholder", "get_attr"):
        raise CannotTransform(f"{node!r} is not a call and cannot be wrapped", node=node)
    rewrite(module, found, lambda call, args, kwargs: wrapper(call, *args, **kwargs))
    return 1


class AppendingTracer(fx.proxy.GraphAppendingTracer):
    """A tracer that appends operations on proxies to a module's graph; foreign tensors become buffers of the module."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module.graph)
        self.module = module

    def create_arg(self, a: Any) -> Any:
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        own = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
        known = next((path for path, tensor in own if tensor is a), None)
        return self.graph.get_attr(known or add(self.module, "constant", a))

    def repeat(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
        """Repeat the call of ``node`` with other arguments, passing a copy to an in-place call."""
        if overwritten(self.module, node) is not None:
            if args:
                args = (args[0].clone(), *args[1:])
            else:
                kwargs = {**kwargs, "input": kwargs["input"].clone()}
        return self.create_proxy(node.op, node.target, args, kwargs)


Call = Callable[..., fx.Proxy]


def rewrite(
    module: fx.GraphModule, node: fx.Node, with_what: Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
) -> fx.Node:
    """Run ``with_what(call, args, kwargs)`` on proxies of the node's arguments, and replace the node by the result.

    ``call`` repeats the node's call with any arguments, never in place. The result gets the node's name; other new
    nodes get names below it.

    Raises:
        CannotTransform: ``with_what`` does not return a proxy.
    """
    redirect_readers(module, node)
    graph = module.graph
    tracer = AppendingTracer(module)
    before = set(graph.nodes)

    def proxies(arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda n: fx.Proxy(n, tracer))  # type: ignore[arg-type,return-value]

    def call(*args: Any, **kwargs: Any) -> fx.Proxy:
        return tracer.repeat(node, args, kwargs)

    with graph.inserting_before(node):
        result = with_what(call, tuple(proxies(node.args)), dict(proxies(node.kwargs)))
    path = public_name(node)
    if not isinstance(result, fx.Proxy):
        raise CannotTransform(
            f"the replacement of {path!r} must return a value computed from its arguments",
            transform="rewrite",
            node=path,
        )
    fresh = [n for n in graph.nodes if n not in before and n.op != "get_attr"]
    for made in fresh:
        made.meta.setdefault(PATH, f"{path}.{made.name}")
    if result.node in fresh:
        result.node.meta = dict(node.meta)
    node.replace_all_uses_with(result.node, propagate_meta=False)
    erase_dead(module, node)
    return result.node
