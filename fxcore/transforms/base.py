"""What every pass is: GraphModule → GraphModule, never touching what it was given.

A pass is written as a function that edits a module in place and says how many things it changed; :func:`transform`
turns it into one that works on a private copy of the graph, keeps the form of the output, lints, recompiles and leaves
the result in eval mode. Parameters are shared with the original; only those that a pass changes are new.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxcore.errors import FxError
from fxcore.tracing.graph_module import GraphModule
from fxcore.tracing.tracer import PATH
from fxcore.transforms.effects import train_mode

#: key in ``GraphModule.meta`` of the passes that a module went through
APPLIED = "transforms"

# What a pass in progress added, and beside what.
_ADDED = "added"

P = ParamSpec("P")


class CannotTransform(FxError):
    """A pass does not apply to this module; ``transform`` names it."""


class CannotKeep(CannotTransform):
    """A pass would change or lose a value that the graph returns; ``transform`` and ``node``.

    >>> from fxcore.transforms import replace_op
    >>> model = fx.symbolic_trace(lambda x: {"double": torch.add(x, x)}).eval()
    >>> @transform
    ... def lose(module: fx.GraphModule) -> int:
    ...     module.graph.find_nodes(op="output")[0].args = ({},)
    ...     return 1
    >>> try:
    ...     lose(model)
    ... except CannotKeep as error:
    ...     print(error.detail)
    lose would change what the graph returns
    """


class UnknownTransform(FxError):
    """No pass of that name; ``name`` and ``suggestions``."""


class BadParameter(FxError):
    """A pass was given a parameter that it does not have or a value that it does not take; ``transform``,
    ``parameter``."""


@dataclass(frozen=True)
class Applied:
    """One pass that a module went through, and how many things it changed.

    >>> from fxcore.transforms import apply_transforms
    >>> model = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Dropout()).eval())
    >>> applied(apply_transforms(model, ["remove"]))
    (Applied(name='remove', changes=1, parameters={'dropout': True, 'identity': True}),)
    """

    name: str
    changes: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Transform:
    """A pass as programs read it.

    Attributes:
        name: by which it is asked for.
        description: what it does, in a sentence.
        parameters: JSON Schema of each parameter by name; one without a ``default`` must be given.
        run: the pass itself.
        exact: the outputs stay what they were, up to rounding.
        changes_input: the new module wants another input than the old one.
        adds_nodes: it brings new nodes that can be asked for, so it has to run before nodes are chosen.

    >>> from fxcore.transforms import list_transforms
    >>> [t.name for t in list_transforms() if not t.exact], [t.name for t in list_transforms() if t.changes_input]
    (['replace_activation', 'replace_module', 'insert_after'], ['fold_normalization'])
    """

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    run: Callable[..., fx.GraphModule]
    exact: bool = True
    changes_input: bool = False
    adds_nodes: bool = False


def transform(
    edit: Callable[Concatenate[fx.GraphModule, P], int],
) -> Callable[Concatenate[fx.GraphModule, P], fx.GraphModule]:
    """Make a pass of a function that edits a module in place and returns the number of changes.

    >>> @transform
    ... def swap_signs(module: fx.GraphModule) -> int:
    ...     found = [n for n in module.graph.nodes if n.target is torch.neg]
    ...     for node in found:
    ...         node.target = torch.positive
    ...     return len(found)
    >>> model = fx.symbolic_trace(lambda x: torch.neg(x)).eval()
    >>> changed = swap_signs(model)
    >>> int(changed(torch.tensor(3))), int(model(torch.tensor(3)))
    (3, -3)
    """

    @functools.wraps(edit)
    def run(module: fx.GraphModule, /, *args: P.args, **kwargs: P.kwargs) -> fx.GraphModule:
        name = edit.__name__
        require_eval(module, name)
        before = _output_form(module)
        with torch.no_grad():
            private = fork(module)
            changes = edit(private, *args, **kwargs)
        if _output_form(private) != before:
            raise CannotKeep(f"{name} would change what the graph returns", transform=name, node="output")
        result = finish(private)
        result.meta[APPLIED] = (*applied(module), Applied(name, changes))
        return result

    # functools.wraps makes the pass look like the edit; it returns a module, whatever the edit returned.
    run.__annotations__ = {**edit.__annotations__, "return": fx.GraphModule}
    return run


def applied(module: nn.Module) -> tuple[Applied, ...]:
    """The passes that ``module`` went through, in order.

    >>> from fxcore.transforms import out_of_place, remove
    >>> model = fx.symbolic_trace(nn.Sequential(nn.ReLU(inplace=True), nn.Dropout()).eval())
    >>> [(a.name, a.changes) for a in applied(remove(out_of_place(model)))]
    [('out_of_place', 1), ('remove', 1)]
    """
    meta = getattr(module, "meta", {})
    found: tuple[Applied, ...] = meta.get(APPLIED, ())
    return found


def fork(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a graph of its own and the same submodules, parameters and buffers.

    Not ``copy.deepcopy``: that copies every parameter, and the copy of torchvision's own GraphModule comes back in
    train mode.
    """
    graph = fx.Graph(tracer_cls=module.graph._tracer_cls)
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph._codegen = copy.deepcopy(module.graph._codegen)
    made = GraphModule(module, graph, class_name=type(module).__name__)
    made.meta.update(module.meta)
    made.training = module.training
    return made


