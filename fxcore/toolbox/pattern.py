"""Replace subgraphs that match a pattern.

``torch.fx.subgraph_rewriter`` is not used: it matches modules only by path, not by class; it needs literals spelled as
in the model; and it does not give new nodes public names, so that extractable nodes are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fxcore.errors import FxError
from fxcore.passes.base import erase_dead, transform
from fxcore.toolbox.insert import AppendingTracer, rewrite
from fxcore.toolbox.replace import alias_readers
from fxcore.tracing.tracer import record
from fxcore.tracing.writes import overwritten, possible_memory


class BadPattern(FxError):
    """The pattern is invalid."""


class AnyOf:
    """An operation of a pattern that matches any of several operations; returned by :func:`op`."""

    def __init__(self, alternatives: tuple[Any, ...], name: str | None) -> None:
        self.alternatives = alternatives
        self.name = name
        self.__name__ = name or "op"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        proxy = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
        if proxy is None:
            raise BadPattern("an operation of a pattern must be applied to an argument of the pattern or a value of it")
        return proxy.tracer.create_proxy("call_function", self, args, kwargs)

    def matches(self, module: fx.GraphModule, node: fx.Node) -> bool:
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            return any(isinstance(a, type) and isinstance(called, a) for a in self.alternatives)
        return node.op in ("call_function", "call_method") and (
            not self.alternatives or node.target in self.alternatives
        )


def op(*alternatives: Callable[..., Any] | type[nn.Module] | str, name: str | None = None) -> AnyOf:
    """Return an operation for a pattern that matches any of some functions, module classes, or tensor methods by name.

    Literal arguments that the pattern does not specify may have any value.

    Args:
        alternatives: the operations to match; if empty, any function or method matches.
        name: keyword argument by which the replacement gets the matched operation, to call it again.

    >>> import torch
    >>> model = fx.symbolic_trace(lambda x: torch.relu(x) + x.relu() + torch.tanh(x)).eval()
    >>> flat = replace_pattern(model, lambda x: op(torch.relu, "relu")(x), lambda x: x * 0)
    >>> float(flat(torch.tensor(1.0))) == float(torch.tanh(torch.tensor(1.0)))
    True
    """
    return AnyOf(alternatives, name)


@dataclass
class _Match:
    bound: dict[fx.Node, Any] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)  # pattern node → graph node


@transform
def replace_pattern(module: fx.GraphModule, pattern: Callable[..., Any], replacement: Callable[..., Any]) -> int:
    """Replace each subgraph that matches ``pattern`` by the operations of ``replacement``.

    Both are functions of the same arguments, which are wildcards: they match any value or literal. Operations of the
    pattern are written as in the model, or as ``op(nn.Conv2d, name="conv")(x)``. Named operations are passed to the
    replacement as keyword arguments: functions that repeat the matched call with other arguments. A match is not
    replaced if its inner values have other readers, including the output, or if its arguments are overwritten between
    its operations. The result gets the last matched node's name. ``applied(module)[-1].changes`` is the number of
    replacements.

    Raises:
        BadPattern: the pattern does not return the result of an operation, or contains a tensor.

    >>> import torch
    >>> from torch import fx, nn
    >>> from fxcore.transforms import applied
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval())
    >>> def conv_relu(x): return op(nn.ReLU, torch.relu)(op(nn.Conv2d, name="conv")(x))
    >>> def conv_gelu(x, conv): return torch.nn.functional.gelu(conv(x))
    >>> changed = replace_pattern(model, conv_relu, conv_gelu)
    >>> applied(changed)[-1].changes, [n.name for n in changed.graph.nodes]
    (1, ['input_1', '_0_1', 'gelu', 'output'])
    """
    graph, _ = record(pattern)
    wildcards = [n for n in graph.nodes if n.op == "placeholder"]
    last = graph.output_node().args[0]
    if not isinstance(last, fx.Node) or not last.op.startswith("call_"):
        raise BadPattern("a pattern must return the result of one operation")
    if any(n.op == "get_attr" for n in graph.nodes):
        raise BadPattern("a pattern cannot hold a tensor; write an argument in its place, which stands for any value")
    count = 0
    for anchor in list(module.graph.nodes):
        # An earlier match may have erased it.
        if anchor._erased or anchor.op == "output":
            continue
        match = _Match()
        if not _matches(module, last, anchor, match) or not _is_self_contained(module, match, anchor):
            continue
        if _is_overwritten(module, match, anchor):
            continue
        _replace(module, anchor, match, wildcards, replacement)
        count += 1
    return count


def _matches(module: fx.GraphModule, wanted: Any, found: Any, match: _Match) -> bool:
    """Return whether ``found`` in the graph matches ``wanted`` in the pattern, and add matching nodes to ``match``.

    Both are nodes, containers or literals.
    """
    if not isinstance(wanted, fx.Node):
        if isinstance(wanted, (list, tuple)):
            same = isinstance(found, (list, tuple)) and len(wanted) == len(found)
            return same and all(_matches(module, w, f, match) for w, f in zip(wanted, found, strict=True))
        return not isinstance(found, fx.Node) and type(wanted) is type(found) and bool(wanted == found)
    if wanted.op == "placeholder":
        if wanted in match.bound:
            return match.bound[wanted] is found or (
                not isinstance(found, fx.Node) and bool(match.bound[wanted] == found)
            )
        match.bound[wanted] = found
        return True
    if not isinstance(found, fx.Node):
        return False
    if wanted in match.nodes:
        return match.nodes[wanted] is found
    if isinstance(wanted.target, AnyOf):
        if not wanted.target.matches(module, found) or len(found.args) < len(wanted.args):
            return False
        unspelled = [*found.args[len(wanted.args) :], *(v for k, v in found.kwargs.items() if k not in wanted.kwargs)]
        if any(map(_has_node, unspelled)) or not set(wanted.kwargs) <= set(found.kwargs):
            return False
    elif (
        wanted.op != found.op
        or wanted.target != found.target
        or len(wanted.args) != len(found.args)
        or set(wanted.kwargs) != set(found.kwargs)
    ):
        return False
    match.nodes[wanted] = found
    return all(_matches(module, w, f, match) for w, f in zip(wanted.args, found.args, strict=False)) and all(
        _matches(module, w, found.kwargs[k], match) for k, w in wanted.kwargs.items()
    )


def _has_node(value: Any) -> bool:
    """Return whether ``value`` is or contains a node."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return bool(found)


