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
from types import CellType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import fx, nn
from torch.fx._symbolic_trace import _wrapped_fns_to_patch

from fxcore.errors import FxError

P = ParamSpec("P")
R = TypeVar("R")

_MISSING = object()


class NotAFunction(FxError):
    """Something else than a function was to be kept whole; ``name``."""


@contextlib.contextmanager
def kept_whole(functions: Sequence[Callable[..., Any]], root: nn.Module | Callable[..., Any]) -> Iterator[None]:
    """While this lasts, calls of ``functions`` with traced values, from this thread, become one node each.

    Args:
        root: the module or function that is traced.

    Other threads, and calls without traced values, get the functions themselves.

    Raises:
        NotAFunction: a class cannot be kept whole, since ``isinstance`` needs it; nor what nothing knows by a name.
    """
    with contextlib.ExitStack() as stack:
        for function in functions:
            if isinstance(function, type) or not callable(function):
                raise NotAFunction(f"{function!r} is no function and cannot be kept whole", name=str(function))
            places = list(_places(function, root))
            if not places:
                raise NotAFunction(
                    f"{function!r} cannot be kept whole: what is traced does not call it by a name that can be found",
                    name=str(function),
                )
            recorder = _recorder(function)
            for place in places:
                stack.enter_context(place(recorder))
        yield


_Place = Callable[[Any], contextlib.AbstractContextManager[None]]
"""Puts another function in the place of one, for a while."""


def _places(function: Callable[..., Any], root: nn.Module | Callable[..., Any]) -> Iterator[_Place]:
    """Everywhere that ``function`` is called from: globals of all modules and of the root's source, attributes of the
    root where it is a module, and variables of functions around its source."""
    name = getattr(function, "__name__", "")
    parts = list(root.modules()) if isinstance(root, nn.Module) else []
    forwards = list(_functions(parts or [root]))
    own = {id(f.__globals__): f.__globals__ for f in forwards}
    if getattr(builtins, name, None) is function:
        # Python's own functions are patched where the root calls them, never for everybody.
        yield from (functools.partial(_as_global, space, name) for space in own.values() if name not in space)
        return
    spaces = {id(m.__dict__): m.__dict__ for m in list(sys.modules.values()) if isinstance(m, ModuleType)}
    for space in (spaces | own | {id(vars(m)): vars(m) for m in parts}).values():
        for key in [key for key, value in list(space.items()) if value is function]:
            # Where it is wrapped by torch.fx.wrap, torch.fx itself patches it, over whatever it finds there.
            wrapped = (id(space), key) in _wrapped_fns_to_patch
            yield functools.partial(_as_global, space, key) if not wrapped else contextlib.nullcontext
    cells = {id(cell): cell for f in forwards for cell in f.__closure__ or () if _content(cell) is function}
    yield from (functools.partial(_as_content, cell) for cell in cells.values())


@contextlib.contextmanager
def _as_global(space: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = space.get(name, _MISSING)
    space[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            space.pop(name, None)
        else:
            space[name] = before


@contextlib.contextmanager
def _as_content(cell: CellType, value: Any) -> Iterator[None]:
    before, cell.cell_contents = cell.cell_contents, value
    try:
        yield
    finally:
        cell.cell_contents = before


def _functions(parts: Sequence[nn.Module | Callable[..., Any]]) -> Iterator[FunctionType]:
    """What modules and functions run, and the functions that these find in variables around them; torch's own aside."""
    kinds = {type(p) for p in parts if isinstance(p, nn.Module) and type(p).__module__.split(".")[0] != "torch"}
    run = [kind.forward for kind in kinds] + [p for p in parts if not isinstance(p, nn.Module)]
    waiting = [f for f in map(inspect.unwrap, run) if isinstance(f, FunctionType)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) not in seen:
            seen.add(id(function))
            yield function
            waiting += [f for cell in function.__closure__ or () if isinstance(f := _content(cell), FunctionType)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _MISSING


def one_node(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` record each traced call as one node, in later traces too: torch.fx traces when it unpickles."""
    return _recorder(function, lasting=True)


def _recorder(function: Callable[..., Any], lasting: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        # Only the thread that traces has traced values.
        proxy = _proxy_in((args, kwargs))
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", record if lasting else function, args, kwargs)

    return record


def _proxy_in(value: Any) -> fx.Proxy | None:
    if isinstance(value, fx.Proxy):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((p for p in map(_proxy_in, value) if p is not None), None)
    return None
