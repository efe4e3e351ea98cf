"""Normalize the arguments of calls, so that equal calls have equal nodes."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.fx.operator_schemas import ArgsKwargsPair, create_type_hint, get_signature_for_torch_op

from fxcore.passes.base import transform


@transform
def normalize_arguments(module: fx.GraphModule) -> int:
    """Pass the first argument of torch's functions and modules by position and all others, with defaults, by name.

    The names are those of ``torch.fx.Node.normalized_arguments``. ``torch.fx``'s ``NormalizeArgs`` is not used: it also
    names the first argument, which passes read by position. Methods, operators, and calls with several possible
    overloads whose arguments differ are left unchanged.

    >>> model = fx.symbolic_trace(lambda x: torch.flatten(x, 1) + torch.flatten(input=x, start_dim=1)).eval()
    >>> for node in normalize_arguments(model).graph.find_nodes(op="call_function", target=torch.flatten):
    ...     print(node.format_node())
    %flatten : [num_users=1] = call_function[target=torch.flatten](args = (%x,), kwargs = {start_dim: 1, end_dim: -1})
    %flatten_1 : [num_users=1] = call_function[target=torch.flatten](args = (%x,), kwargs = {start_dim: 1, end_dim: -1})
    """
    count = 0
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_module") or "out" in node.kwargs:
            continue
        found = _normalized(module, node)
        if found is None:
            continue
        kwargs = dict(found.kwargs)
        first = next(iter(kwargs), None)
        args = () if first is None or _only_by_name(module, node, first) else (kwargs.pop(first),)
        if (args, kwargs) != (tuple(node.args), dict(node.kwargs)):
            node.args, node.kwargs = args, kwargs
            count += 1
    return count


def _normalized(module: fx.GraphModule, node: fx.Node) -> ArgsKwargsPair | None:
    """Return all arguments by name; None if the names are unknown, or depend on unknown types."""
    with contextlib.suppress(Exception):  # several overloads, or no matching signature
        found = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
        if found is not None:
            return found
    if node.op != "call_function" or not get_signature_for_torch_op(node.target):  # type: ignore[arg-type]
        return None
    found = None
    for unknown in (Tensor, int):
        with contextlib.suppress(Exception):
            types, named = _types(node, unknown)
            one = node.normalized_arguments(module, types, named, normalize_to_only_use_kwargs=True)
            if one is not None and found is not None and one != found:
                return None
            found = found or one
    return found


def _only_by_name(module: fx.GraphModule, node: fx.Node, name: str) -> bool:
    target = module.get_submodule(node.target).forward if isinstance(node.target, str) else node.target
    with contextlib.suppress(TypeError, ValueError):  # torch's builtins accept the first argument by position
        known = inspect.signature(target).parameters.get(name)
        return known is not None and known.kind is inspect.Parameter.KEYWORD_ONLY
    return False


def _types(node: fx.Node, unknown: type) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the types of a call's arguments, positional and named.

    Types come from annotations. Without annotations, the first node is assumed to be a tensor, which is right for all
    of torch's functions with overloads, and other nodes to be ``unknown``.
    """
    first = next(iter(node.all_input_nodes), None)

    def kind(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return type(argument)
        if "value" in argument.meta:
            return torch.Tensor if isinstance(argument.meta["value"], Tensor) else type(argument.meta["value"])
        return Tensor if argument is first else unknown

    args, kwargs = map_aggregate((node.args, node.kwargs), kind)
    return tuple(create_type_hint(a) for a in args), {key: create_type_hint(a) for key, a in kwargs.items()}
