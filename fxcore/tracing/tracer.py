"""Trace a module or function to a torch.fx graph whose nodes have torchvision's node names.

The tracer extends torchvision's, so names equal those of ``get_graph_node_names``. In addition, other threads can run
models during a trace, any module or function can be a leaf, errors say where and why tracing failed, and modules that
cannot be traced can become leaves automatically.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torchvision.models.feature_extraction import NodePathTracer

from fxcore.copies import private_copy, shared_copy
from fxcore.errors import NotTraceable, summarize
from fxcore.tracing.alone import enclosed, is_layer
from fxcore.tracing.attributes import Attributes
from fxcore.tracing.constants import COMPUTED, FROZEN, FactoryRecorder, StateWrite
from fxcore.tracing.failures.explain import explain
from fxcore.tracing.graph_module import GraphModule, set_mode
from fxcore.tracing.leaves import kept_whole
from fxcore.tracing.names import MODULE, PATH, UNTRACEABLE, check_names, operation_name, rename_self, shown_name
from fxcore.tracing.proxies import TENSOR_METHODS, RecordingProxy
from fxcore.tracing.root_call import called_otherwise, entry
from fxcore.tracing.trace_arguments import (
    AUTO,
    LeafModule,
    check_arguments,
    check_functions,
    check_patterns,
    check_root,
    checked_leaf_modules,
    default_leaf_modules,
)
from fxcore.tracing.writes import mutated_argument, settle_writes, viewed
from fxcore.wrappers import check_python, unwrap_parts, unwrapped

# torch.fx patches nn.Module for the whole process while it traces (pytorch#187589): one trace at a time.
_TRACE_LOCK = threading.RLock()


class Tracer(NodePathTracer):  # type: ignore[misc]
    """torchvision's tracer, restricted to the calls of its own thread.

    While a trace runs, torch.fx routes ``nn.Module.__call__`` and ``__getattr__`` of the whole process through the
    tracer. Calls from other threads, such as concurrent inference, pass straight through.

    Args:
        leaf_modules: classes to keep whole, besides torch.nn's own.
        patterns: paths or shell patterns of modules to keep whole.
        untraceable: paths of modules to keep whole because they cannot be traced, each with the reason.
        factories: records the origins of constants; the caller must enter it for the trace.
        originals: functions to record in place of others; see :func:`fxcore.tracing.leaves.kept_whole`.
        paths: paths for modules that stand for parts of the traced module, such as those that its hooks refer to.
        live: give no names to operations on buffers alone, which are recorded if ``proxy_buffer_attributes``.

    Attributes:
        failure: the error that ended the trace, and the path of the innermost module that raised it.
    """

    def __init__(
        self,
        leaf_modules: tuple[type[nn.Module], ...] = (),  # torch.fx makes a tracer when it unpickles a GraphModule
        patterns: Sequence[str] = (),
        untraceable: Mapping[str, str] | None = None,
        factories: FactoryRecorder | None = None,
        originals: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
        paths: Mapping[nn.Module, str] | None = None,
        live: bool = False,
    ) -> None:
        super().__init__(autowrap_modules=(math, torchvision.ops), leaf_modules=leaf_modules)
        # torch.fx replaces wrapped objects in every module's namespace, for all threads. Wrapped functions still work
        # in other threads, but classes would no longer be classes, and `isinstance` there would fail.
        self._autowrap_function_ids -= {
            id(value) for value in vars(torchvision.ops).values() if isinstance(value, type)
        }
        self.patterns = patterns
        self.untraceable = untraceable or {}
        self.failure: tuple[BaseException, str] | None = None
        self.factories = factories or FactoryRecorder()
        self._originals = originals or {}
        self._paths = paths or {}
        self._live = live
        self._thread = threading.get_ident()
        self._latest: dict[str, int] = {}  # latest number suffix by name without suffix

    def is_leaf_module(self, m: nn.Module, module_qualname: str) -> bool:
        if not module_qualname:
            return False
        if isinstance(m, torch.jit.ScriptModule):  # it has no Python code to trace
            return True
        if module_qualname in self.untraceable or any(fnmatch.fnmatchcase(module_qualname, p) for p in self.patterns):
            return True
        return bool(super().is_leaf_module(m, module_qualname))

    def path_of_module(self, mod: nn.Module) -> str:
        path = self._paths.get(mod)
        return path if path is not None else str(super().path_of_module(mod))

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            # The innermost module sees the error first.
            if self.failure is None or self.failure[0] is not error:
                self.failure = error, self.path_of_module(m)
            raise

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        argument = super().create_arg(a)
        if isinstance(a, Tensor) and isinstance(argument, fx.Node):
            if made := self.factories.origin_of(a):
                argument.meta[FROZEN] = made
            if self.factories.is_computed(a):
                argument.meta[COMPUTED] = True
        return argument

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Proxy:
        if kind == "call_function":
            target = self._originals.get(target, target)
        elif kind == "call_method" and target in TENSOR_METHODS:
            kind, target = "call_function", TENSOR_METHODS[target]
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        if name := self.node_to_qualname[proxy.node]:
            proxy.node.meta[PATH] = name
        proxy.node.meta[MODULE] = self.current_module_qualname
        if (base := mutated_argument(proxy.node, {})) is not None:
            self._check_write(base)
        if kind == "call_module" and target in self.untraceable:
            proxy.node.meta[UNTRACEABLE] = self.untraceable[target]
        return cast(fx.Proxy, proxy)

    def _check_write(self, base: fx.Node) -> None:
        """Reject writes to the memory of ``base`` if it is a parameter or buffer, since later calls would see them.

        Raises:
            StateWrite: ``base`` is a parameter or buffer, or a view of one.
        """
        source = viewed(base)
        if source.op == "get_attr" and (name := self.factories.kept_in(_untraced(self.root, str(source.target)))):
            raise StateWrite(name)

    def _get_node_qualname(self, module_qualname: str, node: fx.Node) -> str:
        """Return torchvision's name for ``node``; empty for what torchvision does not record.

        torchvision's own method matches each earlier name by a regular expression, half of the trace time of a large
        model.
        """
        if self._live and self._of_buffers(node):
            return ""
        name = module_qualname
        if node.op != "call_module":
            name = f"{name}.{node}" if name else str(node)
        name, _ = _numbered(name)
        if name in self._latest:
            name = f"{name}_{self._latest[name] + 1}"
        self._latest[name] = 0
        base, number = _numbered(name)
        if number is not None:
            self._latest[base] = number
        return name

    def _of_buffers(self, node: fx.Node) -> bool:
        """Return whether ``node`` is a buffer or computed from buffers and constants alone, all without names."""
        if node.op == "get_attr":
            return not isinstance(_untraced(self.root, str(node.target)), nn.Parameter)
        inputs = node.all_input_nodes if node.op in ("call_function", "call_method") else []
        return bool(inputs) and all(PATH not in n.meta for n in inputs)


def _untraced(root: nn.Module, path: str) -> Tensor:
    """Return a parameter, buffer or constant. While a module is traced, ``getattr`` returns proxies for them."""
    *parts, name = path.split(".")
    for part in parts:
        root = cast(nn.Module, root._modules[part])
    value: Any = root._parameters.get(name)
    value = root._buffers.get(name) if value is None else value
    return cast(Tensor, vars(root)[name] if value is None else value)


def _numbered(name: str) -> tuple[str, int | None]:
    """Split ``add_2`` into ``add`` and 2; return any other name unchanged, with None."""
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isascii() and number.isdigit() else (name, None)


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
    Operations on buffers alone are recorded in eval mode as nodes without names, so that the graph follows changes of
    the buffers' values. If Python code needs these values, as in ``int(self.count)``, results become constants instead.

    Returns:
        A module whose ``graph`` has each node's name in ``node.meta["path"]``, except for ``output`` and operations on
        buffers alone, which have no name in torchvision.

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

    Keep modules whole by class, by path and by pattern, keep a function whole, and fix an argument:

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = nn.Sequential(nn.Sequential(nn.Tanh()), nn.Sequential(nn.ReLU()))
    ...     def forward(self, x, double=False):
    ...         return self.body(x + x if double else x)
    >>> for whole in (), (nn.Sequential,), ("body.0",), ("body.*",):
    ...     print(names(trace(Net(), leaf_modules=whole, concrete_args={"double": False}).graph)[-2:])
    ['body.0.0', 'body.1.0']
    ['x', 'body']
    ['body.0', 'body.1.0']
    ['body.0', 'body.1']
    >>> "add" in names(trace(Net(), concrete_args={"double": True}).graph)
    True
    >>> def halved(x):
    ...     return x / 2
    >>> class Halving(nn.Module):
    ...     def forward(self, x):
    ...         return halved(x)
    >>> names(trace(Halving(), leaf_functions=[halved]).graph), names(trace(Halving()).graph)
    (['x', 'halved'], ['x', 'truediv'])
    """
    if isinstance(root, nn.Module):
        root = enclosed_if_whole(unwrapped(root), training)
    leaves: Any = {"leaf_modules": leaf_modules, "leaf_functions": leaf_functions}
    if isinstance(root, nn.Module):
        graph, holder = record(private(root, training), **leaves, concrete_args=concrete_args, original=root)
        if not training and any(COMPUTED in node.meta for node in graph.nodes):
            with contextlib.suppress(NotTraceable):  # a size or a branch that depends on a buffer's values
                live = record(private(root, training), **leaves, concrete_args=concrete_args, original=root, live=True)
                if _operations(live[0]) == _operations(graph):
                    graph, holder = live
    else:
        graph, holder = record(root, **leaves, concrete_args=concrete_args)
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
    live: bool = False,
) -> tuple[fx.Graph, nn.Module]:
    """Trace a private module in its current mode, or a function; see :func:`trace`.

    Args:
        original: the module that ``root`` is a copy of; hooks and closures may refer to the original's parts.
        live: record operations on buffers alone, as nodes without names, rather than store their results. Nothing is
            said about random draws.

    Returns:
        The graph, and the module that it refers to: ``root`` itself, or a copy with the same parts if ``root`` has
        hooks or its own ``__call__``. Constants of the graph become attributes of this module
        (:func:`fxcore.tracing.constants.made_constants`).
    """
    check_root(root)
    given = checked_leaf_modules(leaf_modules)
    check_functions(leaf_functions)
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
            tracer = Tracer(classes, patterns, untraceable, FactoryRecorder(root), originals, paths, live)
            tracer.proxy_buffer_attributes = proxies or live
            try:
                # Constants must not be inference tensors, which autograd cannot keep.
                with torch.inference_mode(False), tracer.factories:
                    graph = cast(fx.Graph, tracer.trace(traced, concrete or None))
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
            graph, tracer = _traced(attempt, held and not live)
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
    if not live:
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


def _operations(graph: fx.Graph) -> list[tuple[str, Any, str]]:
    return [(node.op, node.target, node.meta[PATH]) for node in graph.nodes if PATH in node.meta]


def private(model: nn.Module, training: bool) -> nn.Module:
    """Return a copy of ``model`` to trace in the mode ``training``, sharing its tensors and other attributes."""
    check_python(model)
    alike = all(part.training == training for part in model.modules())
    scripted = [] if alike else [part for part in model.modules() if isinstance(part, torch.jit.ScriptModule)]
    made = private_copy(model, {part: shared_copy(part) for part in scripted})  # it shares these with the model
    if not alike:
        made.train(training)
    unwrap_parts(made)
    return made


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
