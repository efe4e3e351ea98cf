"""Replace operations and modules by others."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxcore.passes.base import (
    BadParameter,
    CannotTransform,
    add,
    erase_dead,
    hooked,
    transform,
)
from fxcore.tracing.writes import first_input, is_number, overwritten, possible_memory


def identity(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


#: functions and modules that apply activation functions, by name
_BY_NAME: dict[str, tuple[Callable[[Tensor], Tensor], type[nn.Module]]] = {
    "elu": (F.elu, nn.ELU),
    "gelu": (F.gelu, nn.GELU),
    "hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid),
    "hardswish": (F.hardswish, nn.Hardswish),
    "identity": (identity, nn.Identity),
    "leaky_relu": (F.leaky_relu, nn.LeakyReLU),
    "mish": (F.mish, nn.Mish),
    "relu": (F.relu, nn.ReLU),
    "relu6": (F.relu6, nn.ReLU6),
    "selu": (F.selu, nn.SELU),
    "sigmoid": (torch.sigmoid, nn.Sigmoid),
    "silu": (F.silu, nn.SiLU),
    "softplus": (F.softplus, nn.Softplus),
    "tanh": (torch.tanh, nn.Tanh),
}
#: activation functions that passes accept by name
ACTIVATIONS = {name: function for name, (function, _) in _BY_NAME.items()}
#: modules that apply these functions, by the same names
MODULES = {name: kind for name, (_, kind) in _BY_NAME.items()}


def named_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, or the activation function of that name.

    Raises:
        BadParameter: there is no activation function of that name, or ``function`` is neither a function nor a name.
    """
    if callable(function):
        return function
    if not isinstance(function, str):
        raise BadParameter(
            f"pass a function or the name of an activation function, not a {type(function).__name__}",
            transform="replace",
            parameter="function",
        )
    if function not in ACTIVATIONS:
        raise BadParameter(
            f"there is no function {function[:64]!r}; there are {', '.join(ACTIVATIONS)}",
            transform="replace",
            parameter="function",
        )
    return ACTIVATIONS[function]


def check_operation(given: Any, transform: str, parameter: str) -> None:
    """Check that a graph can call ``given``: a function, or the name of a tensor method.

    Args:
        transform, parameter: names of the pass and of its parameter, for the error.

    Raises:
        BadParameter: a graph cannot call ``given``.
    """
    wrong = None
    if isinstance(given, str):
        if not hasattr(Tensor, given):
            wrong = f"{given[:64]!r} is not a tensor method; pass functions themselves"
    elif isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module)):
        wrong = f"{given if isinstance(given, type) else type(given)} is a module; replace_module replaces modules"
    elif not callable(given):
        wrong = f"{given!r} is neither a function nor the name of a tensor method"
    if wrong is not None:
        raise BadParameter(f"{transform}: {wrong}", transform=transform, parameter=parameter)


@transform
def replace_op(
    module: fx.GraphModule,
    old: Callable[..., Any] | str | Collection[Callable[..., Any] | str],
    new: Callable[..., Any],
) -> int:
    """Call ``new`` with the same arguments wherever the graph calls ``old``.

    If ``old`` is in-place, later readers of the overwritten value read the result of ``new``.

    Args:
        old: a function, the name of a tensor method, or several of them.
        new: a function with the same arguments as ``old``.

    Raises:
        BadParameter: ``old`` is neither a function nor a tensor method; for example, it is a module's class.

    >>> import torch
    >>> from torch import fx
    >>> model = fx.symbolic_trace(lambda x: torch.add(x, x)).eval()
    >>> int(replace_op(model, {torch.add, "add"}, torch.mul)(torch.tensor(5)))
    25
    """
    several = isinstance(old, Collection) and not isinstance(old, (str, nn.Module))
    wanted: list[Any] = [*old] if several else [old]  # type: ignore[misc]
    for one in wanted:
        check_operation(one, "replace_op", "old")
    if not wanted:
        raise BadParameter("replace_op: no operation is given to replace", parameter="old")
    if not callable(new):
        raise BadParameter(f"replace_op: the replacement must be a function, not {new!r}", parameter="new")
    found = [
        node
        for node in module.graph.nodes
        if (node.op == "call_function" and any(node.target is one for one in wanted))
        or (node.op == "call_method" and node.target in wanted)
    ]
    for node in found:
        if node.target is not operator.setitem:  # it returns nothing to read
            redirect_readers(module, node)
        node.op, node.target = "call_function", new
    return len(found)


