"""The tracer: torchvision's, whose names equal those of ``get_graph_node_names``, for concurrent processes."""

from __future__ import annotations

import fnmatch
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torchvision
from torch import Tensor, fx, nn
from torchvision.models.feature_extraction import NodePathTracer

from fxcore.tracing.constants import FROZEN, FactoryRecorder, StateWrite
from fxcore.tracing.names import MODULE, NO_GRAD, PATH, UNTRACEABLE
from fxcore.tracing.proxies import TENSOR_METHODS, RecordingProxy, TracedAutocast
from fxcore.tracing.writes import mutated_argument, viewed


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
        self._thread = threading.get_ident()
        self._autocast: dict[str, torch.dtype | None] = {}
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

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        tensors = (*root.parameters(), *root.buffers()) if isinstance(root, nn.Module) else ()
        kinds = {tensor.device.type for tensor in tensors} - {"meta"} or {"cpu"}
        self._autocast = {kind: _autocast(kind) for kind in kinds}
        return cast(fx.Graph, super().trace(root, concrete_args))

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        self._check_autocast()  # the module that calls this one turned it on
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
        if isinstance(a, Tensor) and isinstance(argument, fx.Node) and (made := self.factories.origin_of(a)):
            argument.meta[FROZEN] = made
        return argument

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        # torch 2.11 cannot write code with annotations that are strings.
        written = None if isinstance(type_expr, str) else type_expr
        return cast(fx.Node, super().create_node(kind, target, args, kwargs, name, written))

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Proxy:
        if kind in ("call_function", "call_method"):
            self._check_autocast()
        if kind == "call_function":
            target = self._originals.get(target, target)
        elif kind == "call_method" and target in TENSOR_METHODS:
            kind, target = "call_function", TENSOR_METHODS[target]
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        proxy.node.meta[PATH] = self.node_to_qualname[proxy.node]
        proxy.node.meta[MODULE] = self.current_module_qualname
        base = mutated_argument(proxy.node, {})
        if base is not None:
            self._check_write(base)
        # A write without gradients leaves those of its target as they are; a parameter may be read elsewhere too.
        if not torch.is_grad_enabled() and kind != "get_attr" and (base is None or NO_GRAD in base.meta):
            proxy.node.meta[NO_GRAD] = True
        if kind == "call_module" and target in self.untraceable:
            proxy.node.meta[UNTRACEABLE] = self.untraceable[target]
        return cast(fx.Proxy, proxy)

    def _check_autocast(self) -> None:
        """Reject operations under an autocast that the model turned on for one of its devices.

        Raises:
            TracedAutocast: it did.
        """
        if any(_autocast(kind) not in (before, None) for kind, before in self._autocast.items()):
            raise TracedAutocast("turns autocast on")

    def _check_write(self, base: fx.Node) -> None:
        """Reject writes to the memory of ``base`` if it is a parameter or buffer, since later calls would see them.

        Raises:
            StateWrite: ``base`` is a parameter or buffer, or a view of one.
        """
        source = viewed(base)
        if source.op == "get_attr" and (name := self.factories.kept_in(_untraced(self.root, str(source.target)))):
            raise StateWrite(name)

    def _get_node_qualname(self, module_qualname: str, node: fx.Node) -> str:
        """Return torchvision's name for ``node``.

        torchvision's own method matches each earlier name by a regular expression, half of the trace time of a large
        model.
        """
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


def _autocast(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast for a kind of device; None if it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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
