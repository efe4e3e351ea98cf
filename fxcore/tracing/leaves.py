"""Leaf functions: each call to one becomes a single node.

``torch.fx.wrap`` must be called at the top of the module that calls the function. The tracer's ``autowrap_functions``
patches only the globals of ``forward``: not those of helpers that ``forward`` calls, nor names with an underscore.
Here, all references to a function are patched while the trace runs.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx, nn

from fxcore.errors import FxError

P = ParamSpec("P")
R = TypeVar("R")

_MISSING = object()


class NotAFunction(FxError):
    """The element ``name`` of ``leaf_functions`` is not a function, or cannot be patched."""


@contextlib.contextmanager
def kept_whole(
    functions: Sequence[Callable[..., Any]], root: nn.Module | Callable[..., Any]
) -> Iterator[Mapping[Callable[..., Any], Callable[..., Any]]]:
    """Record each call to ``functions`` with traced values from this thread as a single node, within the block.

    Calls from other threads, or without traced values, run the functions themselves.

    Args:
        root: the module or function that is traced.

    Yields:
        A mapping from each function's replacement to the function. For a function wrapped by ``torch.fx.wrap``,
        torch.fx wraps the replacement, and records calls to the replacement.

    Raises:
        NotAFunction: ``functions`` is no sequence, one of them is a class, which must stay one for ``isinstance``, or
            no reference to it can be found.
    """
    if not isinstance(functions, Sequence):
        raise NotAFunction(f"leaf_functions is a list of functions, not {functions!r:.100}", name="leaf_functions")
    for function in functions:
        if isinstance(function, type) or not callable(function):
            raise NotAFunction(f"{function!r} is not a function and cannot be kept whole", name=str(function))
        if isinstance(function, torch.jit.ScriptFunction):  # torch.fx writes its class into the graph's code instead
            raise NotAFunction(
                f"{function.name} is TorchScript and cannot be kept whole; remove @torch.jit.script, or list the "
                "module that calls it in leaf_modules",
                name=str(function.name),
            )
    places = _places(functions, root) if functions else {}
    originals = {}
    with contextlib.ExitStack() as stack:
        for function in functions:
            if id(function) not in places:
                raise NotAFunction(
                    f"{function!r} cannot be kept whole: the traced code has no variable that refers to it",
                    name=str(function),
                )
            recorder = _recorder(function)
            originals[recorder] = function
            for place in places[id(function)]:
                stack.enter_context(place(recorder))
        yield originals


_Place = Callable[[Any], contextlib.AbstractContextManager[None]]
"""A context manager factory that replaces one reference to a function while entered."""


def _places(functions: Sequence[Callable[..., Any]], root: nn.Module | Callable[..., Any]) -> dict[int, list[_Place]]:
    """Find all references to each of ``functions``, by its ``id``.

    These are globals of all Python modules and of the root's source, attributes of the root's modules, and closure
    variables of its source.
    """
    parts = list(root.modules()) if isinstance(root, nn.Module) else []
    forwards = list(_functions(parts or [root]))
    own = {id(f.__globals__): f.__globals__ for f in forwards}
    found: dict[int, list[_Place]] = {}
    wanted = set()
    for function in functions:
        name = getattr(function, "__name__", "")
        if getattr(builtins, name, None) is function:
            # Built-in functions are shadowed in the root's own globals, never patched for all modules.
            found[id(function)] = [functools.partial(_as_global, own[i], name) for i in own if name not in own[i]]
        else:
            wanted.add(id(function))
    spaces = {id(m.__dict__): m.__dict__ for m in list(sys.modules.values()) if isinstance(m, ModuleType)}
    for space in (spaces | own | {id(vars(m)): vars(m) for m in parts}).values():
        for key, value in list(space.items()):
            if id(value) in wanted:
                found.setdefault(id(value), []).append(functools.partial(_as_global, space, key))
    for cell in {id(cell): cell for f in forwards for cell in f.__closure__ or ()}.values():
        if id(value := _content(cell)) in wanted:
            found.setdefault(id(value), []).append(functools.partial(_as_content, cell))
    return {function: places for function, places in found.items() if places}


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
    """Yield the forward functions of modules that are not torch's own, the given functions, and all functions in their
    closures."""
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
    except ValueError:  # an unassigned variable
        return _MISSING


def one_node(function: Callable[P, R]) -> Callable[P, R]:
    """Make every traced call to ``function`` a single node permanently, since torch.fx traces again on unpickling."""
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
