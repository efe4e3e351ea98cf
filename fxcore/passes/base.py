"""Define passes: functions from GraphModule to GraphModule that leave the original unchanged.

A pass is written as a function that edits a module in place and returns the number of changes. :func:`transform` runs
it on a copy of the graph, checks that the output keeps its structure, lints, recompiles, and sets eval mode. Parameters
are shared with the original, except those that the pass changes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, fx, nn
from torchvision.models.feature_extraction import DualGraphModule

from fxcore.errors import FxError
from fxcore.passes.effects import train_mode
from fxcore.tracing.graph_module import GraphModule, attribute, called_module, set_mode
from fxcore.tracing.names import name_nodes, public_name
from fxcore.tracing.writes import overwritten
from fxcore.wrappers import check_python

#: key in ``GraphModule.meta`` of the passes that a module went through
APPLIED = "transforms"

# Key in ``GraphModule.meta`` of the attributes that the running pass added: (path, path of the attribute it replaces).
_ADDED = "added"

P = ParamSpec("P")


class CannotTransform(FxError):
    """The pass ``transform`` cannot be applied to this module."""


class CannotKeep(CannotTransform):
    """The pass ``transform`` would change or lose a value that the graph returns, that of ``node``.

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
    """There is no pass called ``name``; ``suggestions`` has similar names."""


class BadParameter(FxError):
    """The pass ``transform`` has no parameter ``parameter``, or its value is invalid."""


@dataclass(frozen=True)
class Applied:
    """A pass that was applied to a module, with its number of changes.

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
    """A pass that can be run by name.

    Attributes:
        name: name for :func:`~fxcore.passes.registry.get_transform`.
        description: one sentence.
        parameters: JSON Schema of each parameter by name; a parameter without a ``default`` is required.
        run: the pass itself.
        exact: whether the outputs stay the same up to rounding.
        changes_input: whether the new module expects a different input from the original.
        adds_nodes: whether it adds nodes that can be extracted, so that it must run before nodes are chosen.

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
    """Make a pass from a function that edits a module in place and returns the number of changes.

    The pass raises:
        CannotTransform: the module is not a GraphModule in eval mode.
        CannotKeep: the edit changed the structure of the graph's return value.

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
        before = _output_structure(module)
        with torch.no_grad():
            private = fork(module)
            try:
                changes = edit(private, *args, **kwargs)
            except (BadParameter, CannotTransform) as error:
                error.extra.setdefault("transform", name)
                raise
        if _output_structure(private) != before:
            raise CannotKeep(f"{name} would change what the graph returns", transform=name, node="output")
        result = finish(private)
        result.meta[APPLIED] = (*applied(module), Applied(name, changes))
        return result

    # functools.wraps copies the annotations of the edit, but the pass returns a module.
    run.__annotations__ = {**edit.__annotations__, "return": fx.GraphModule}
    return run


def applied(module: nn.Module) -> tuple[Applied, ...]:
    """Return the passes that were applied to ``module``, in order.

    >>> from fxcore.transforms import out_of_place, remove
    >>> model = fx.symbolic_trace(nn.Sequential(nn.ReLU(inplace=True), nn.Dropout()).eval())
    >>> [(a.name, a.changes) for a in applied(remove(out_of_place(model)))]
    [('out_of_place', 1), ('remove', 1)]
    """
    meta = getattr(module, "meta", {})
    found: tuple[Applied, ...] = meta.get(APPLIED, ())
    return found


def fork(module: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph of ``module`` into a new module with the same submodules, parameters and buffers.

    ``copy.deepcopy(module)`` would copy every parameter, and set torchvision's DualGraphModule to train mode. For a
    DualGraphModule, the graph of the current mode is copied, and its module calls get torchvision's names.
    """
    graph = copy.deepcopy(module.graph)
    made = GraphModule(module, graph, class_name=type(module).__name__)
    made.meta.update(getattr(module, "meta", {}))
    if isinstance(module, DualGraphModule):
        name_nodes(graph)
    made.training = module.training
    return made


def finish(module: fx.GraphModule) -> fx.GraphModule:
    """Lint ``module``, drop unused submodules and tensors, and set eval mode; return the result, a compiled copy."""
    module.graph.lint()
    _restore_names(module)
    made = fork(module)
    made.meta.pop(_ADDED, None)
    set_mode(made, training=False)  # the modules that it shares are in eval mode already
    return made