def _is_self_contained(module: fx.GraphModule, match: _Match, anchor: fx.Node) -> bool:
    """Return whether no node outside the match reads its inner values or memory that it overwrites."""
    inside = set(match.nodes.values())
    for node in inside - {anchor}:
        written = overwritten(module, node)
        after = [user for user in written.users if user > node] if written is not None else []
        if not inside.issuperset((*node.users, *after, *alias_readers(module, node))):
            return False
    return True


def _is_overwritten(module: fx.GraphModule, match: _Match, anchor: fx.Node) -> bool:
    """Return whether arguments of the match may be overwritten before ``anchor``, where the replacement would read
    them: by a node outside the match, or by one of the match that is given another view of them."""
    inside = set(match.nodes.values())
    between = [node for node in module.graph.nodes if min(inside) <= node < anchor]
    written = [(base, node in inside) for node in between if (base := overwritten(module, node)) is not None]
    if not written:
        return False
    memory = possible_memory(module.graph, dict(module.named_modules()))
    arguments: list[fx.Node] = []
    fx.node.map_arg(list(match.bound.values()), arguments.append)
    return any(
        not memory[base].isdisjoint(memory[node]) and not (ours and node is base)
        for base, ours in written
        for node in arguments
    )


def _replace(
    module: fx.GraphModule, anchor: fx.Node, match: _Match, wildcards: list[fx.Node], replacement: Callable[..., Any]
) -> None:
    named = {p.target.name: n for p, n in match.nodes.items() if isinstance(p.target, AnyOf) and p.target.name}
    tracer = AppendingTracer(module)

    def again(node: fx.Node) -> Callable[..., fx.Proxy]:
        def call(*args: Any, **kwargs: Any) -> fx.Proxy:
            # Literals default to those of the matched call.
            rest = [a for a in node.args[len(args) :] if not _has_node(a)]
            kept = {k: v for k, v in node.kwargs.items() if not _has_node(v)}
            return tracer.repeat(node, (*args, *rest), {**kept, **kwargs})

        return call

    def make(call: Any, args: Any, kwargs: Any) -> Any:
        values = [match.bound.get(w) for w in wildcards]
        proxies: list[Any] = fx.node.map_arg(values, lambda n: fx.Proxy(n, tracer))  # type: ignore[arg-type,return-value]
        return replacement(*proxies, **{name: again(node) for name, node in named.items()})

    rewrite(module, anchor, make)
    # Those that write are not dead, but what they overwrite is read only inside the match.
    for node in sorted(match.nodes.values(), reverse=True):
        erase_dead(module, node)
