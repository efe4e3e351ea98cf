"""Trace a module or function to a torch.fx graph whose nodes have torchvision's node names.

Any module or function can be a leaf, errors say where and why tracing failed, and modules that cannot be traced can
become leaves automatically.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from fxcore.copies import private_copy, shared_copy
from fxcore.errors import NotTraceable, summarize
from fxcore.tracing.attributes import Attributes
from fxcore.tracing.constants import FactoryRecorder, StateWrite
from fxcore.tracing.failures.explain import explain
from fxcore.tracing.graph_module import GraphModule, set_mode
from fxcore.tracing.leaves import kept_whole
from fxcore.tracing.names import check_names, operation_name, rename_self, shown_name
from fxcore.tracing.node_tracer import Tracer
from fxcore.tracing.root_call import called_otherwise, enclosed, entry, is_layer
from fxcore.tracing.trace_arguments import (
    AUTO,
    LeafModule,
    check_arguments,
    check_patterns,
    check_root,
    checked_leaf_modules,
    default_leaf_modules,
)
from fxcore.tracing.writes import settle_writes
from fxcore.wrappers import check_python, unwrap_parts, unwrapped

# torch.fx patches nn.Module for the whole process while it traces (pytorch#187589): one trace at a time.
_TRACE_LOCK = threading.RLock()


def trace(
    root: nn.Module | Callable[..., Any],
    *,
    training: bool = False,
    leaf_modules: Sequence[LeafModule] | str | None = None,
    leaf_functions: Sequence[Callable[..., Any]] = (),
    concrete_args: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """Trace a module or a plain function of tensors.

    ``root`` is neither changed nor moved, and keeps its mode. The result shares its parameters and buffers, which may
    be on the meta device.

    Args:
        root: any module, or a Python function. Wrappers (compiled modules, DataParallel and the like) are removed.
        training: trace in train mode; the result is in that mode.
        leaf_modules: modules to keep whole, besides torch.nn's own: classes, which replace the default ones
            (:func:`~fxcore.tracing.trace_arguments.default_leaf_modules`); paths such as ``layer4.0`` and patterns
            such as ``layer4.*``, in addition; and ``"auto"``, which keeps whole the innermost module in which
            tracing fails, and traces again, as often as needed
            (:func:`~fxcore.tracing.names.untraceable_modules` lists them).
        leaf_functions: functions to keep whole wherever they are called from. Unlike ``torch.fx.wrap``, this needs no
            change where they are defined.
        concrete_args: values of arguments to fix in the graph; the result does not have these arguments.

    Tensors that ``root`` creates without inputs become constants of the graph, see
    :func:`fxcore.tracing.constants.frozen`; a :class:`fxcore.tracing.constants.FrozenDraw` warning reports random ones.
    So do results of operations on buffers alone, which do not follow later changes of the buffers, unless they are
    views of them.

    Returns:
        A module whose ``graph`` has each node's name in ``node.meta["path"]``, except for ``output``.

    Raises:
        NotTraceable: tracing failed; the error names the module and line, and what to do. Also raised if a part of the
            model has a name that no graph module can have, such as ``heads.class`` or ``meta``.
        UnknownArgument: ``root`` does not have a given path, pattern or argument name.
        NotAFunction: one of ``leaf_functions`` cannot be kept whole.

    >>> import torch
    >>> from fxcore.tracing.names import names, untraceable_modules
    >>> def scaled(x, factor, squared=False):
    ...     return factor * (x * x if squared else x)
    >>> module = trace(scaled, concrete_args={"squared": True})
    >>> names(module.graph), int(module(torch.tensor(3), 2))
    (['x', 'factor', 'mul', 'mul_1'], 18)

    >>> from torch import nn
    >>> class Gate(nn.Module):
    ...     def forward(self, x):
    ...         return x if x.sum() > 0 else -x
    >>> model = nn.Sequential(nn.Linear(4, 4), Gate())
    >>> graph = trace(model, leaf_modules="auto").graph
    >>> [n.name for n in graph.nodes], list(untraceable_modules(graph))
    (['input_1', '_0', '_1', 'output'], ['1'])

    An error says where and why tracing failed, and what to do:

    >>> from fxcore.errors import NotTraceable
    >>> try:
    ...     trace(model)
    ... except NotTraceable as error:
    ...     print(error.extra["module"], error.extra["kind"], error.extra["source"].split(": ")[-1], sep=" | ")
    1 | control_flow | return x if x.sum() > 0 else -x

    Keep modules whole by class, by path and by pattern, and keep a function whole:

    >>> def halved(x):
    ...     return x / 2
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = nn.Sequential(nn.Sequential(nn.Tanh()), nn.Sequential(nn.ReLU()))
    ...     def forward(self, x):
    ...         return halved(self.body(x))
    >>> for whole in (), (nn.Sequential,), ("body.0",), ("body.*",):
    ...     print(names(trace(Net(), leaf_modules=whole).graph)[1:])
    ['body.0.0', 'body.1.0', 'truediv']
    ['body', 'truediv']
    ['body.0', 'body.1.0', 'truediv']
    ['body.0', 'body.1', 'truediv']
    >>> names(trace(Net(), leaf_functions=[halved]).graph)[-1]
    'halved'
    """
    if isinstance(root, nn.Module):
        root = enclosed_if_whole(unwrapped(root), training)
    graph, holder = record(
        private(root, training) if isinstance(root, nn.Module) else root,
        leaf_modules=leaf_modules,
        leaf_functions=leaf_functions,
        concrete_args=concrete_args,
        original=root if isinstance(root, nn.Module) else None,
    )
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "")
    try:
        made = GraphModule(holder, graph, class_name=name if name.isidentifier() else "Function")
    except RuntimeError as error:
        raise NotTraceable.because(
            f"the graph of {shown_name(root)} cannot be written as code ({summarize(error)})",
            "keep whole only functions that a module defines by name",
            kind="code",
            module=shown_name(root),
        ) from error
    set_mode(made, training)
    return made


def enclosed_if_whole(root: nn.Module, training: bool = False) -> nn.Module:
    """Wrap ``root`` in a module if it is a torch.nn layer that cannot be traced into; otherwise return ``root``."""
    if not is_layer(root):
        return root
    try:
        record(private(root, training), original=root)
    except NotTraceable:
        return enclosed(root)
    return root


def record(
    root: nn.Module | Callable[..., Any],
    *,
    leaf_modules: Sequence[LeafModule] | str | None = None,
    leaf_functions: Sequence[Callable[..., Any]] = (),
    concrete_args: Mapping[str, Any] | None = None,
    original: nn.Module | None = None,
) -> tuple[fx.Graph, nn.Module]:
    """Trace a private module in its current mode, or a function; see :func:`trace`.

    Args:
        original: the module that ``root`` is a copy of; hooks and closures may refer to the original's parts.

    Returns:
        The graph, and the module that it refers to: ``root`` itself, or a copy with the same parts if ``root`` has
        hooks or its own ``__call__``. Constants of the graph become attributes of this module
        (:func:`fxcore.tracing.constants.made_constants`).
    """
    check_root(root)
    given = checked_leaf_modules(leaf_modules)
    classes = tuple(leaf for leaf in given if isinstance(leaf, type)) or default_leaf_modules()
    patterns = [leaf for leaf in given if isinstance(leaf, str) and leaf != AUTO]
    check_patterns(root, patterns)
    concrete = check_arguments(root, concrete_args)
    untraceable: dict[str, str] = {}

    def attempt(proxies: bool) -> tuple[fx.Graph, Tracer]:
        """Trace once, with buffers as proxies or as tensors."""
        with _TRACE_LOCK, kept_whole(leaf_functions, root) as originals:
            before, constants = Attributes(root if isinstance(root, nn.Module) else nn.Module()), set[str]()
            traced, paths = root, {module: path for path, module in (original or nn.Module()).named_modules()}
            if isinstance(root, nn.Module) and called_otherwise(root):
                traced, inner = entry(root)
                paths |= {root: "", inner: ""}
            tracer = Tracer(classes, patterns, untraceable, FactoryRecorder(root), originals, paths)
            tracer.proxy_buffer_attributes = proxies
            try:
                # Constants must not be inference tensors, which autograd cannot keep.
                with torch.inference_mode(False), torch.enable_grad(), tracer.factories:
                    graph = tracer.trace(traced, concrete or None)
                for name, value in before.assigned():
                    if isinstance(value, fx.Proxy) or tracer.proxy_buffer_attributes:
                        raise StateWrite(name)
                constants |= {str(node.target) for node in graph.find_nodes(op="get_attr")}
                return graph, tracer
            except Exception as error:
                before.remove_hooks()
                path = tracer.failure[1] if tracer.failure and tracer.failure[0] is error else ""
                raise _Failed(error, path) from error
            finally:
                before.restore(constants)  # traced values have no meaning outside the graph

    held = isinstance(root, nn.Module) and any(True for _ in root.buffers())
    while True:
        try:
            graph, tracer = _traced(attempt, held)
            break
        except _Failed as failed:
            explained = explain(failed.error, root, failed.path)
            if AUTO not in given or not failed.path or failed.path in untraceable:
                raise explained from failed.error
            untraceable[failed.path] = explained.problem
    check_names(graph, root)
    rename_self(graph)
    _drop_arguments(graph, concrete)
    settle_writes(graph, tracer.root)
    tracer.factories.warn(shown_name(root))
    return graph, tracer.root


class _Failed(Exception):
    """A trace ended with ``error``, raised by the module at ``path``."""

    def __init__(self, error: Exception, path: str) -> None:
        super().__init__(error, path)
        self.error, self.path = error, path


def _traced(attempt: Callable[[bool], tuple[fx.Graph, Tracer]], held: bool) -> tuple[fx.Graph, Tracer]:
    """Trace with buffers as tensors, and if that fails and there are any, as proxies.

    A tensor cannot be indexed by a traced size, as in ``self.pos[:, :n]``, but a proxy can. It adds nodes.

    Raises:
        _Failed: both failed; this is the first failure.
    """
    try:
        return attempt(False)
    except _Failed as first:
        if held and not isinstance(first.error, StateWrite):
            with contextlib.suppress(_Failed):
                return attempt(True)
        raise


def private(model: nn.Module, training: bool) -> nn.Module:
    """Return a copy of ``model`` to trace in the mode ``training``, sharing its parameters.

    Raises:
        NotTraceable: ``model`` is in the other mode and cannot be copied.
    """
    check_python(model)
    try:
        alike = all(part.training == training for part in model.modules())
        made = private_copy(model) if alike else shared_copy(model).train(training)
        unwrap_parts(made)
        return made
    except Exception as error:
        mode = "train" if training else "eval"
        name = type(model).__name__
        raise NotTraceable.because(
            f"{name} is not in {mode} mode and cannot be copied ({summarize(error)})",
            f"call .{mode}() on it first",
            kind="mode",
            module=name,
        ) from error


def _drop_arguments(graph: fx.Graph, concrete: Mapping[str, Any]) -> None:
    """Erase inputs that are fixed by ``concrete``.

    torch.fx keeps these inputs, as ``NAME_1``, with their old defaults and asserts that they equal the fixed values, so
    calling the module without them fails if the two differ. Other inputs may have the same name.
    """
    if type(graph._codegen) is not CodeGen:
        return  # nested arguments, some of whose leaves are inputs
    for name in concrete:
        fixed = [n for n in graph.find_nodes(op="placeholder") if n.target == f"{name}_1" and _is_only_checked(n)]
        for node in sorted(fixed, key=lambda n: len(n.users))[-1:]:
            for check in [inner for user in node.users for inner in user.users] + list(node.users):
                graph.erase_node(check)
            graph.erase_node(node)


def _is_only_checked(node: fx.Node) -> bool:
    """Return whether an input is read by nothing but torch.fx's assertion of its value, if there is one."""
    readers = [inner for user in node.users for inner in (user.users or [user])]
    return all(operation_name(reader) in ("_assert", "_assert_is_none") for reader in readers)