def finish(module: fx.GraphModule) -> fx.GraphModule:
    """Lint, drop what no node uses any more, recompile, and see to it that the result is in eval mode."""
    module.graph.lint()
    _take_names_back(module)
    made = fork(module)
    made.meta.pop(_ADDED, None)
    made.training = False
    for part in made.modules():
        if type(part) is nn.Module:  # a container made by GraphModule; others are shared, and in eval mode already
            part.training = False
    made.recompile()
    return made


def require_eval(module: fx.GraphModule, name: str) -> None:
    """Check that ``module`` is a GraphModule in eval mode; in train mode, values depend on the batch and on chance.

    Functions count as modules do: ``F.dropout(x)`` is in train mode unless it is told otherwise.

    Raises:
        CannotTransform: it is not; ``name`` is the pass that needs it.

    >>> model = fx.symbolic_trace(lambda x: nn.functional.dropout(x, 0.5))
    >>> try:
    ...     require_eval(model, "remove")
    ... except CannotTransform as error:
    ...     print(error.detail)
    remove needs a module in eval mode, and dropout is called with training=True; give it training=self.training
    """
    if not isinstance(module, fx.GraphModule):
        raise CannotTransform(
            f"{name} works on a torch.fx.GraphModule, not on a {type(module).__name__}; trace the model first",
            transform=name,
        )
    # The flag of the GraphModule itself is not asked: what runs are the modules that its graph calls.
    for target in called_modules(module):
        if any(m.training for m in module.get_submodule(target).modules() if next(m.children(), None) is None):
            raise CannotTransform(
                f"{name} needs a module in eval mode and {target} is in train mode; call .eval() first", transform=name
            )
    for node in module.graph.nodes:
        if mode := train_mode(module, node):
            path = str(node.meta.get(PATH, node.name))
            told = "training=self.training" if "train" in mode else f"{mode.split('=')[0]}=0 in eval mode"
            raise CannotTransform(
                f"{name} needs a module in eval mode, and {path} is called with {mode}; give it {told}",
                transform=name,
                node=path,
            )


def called_modules(module: fx.GraphModule) -> dict[str, nn.Module]:
    """Modules that the graph calls, by target."""
    return {str(n.target): module.get_submodule(str(n.target)) for n in module.graph.nodes if n.op == "call_module"}


def attribute(module: nn.Module, target: str) -> Any:
    """What a ``get_attr`` node's target names."""
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def constant(module: fx.GraphModule, argument: Any) -> Any:
    """The value of an argument that does not depend on the input: a parameter, a buffer or a literal.

    Raises:
        LookupError: it depends on the input.
    """
    if isinstance(argument, fx.Node):
        if argument.op != "get_attr":
            raise LookupError(argument.name)
        return attribute(module, str(argument.target))
    return argument