def require_eval(module: fx.GraphModule, name: str) -> None:
    """Check that ``module`` is a GraphModule in eval mode: in train mode, values depend on the batch and are random.

    Functions count too: ``F.dropout(x)`` is in train mode by default.

    Args:
        name: name of the pass, for the error.

    Raises:
        CannotTransform: ``module`` is not a GraphModule in eval mode.
        NotTraceable: ``module`` is TorchScript or exported, and cannot be traced or set to eval mode.

    >>> model = fx.symbolic_trace(lambda x: nn.functional.dropout(x, 0.5))
    >>> try:
    ...     require_eval(model, "remove")
    ... except CannotTransform as error:
    ...     print(error.detail)
    remove needs a module in eval mode, and dropout is called with training=True; pass training=self.training
    """
    check_python(module)
    if not isinstance(module, fx.GraphModule):
        raise CannotTransform(
            f"{name} works on a torch.fx.GraphModule, not on a {type(module).__name__}; trace the model first",
            transform=name,
        )
    # The GraphModule's own flag does not matter, only those of the modules that its graph calls.
    for target in called_modules(module):
        if any(m.training for m in module.get_submodule(target).modules() if next(m.children(), None) is None):
            raise CannotTransform(
                f"{name} needs a module in eval mode and {target} is in train mode; call .eval() first", transform=name
            )
    for node in module.graph.nodes:
        if mode := train_mode(module, node):
            path = public_name(node)
            right = "training=self.training" if "train" in mode else f"{mode.split('=')[0]}=0 in eval mode"
            raise CannotTransform(
                f"{name} needs a module in eval mode, and {path} is called with {mode}; pass {right}",
                transform=name,
                node=path,
            )


def called_modules(module: fx.GraphModule) -> dict[str, nn.Module]:
    """Return the modules that the graph calls, by target."""
    return {str(n.target): module.get_submodule(str(n.target)) for n in module.graph.nodes if n.op == "call_module"}


def replace_modules(module: fx.GraphModule, change: Callable[[nn.Module], nn.Module]) -> None:
    """Make the graph call ``change(called)`` in place of each module that it calls, where that is another module.

    ``change`` is called once for each module, however often the graph calls it.
    """
    targets: dict[nn.Module, str | None] = {}
    for node in module.graph.nodes:
        called = called_module(module, node)
        if called is not None:
            if called not in targets:
                made = change(called)
                targets[called] = None if made is called else add(module, str(node.target), made)
            node.target = targets[called] or node.target


def constant(module: fx.GraphModule, argument: Any) -> Any:
    """Return the value of an argument that does not depend on the input: a parameter, a buffer or a literal.

    Raises:
        LookupError: the argument depends on the input.
    """
    if isinstance(argument, fx.Node):
        if argument.op != "get_attr":
            raise LookupError(argument.name)
        return attribute(module, str(argument.target))
    return argument


def add(module: fx.GraphModule, near: str, value: nn.Module | Tensor) -> str:
    """Add a submodule, parameter or buffer to ``module``.

    Args:
        near: path of the attribute that it replaces or belongs to.

    Returns:
        The new path: under the parent of ``near`` if that parent is a container of this GraphModule that is not shared
        with the original; otherwise at the root.
    """
    near = dict(module.meta.get(_ADDED, ())).get(near, near)  # the attribute that ``near`` itself replaced, if any
    *prefix, leaf = near.split(".")
    parent: nn.Module = module
    for item in prefix:
        child = getattr(parent, item, None)
        # Containers made by GraphModule are plain Modules and private; anything else is shared with the original.
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


def _restore_names(module: fx.GraphModule) -> None:
    """Rename each added attribute to the one it replaced, so that state dicts keep their keys."""
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


def hooked(module: nn.Module) -> bool:
    """Return whether ``module`` has forward hooks or its own ``forward``, and so may differ from its class."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def erase_dead(module: fx.GraphModule, *nodes: fx.Node) -> None:
    """Erase those of ``nodes`` that have no users, then their inputs that have no other users, and so on.

    Inputs that write to memory are kept, even if their results are unused (pytorch#68301).
    """
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or node.op in ("placeholder", "output") or node._erased:
            continue
        inputs = [n for n in node.all_input_nodes if not n.meta.get("mutates") and overwritten(module, n) is None]
        module.graph.erase_node(node)
        waiting += inputs


def _output_structure(module: fx.GraphModule) -> Any:
    """Return the keys and nesting of the graph's return value."""
    [output] = module.graph.find_nodes(op="output")
    return _structure(output.args[0])


def _structure(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((key, _structure(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return [_structure(inner) for inner in value]
    return None
