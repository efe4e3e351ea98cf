"""Check the arguments of :func:`~fxcore.tracing.tracer.trace` before anything is traced."""

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
from torch.nn.parameter import is_lazy

from fxcore.errors import FxError, NotTraceable
from fxcore.tracing.names import shown_name
from fxcore.wrappers import check_python

#: in ``leaf_modules``: keep modules whole that cannot be traced
AUTO = "auto"

LeafModule = type[nn.Module] | str


class UnknownArgument(FxError):
    """An argument refers to ``name``, which the model does not have; ``suggestions`` has similar names."""


def default_leaf_modules() -> tuple[type[nn.Module], ...]:
    """Return the leaf classes of torchvision's extractor besides torch.nn's: all modules of ``torchvision.ops``."""
    members = (getattr(torchvision.ops, name) for name in dir(torchvision.ops))
    return tuple(m for m in members if isinstance(m, type) and issubclass(m, nn.Module))


def check_root(root: Any) -> None:
    """Check that ``root`` is a module whose tensors are initialized, or a Python function.

    Raises:
        NotTraceable: ``root`` is neither; the error says what to pass instead.
    """
    if isinstance(root, nn.Module):
        tensors = (*root.named_parameters(), *root.named_buffers())
        lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
        if lazy is None:
            return
        raise NotTraceable.because(
            f"{lazy} of {type(root).__name__} has no shape yet, as in torch's lazy modules",
            "call the module once on an example, which initializes it",
            kind="lazy",
            module=lazy.rpartition(".")[0],
        )
    if isinstance(root, FunctionType):
        return
    check_python(root)
    name = getattr(root, "__qualname__", None) or repr(root)[:100]
    if isinstance(root, type) and issubclass(root, nn.Module):
        advice = f"pass an instance, {root.__name__}(...)"
    elif isinstance(root, functools.partial):
        advice = "pass its function, and its arguments in concrete_args"
    elif isinstance(getattr(root, "__self__", None), nn.Module):
        advice = "pass the module itself, or a lambda that calls the method"
    else:
        advice = "write a function or a lambda that calls it"
    raise NotTraceable.because(
        f"{name} is a {type(root).__name__}, neither a module nor a Python function",
        advice,
        kind="callable",
        module=name,
    )


def checked_leaf_modules(given: Any) -> tuple[LeafModule, ...]:
    """Check ``leaf_modules``, and return its classes, paths and patterns.

    Raises:
        UnknownArgument: it contains another type of object.
    """
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    found = () if given is None else (given,) if alone else tuple(given)
    for leaf in found:
        if not isinstance(leaf, str) and not (isinstance(leaf, type) and issubclass(leaf, nn.Module)):
            raise UnknownArgument(
                f"leaf_modules is a list of module classes and of paths, or 'auto', and holds {leaf!r:.100}",
                name="leaf_modules",
                suggestions=[],
            )
    return found


def check_patterns(model: nn.Module | Callable[..., Any], patterns: Sequence[str]) -> None:
    """Check that each of ``patterns``, a path or shell pattern, matches a module of ``model``.

    Raises:
        UnknownArgument: a pattern matches no module; ``suggestions`` has similar paths.
    """
    paths = [path for path, _ in model.named_modules()] if patterns and isinstance(model, nn.Module) else []
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UnknownArgument(
                f"{shown_name(model)} has no module {pattern!r} to keep whole{hint}", name=pattern, suggestions=near
            )


def check_arguments(model: nn.Module | Callable[..., Any], concrete: Any) -> dict[str, Any]:
    """Check that ``concrete`` names arguments of ``model``, and return it as a dictionary.

    Raises:
        UnknownArgument: ``concrete`` is not a mapping, or ``model`` has no argument of that name.
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
                    f"{'forward of ' if isinstance(model, nn.Module) else ''}{shown_name(model)} takes "
                    f"{', '.join(known) or 'nothing'}, but not {name!r}",
                    name=name,
                    suggestions=known,
                )
    return dict(concrete or {})