def add(module: fx.GraphModule, near: str, value: nn.Module | Tensor) -> str:
    """Give ``module`` a submodule, parameter or buffer beside ``near``.

    Returns:
        The new attribute's path, under the same parent as ``near`` where that parent is this module's own.
    """
    *prefix, leaf = near.split(".")
    parent: nn.Module = module
    for item in prefix:
        child = getattr(parent, item, None)
        # Containers made by GraphModule are bare Modules and private; anything else is shared with the original.
        if type(child) is not nn.Module:
            parent, prefix, leaf = module, [], near.replace(".", "_")
            break
        parent = child
    name, number = leaf, 0
    while hasattr(parent, name):
        number += 1
        name = f"{leaf}_{number}"
    _register(parent, name, value)
    path = ".".join([*prefix, name])
    if prefix or "." not in near:
        module.meta[_ADDED] = (*module.meta.get(_ADDED, ()), (path, near))
    return path


def _register(parent: nn.Module, name: str, value: nn.Module | Tensor) -> None:
    if isinstance(value, nn.Module):
        parent.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        parent.register_parameter(name, value)
    else:
        parent.register_buffer(name, value, persistent=True)


def _take_names_back(module: fx.GraphModule) -> None:
    """Where what was added has replaced what it was added beside, give it that name: state dicts keep their keys."""
    for path, near in module.meta.get(_ADDED, ()):
        used = {str(n.target) for n in module.graph.nodes if n.op in ("call_module", "get_attr")}
        if path == near or path not in used or any(u == near or u.startswith((near + ".", path + ".")) for u in used):
            continue
        *prefix, name = near.split(".")
        parent = module.get_submodule(".".join(prefix))
        value = attribute(module, path)
        delattr(parent, path.split(".")[-1])
        delattr(parent, name)
        _register(parent, name, value)
        for node in module.graph.nodes:
            if node.op in ("call_module", "get_attr") and node.target == path:
                node.target = near


def check_operation(given: Any, transform: str, parameter: str) -> None:
    """Check that a graph may call ``given``: a function, or the name of a tensor method.

    Raises:
        BadParameter: no graph calls that; of ``transform`` and its ``parameter``.
    """
    wrong = None
    if isinstance(given, str):
        if not hasattr(Tensor, given):
            wrong = f"{given[:64]!r} is no method of tensors; give functions themselves"
    elif isinstance(given, nn.Module) or (isinstance(given, type) and issubclass(given, nn.Module)):
        wrong = f"{given if isinstance(given, type) else type(given)} is a module; replace_module replaces modules"
    elif not callable(given):
        wrong = f"{given!r} is neither a function nor the name of a tensor method"
    if wrong is not None:
        raise BadParameter(f"{transform}: {wrong}", transform=transform, parameter=parameter)


def bare_copy(module: nn.Module) -> nn.Module:
    """The same module with the same parameters, whose attributes can be set without touching the original."""
    made = copy.copy(module)
    for key in ("_parameters", "_buffers", "_modules"):
        made.__dict__[key] = copy.copy(module.__dict__[key])
    return made


def hooked(module: nn.Module) -> bool:
    """Whether forward hooks are registered on ``module``, so that it may do more than its class says."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def erase_dead(graph: fx.Graph, *nodes: fx.Node) -> None:
    """Erase ``nodes`` that nothing reads, then those of their inputs that they alone read.

    Not ``eliminate_dead_code``: that also drops in-place operations whose result is unused though their effect is
    seen (pytorch#68301).
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or node.op in ("placeholder", "output") or node._erased:
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        waiting += inputs


def find_node(module: fx.GraphModule, name: str, transform: str) -> fx.Node:
    """The node of that public or fx name.

    Raises:
        CannotTransform: there is none.
    """
    node: fx.Node
    for node in module.graph.nodes:
        if node.meta.get(PATH) == name:
            return node
    for node in module.graph.nodes:
        if node.name == name and node.op != "output":
            return node
    raise CannotTransform(
        f"{transform}: the graph has no node {name!r}; see the list of nodes", transform=transform, node=name
    )


def _output_form(module: fx.GraphModule) -> Any:
    """Keys and nesting of what the graph returns."""
    returned = next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0]
    return pytree.tree_structure(pytree.tree_map_only(fx.Node, lambda n: None, _plain(returned)))


def _plain(value: Any) -> Any:
    """Without fx's immutable containers, which pytree may not know."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
