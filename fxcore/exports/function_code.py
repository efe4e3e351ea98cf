"""Python code of this library's leaf functions, for files that run without it."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from typing import Any

from fxcore.exports.layer_code import import_of


def is_own_leaf(value: Any) -> bool:
    """Return whether ``value`` is a function of this library made by :func:`fxcore.tracing.leaves.one_node`."""
    return _is_own(value) and hasattr(value, "__wrapped__")


def define(name: str, value: Any, definitions: dict[str, str], imports: set[str]) -> None:
    """Add the code of ``value``, a function or class of this library, to ``definitions`` as ``name``.

    What it uses of this library is added before it, by its own name; the import statements of the rest are added to
    ``imports``.
    """
    code: Any = ast.parse(inspect.getsource(inspect.unwrap(value))).body[0]
    code.name, code.decorator_list = name, []
    if summary := ast.get_docstring(code):
        code.body[0] = ast.Expr(ast.Constant(summary.split("\n\n")[0]))  # examples import this library
    space = vars(sys.modules[value.__module__])
    for used in sorted({node.id for node in ast.walk(code) if isinstance(node, ast.Name)} & space.keys()):
        if isinstance(space[used], types.ModuleType):
            imports.add(f"import {space[used].__name__} as {used}")
        elif not _is_own(space[used]):
            imports.add(import_of(used, space[used]))
        elif used not in definitions:
            define(used, space[used], definitions, imports)
    definitions[name] = ast.unparse(code)


def _is_own(value: Any) -> bool:
    return str(getattr(value, "__module__", None)).startswith("fxcore.")
