"""Model → torch.fx graph whose nodes carry torchvision's node names.

The tracer is torchvision's own, so that names agree with ``get_graph_node_names`` to the letter. What is added here:
tracing disturbs no other thread, and a model that cannot be traced says where and why.
"""

from __future__ import annotations

import linecache
import math
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torchvision
from torch import fx, nn
from torchvision.models.feature_extraction import NodePathTracer

from fxcore.errors import NotTraceable

#: key in ``node.meta`` of torchvision's name for the node
PATH = "path"
#: key in ``node.meta`` of the path of the module that was running
MODULE = "module"

# torch.fx patches nn.Module for the whole process while it traces (pytorch#187589): one trace at a time.
_TRACE_LOCK = threading.Lock()


def default_leaf_modules() -> tuple[type[nn.Module], ...]:
    """The classes besides torch.nn's own that torchvision keeps whole: every module of ``torchvision.ops``."""
    members = (getattr(torchvision.ops, name) for name in dir(torchvision.ops))
    return tuple(m for m in members if isinstance(m, type) and issubclass(m, nn.Module))


class Tracer(NodePathTracer):
    """torchvision's tracer, deaf to every thread but the one that made it.

    While a trace runs, torch.fx routes ``nn.Module.__call__`` and ``__getattr__`` of the whole process through the
    tracer. Calls from other threads (inference that goes on meanwhile) pass straight through.

    Args:
        leaf_modules: classes to keep whole, besides torch.nn's own.
    """

    def __init__(self, leaf_modules: tuple[type[nn.Module], ...]) -> None:
        super().__init__(autowrap_modules=(math, torchvision.ops), leaf_modules=leaf_modules)
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        proxy.node.meta[PATH] = self.node_to_qualname[proxy.node]
        proxy.node.meta[MODULE] = self.current_module_qualname
        return proxy


def trace(
    model: nn.Module, *, training: bool = False, leaf_modules: tuple[type[nn.Module], ...] | None = None
) -> fx.Graph:
    """Record the graph of ``model``, whose parameters may be on the meta device.

    ``model`` is left in the mode that was asked for; give a private copy.

    Returns:
        The graph; each node but ``output`` has its name under ``node.meta["path"]``.

    Raises:
        NotTraceable: naming the module and the line of source at which tracing broke.
    """
    leaves = default_leaf_modules() if leaf_modules is None else leaf_modules
    model.train(training)
    with _TRACE_LOCK:
        tracer = Tracer(leaves)
        try:
            return tracer.trace(model)
        except Exception as error:
            raise _explained(error, tracer, model) from error


def names(graph: fx.Graph) -> list[str]:
    """The nodes' names in order of execution, as ``get_graph_node_names`` gives them.

    Parameters that a function takes as they are have nodes but no names; neither has the output.
    """
    return [node.meta[PATH] for node in graph.nodes if PATH in node.meta]


def _explained(error: Exception, tracer: Tracer, model: nn.Module) -> NotTraceable:
    frame = _user_frame(error)
    source = (
        f"{frame.filename}:{frame.lineno}: {(frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()}"
        if frame
        else ""
    )
    reason = str(error).split(". ")[0].splitlines()[0] if str(error) else type(error).__name__
    where = frame and _short(source)
    return NotTraceable(
        f"{type(model).__name__} cannot be traced: {reason}"
        + (f" (at {where})" if where else "")
        + "; ask for nodes of its parts that can be traced, or make the module that holds this line a leaf",
        module=tracer.current_module_qualname or type(model).__name__,
        source=_short(source),
    )


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that belongs neither to torch.fx nor to this file: the line of the model that broke."""
    own = __file__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename and frame.filename != own and "feature_extraction" not in frame.filename:
            return frame
    return None


def _short(source: str) -> str:
    """Paths from the package on: where things are installed is nobody's business."""
    return source.split("site-packages/")[-1]
