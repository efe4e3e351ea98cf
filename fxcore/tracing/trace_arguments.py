"""The arguments of :func:`~fxcore.tracing.tracer.trace`, checked before anything is traced."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torchvision
from torch import nn

from fxcore.errors import FxError, NotTraceable
from fxcore.tracing.explain import called
from fxcore.tracing.leaves import NotAFunction

#: in ``leaf_modules``: close what cannot be traced
AUTO = "auto"

LeafModule = type[nn.Module] | str


class UnknownArgument(FxError):
    """An argument names what the model does not have; ``name`` and ``suggestions``."""


def default_leaf_modules() -> tuple[type[nn.Module], ...]:
    """The classes besides torch.nn's own that torchvision keeps whole: every module of ``torchvision.ops``."""
    members = (getattr(torchvision.ops, name) for name in dir(torchvision.ops))
    return tuple(m for m in members if isinstance(m, type) and issubclass(m, nn.Module))


def check_root(root: Any) -> None:
    """Refuse to trace what is neither a module nor a Python function.

    Raises:
        NotTraceable: with what to give instead.
    """
    if isinstance(root, (nn.Module, FunctionType)):
        return
    name = getattr(root, "__qualname__", None) or repr(root)[:100]
    if isinstance(root, type) and issubclass(root, nn.Module):
        advice = f"give an instance, {root.__name__}(...)"
    elif isinstance(root, functools.partial):
        advice = "give its function, and concrete_args for what is fixed"
    elif isinstance(getattr(root, "__self__", None), nn.Module):
        advice = "give the module itself, or a lambda that calls the method"
    else:
        advice = "write a function or a lambda that calls it"
    raise NotTraceable(
        f"{name} is a {type(root).__name__}, neither a module nor a Python function; {advice}",
        kind="callable",
        module=name,
        source="",
        expression="",
        advice=advice,
    )


def leaves(given: Any) -> tuple[LeafModule, ...]:
    """The classes, paths and patterns of ``leaf_modules``.

    Raises:
        UnknownArgument: something else is among them.
    """
    found = (given,) if isinstance(given, str) else given if isinstance(given, Sequence) else (given,)
    for leaf in found if given is not None else ():
        if not isinstance(leaf, str) and not (isinstance(leaf, type) and issubclass(leaf, nn.Module)):
            raise UnknownArgument(
                f"leaf_modules is a list of module classes and of paths, or 'auto', and holds {leaf!r:.100}",
                name="leaf_modules",
                suggestions=[],
            )
    return tuple(found) if given is not None else ()


def check_functions(leaf_functions: Any) -> None:
    """Refuse ``leaf_functions`` that are no list with :class:`NotAFunction`."""
    if not isinstance(leaf_functions, Sequence):
        raise NotAFunction(f"leaf_functions is a list of functions, not {leaf_functions!r:.100}", name="leaf_functions")


def check_patterns(model: nn.Module | Callable[..., Any], patterns: Sequence[str]) -> None:
    """Refuse paths and patterns that match no module of ``model``.

    Raises:
        UnknownArgument: with names that are near.
    """
    paths = [path for path, _ in model.named_modules()] if patterns and isinstance(model, nn.Module) else []
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UnknownArgument(
                f"{called(model)} has no module {pattern!r} to keep whole{hint}", name=pattern, suggestions=near
            )


def check_arguments(model: nn.Module | Callable[..., Any], concrete: Any) -> dict[str, Any]:
    """Copy ``concrete_args``, which name arguments that ``model`` takes.

    Raises:
        UnknownArgument: they are no dictionary, or ``model`` takes no argument of that name.
    """
    if not isinstance(concrete, Mapping | None):
        raise UnknownArgument(
            f"concrete_args is a dictionary, argument to value, not {concrete!r:.100}",
            name="concrete_args",
            suggestions=[],
        )
    with contextlib.suppress(TypeError, ValueError):
        known = list(inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters)
        for name in concrete or ():
            if name not in known:
                raise UnknownArgument(
                    f"{'forward of ' if isinstance(model, nn.Module) else ''}{called(model)} takes "
                    f"{', '.join(known) or 'nothing'}, and no {name!r}",
                    name=name,
                    suggestions=known,
                )
    return dict(concrete or {})
