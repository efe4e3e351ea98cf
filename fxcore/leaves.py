"""Functions kept whole while a model is traced.

``torch.fx.wrap`` has to be written at the top of the module that calls the function, and the tracer's own
``autowrap_functions`` sees the globals of ``forward`` only: not those of helpers that ``forward`` calls, nor names with
an underscore. Here each name under which a function is known anywhere is patched for as long as the trace runs.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from torch import fx, nn
from torch.fx._symbolic_trace import _wrapped_fns_to_patch

from fxcore.errors import FxError

_MISSING = object()


class NotAFunction(FxError):
    """Something else than a function was to be kept whole; ``name``."""


@contextlib.contextmanager
def kept_whole(functions: Sequence[Callable[..., Any]], model: nn.Module) -> Iterator[None]:
    """While this lasts, calls of ``functions`` with traced values, from this thread, become one node each.

    Other threads, and calls without traced values, get the functions themselves.

    Raises:
        NotAFunction: a class cannot be kept whole, since ``isinstance`` needs it.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for function in functions:
            if isinstance(function, type) or not callable(function):
                raise NotAFunction(f"{function!r} is no function and cannot be kept whole", name=str(function))
            recorder = _recorder(function)
            for space, name in _names(function, model):
                changed.append((space, name, space.get(name, _MISSING)))
                space[name] = recorder
        yield
    finally:
        for space, name, value in reversed(changed):
            if value is _MISSING:
                space.pop(name, None)
            else:
                space[name] = value


def _names(function: Callable[..., Any], model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Every namespace and name by which ``function`` is called."""
    name = getattr(function, "__name__", "")
    if getattr(builtins, name, None) is function:
        # Python's own functions are patched where the model calls them, never for everybody.
        spaces = {id(s): s for m in model.modules() if (s := _globals(m)) is not None}
        yield from ((space, name) for space in spaces.values() if name not in space)
        return
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            space = module.__dict__
            # Where it is wrapped by torch.fx.wrap, torch.fx itself patches it, over whatever it finds there.
            own = [key for key, value in list(space.items()) if value is function]
            yield from [(space, key) for key in own if (id(space), key) not in _wrapped_fns_to_patch]


def _globals(module: nn.Module) -> dict[str, Any] | None:
    if type(module).__module__.split(".")[0] == "torch":
        return None
    space: dict[str, Any] | None = getattr(inspect.unwrap(type(module).forward), "__globals__", None)
    return space


def _recorder(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        # Only the thread that traces has traced values.
        proxy = _proxy_in((args, kwargs))
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", function, args, kwargs)

    return record


def _proxy_in(value: Any) -> fx.Proxy | None:
    if isinstance(value, fx.Proxy):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((p for p in map(_proxy_in, value) if p is not None), None)
    return None
