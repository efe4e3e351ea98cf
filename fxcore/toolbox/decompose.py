"""Decompose operations into simpler ones, by tracing rules in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fxcore.passes.base import BadParameter, transform
from fxcore.toolbox.insert import rewrite
from fxcore.toolbox.replace import ACTIVATIONS, MODULES, check_operation, is_activation

Rule = Callable[..., Any]

#: decompositions by name; each is a function of the tensor that the operation is applied to
RULES: dict[str, Rule] = {
    "relu": lambda x: (x > 0) * x,
    "relu6": lambda x: torch.clamp(x, 0, 6),
    "hardsigmoid": lambda x: torch.clamp(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * torch.clamp(x + 3, 0, 6) / 6,
    "silu": lambda x: x * torch.sigmoid(x),
    "mish": lambda x: x * torch.tanh(torch.clamp(x, min=0) + torch.log1p(torch.exp(-torch.abs(x)))),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}
_CLASSES: dict[Any, str] = {MODULES[name]: name for name in RULES}


@transform
def decompose(
    module: fx.GraphModule,
    operations: Iterable[str] = tuple(RULES),
    *,
    rules: Mapping[Callable[..., Any] | str, Rule] | None = None,
) -> int:
    """Rewrite operations by rules. ReLU becomes ``(x > 0) * x``, which is NaN instead of 0 at minus infinity.

    Args:
        operations: names in :data:`RULES`; these match functions, methods and modules.
        rules: additional rules for functions, or for tensor methods by name. A rule is called with proxies of the
            call's arguments and returns the replacement.

    Raises:
        BadParameter: a name is unknown, a rule is not for a function or tensor method, or there is no rule at all.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.ReLU().eval())
    >>> [n.name for n in decompose(model, ["relu"]).graph.nodes]
    ['input_1', 'gt', 'mul', 'output']
    """
    if not isinstance(operations, Iterable) or not isinstance(rules, Mapping | None):
        wrong, value = ("rules", rules) if isinstance(operations, Iterable) else ("operations", operations)
        wants = "a dictionary, operation to function" if wrong == "rules" else "a list of names"
        raise BadParameter(f"decompose: {wrong} is {wants}, not {value!r:.100}", parameter=wrong)
    wanted = [operations] if isinstance(operations, str) else list(operations)
    for key, given in (rules or {}).items():
        if key in _CLASSES:
            raise BadParameter(
                f"decompose: {key} is a module's class, and rules are for functions and tensor methods; its own rule "
                f"goes by the name {_CLASSES[key]!r} in operations, and replace_module replaces modules",
                parameter="rules",
            )
        check_operation(key, "decompose", "rules")
        if not callable(given):
            raise BadParameter(f"decompose: the rule for {key} is not a function but {given!r}", parameter="rules")
    if not wanted and not rules:
        raise BadParameter("decompose: neither operations nor rules are given", parameter="operations")
    unknown = [name for name in wanted if name not in tuple(RULES)]  # it may have no hash
    if unknown:
        raise BadParameter(
            f"there is no rule for {unknown[0]!r}; there are rules for {', '.join(RULES)}", parameter="operations"
        )
    count = 0
    for node in list(module.graph.nodes):
        theirs = (rules or {}).get(node.target) if node.op in ("call_function", "call_method") else None
        rule = theirs or _own_rule(module, node, wanted)
        if rule is not None:
            rewrite(module, node, lambda call, args, kwargs, rule=rule: rule(*args, **kwargs))  # type: ignore[misc]
            count += 1
    return count


def _own_rule(module: fx.GraphModule, node: fx.Node, wanted: Iterable[str]) -> Rule | None:
    """Return the rule of the first of ``wanted`` that matches ``node``, as a function of the node's own arguments."""
    for name in wanted:
        if name in ACTIVATIONS and is_activation(module, node, name) and _holds(module, node, name):
            return lambda *args, **kwargs: RULES[name](args[0] if args else kwargs["input"])
    return None


def _holds(module: fx.GraphModule, node: fx.Node, name: str) -> bool:
    """Return whether the rule holds for the node's arguments; GELU's is that of the exact function."""
    if name != "gelu":
        return True
    if node.op == "call_module":
        return bool(module.get_submodule(str(node.target)).approximate == "none")
    return bool(node.kwargs.get("approximate", "none") == "none") and len(node.args) < 2