@transform
def replace_module(
    module: fx.GraphModule, old: type[nn.Module] | str, new: str | Callable[[nn.Module], nn.Module]
) -> int:
    """Replace the modules of a class or path that the graph calls.

    Args:
        old: a class, including subclasses, or a path, which may be a shell pattern such as ``layer4.*.relu``.
        new: the name or class of an activation function; or a function that returns the new module for an old one,
            called once for each module. It must not change the old module; the new one may share its parameters.

    Raises:
        CannotTransform: the graph does not call a module with that path.
        BadParameter: ``old`` is neither a path nor a module's class, or ``new`` does not make modules.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    >>> [type(m).__name__ for m in replace_module(model, nn.ReLU, lambda old: nn.GELU()).children()]
    ['Linear', 'GELU']
    """
    if not isinstance(old, str) and not (isinstance(old, type) and issubclass(old, nn.Module)):
        raise BadParameter(
            f"replace_module replaces modules by class or path, and {old!r} is neither; replace_op replaces functions",
            parameter="old",
        )
    make = _maker(new)
    made: dict[int, str] = {}
    count = 0
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        called = module.get_submodule(str(node.target))
        fits = fnmatch.fnmatchcase(str(node.target), old) if isinstance(old, str) else isinstance(called, old)
        if not fits:
            continue
        if id(called) not in made:
            replacement = make(called)
            if not isinstance(replacement, nn.Module):
                raise BadParameter(
                    f"replace_module: the function must return a module, not {replacement!r:.100}", parameter="new"
                )
            made[id(called)] = add(module, str(node.target), replacement.eval())
        redirect_readers(module, node)
        node.target = made[id(called)]
        count += 1
    if not count and isinstance(old, str):
        raise CannotTransform(
            f"replace_module: the graph calls no module {old!r}; see the targets of its nodes", node=old
        )
    return count


def _maker(new: Any) -> Callable[[nn.Module], nn.Module]:
    if isinstance(new, str):
        named_function(new)
        return lambda old: MODULES[new]()
    if new in MODULES.values():  # called with the old module, it would take that for a setting such as ``inplace``
        return lambda old: new()
    if isinstance(new, nn.Module) or not callable(new):
        raise BadParameter(
            f"replace_module: the replacement is a function of the old module, as in lambda old: nn.GELU(), not "
            f"{new!r:.100}",
            parameter="new",
        )
    return new  # type: ignore[no-any-return]


@transform
def replace_activation(module: fx.GraphModule, *, old: str, new: str) -> int:
    """Replace one activation function by another, whether it is a function, a method or a module.

    Args:
        old, new: names in :data:`ACTIVATIONS`. The new one has torch's default parameters, such as the slope.

    Raises:
        BadParameter: there is no activation function of that name.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    >>> "gelu" in replace_activation(model, old="relu", new="gelu").code
    True
    """
    function = named_function(new)
    count = 0
    for node in list(module.graph.nodes):
        if not is_activation(module, node, old):
            continue
        redirect_readers(module, node)
        with module.graph.inserting_before(node):
            made = module.graph.call_function(function, (first_input(node),))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made, propagate_meta=False)
        erase_dead(module, node)
        count += 1
    return count


def redirect_readers(module: fx.GraphModule, node: fx.Node) -> None:
    """Make later readers of the value that ``node`` overwrites read ``node``, so that it can be replaced.

    If other nodes that share its memory are read later too, such as views, the value of ``node`` is copied into that
    memory, and all later readers read the copy.
    """
    base = overwritten(module, node)
    if base is None:
        return
    value = node
    if alias_readers(module, node):
        with module.graph.inserting_after(node):
            value = module.graph.call_method("copy_", (base, node))
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value, propagate_meta=False)
    base.replace_all_uses_with(value, delete_user_cb=lambda user: user > value, propagate_meta=False)


def alias_readers(module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the nodes after ``node`` that may read, through aliases of the overwritten node, memory that it
    overwrites."""
    base = overwritten(module, node)
    if base is None:
        return []
    memory = possible_memory(module.graph, dict(module.named_modules()))
    aliases = [m for m in memory if m < node and m is not base and not memory[base].isdisjoint(memory[m])]
    return [user for m in aliases for user in m.users if user > node and not is_number(user)]


def is_activation(module: fx.GraphModule, node: fx.Node, name: str) -> bool:
    """Return whether ``node`` applies the activation function ``name``, as a function, a method or a module."""
    named_function(name)
    if first_input(node) is None:
        return False
    if node.op == "call_module":
        called = module.get_submodule(str(node.target))
        return type(called) is MODULES[name] and not hooked(called)
    if node.op == "call_method":
        return str(node.target).removesuffix("_") == name
    if node.op == "call_function":
        functions = (getattr(home, spelled, None) for home in (F, torch) for spelled in (name, name + "_"))
        return node.target is ACTIVATIONS[name] or any(node.target is f for f in functions if f is not None)
    return False
