"""Explain why a model cannot be traced: the kind of code, the line and module, and what to do.

torch.fx records a run with proxies in place of tensors. Code that needs a value (to branch, to count, to loop) cannot
be recorded. The kind of code is recognised by the error message and the expression that raised the error.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

from torch import fx, nn

from fxcore.copies import GENERATED
from fxcore.errors import NotTraceable
from fxcore.tracing.constants import StateWrite
from fxcore.tracing.names import shown_name
from fxcore.tracing.proxies import TracedAutocast, TracedKey, TracedWrite

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_FXCORE = Path(__file__).parents[1]
_CONSTRUCTOR = re.compile(
    r"(torch\.)?(zeros|ones|full|empty|rand|randn|randint|randperm|arange|linspace|eye|tensor|as_tensor|from_numpy|"
    r"Tensor|FloatTensor|LongTensor)\("
)
_FIXED = " or fix it in __init__"


class _Spot(NamedTuple):
    """The place in the model's source at which tracing failed; empty if it is not in the model's source."""

    source: str = ""  # ``file:line: statement``
    statement: str = ""  # the whole line
    expression: str = ""  # the part of it that raised the error
    code: CodeType | None = None
    variables: Mapping[str, Any] = MappingProxyType({})  # the local ones
    globals: Mapping[str, Any] = MappingProxyType({})


class _Reason(NamedTuple):
    kind: str
    problem: str  # a clause
    advice: str


def explain(error: Exception, model: nn.Module | Callable[..., Any], path: str) -> NotTraceable:
    """Return the error to raise for a failed trace.

    Its ``extra`` has ``kind`` (``control_flow``, ``loop``, ``bool``, ``len``, ``number``, ``range``, ``iteration``,
    ``kwargs``, ``constructor``, ``assignment``, ``key``, ``function``, ``module``, ``hook``, ``write``, ``context``,
    ``other``), ``module`` (a path, or the model's class), ``source`` (``file:line: code``), ``expression`` and
    ``advice``.

    Args:
        error: the exception raised by the tracer.
        model: the module or function that was traced.
        path: path of the innermost module that raised it; empty for ``model`` itself.
    """
    spot = _spot(error, model)
    reason = _reason(error, spot, model)
    name = shown_name(model)
    if not isinstance(model, nn.Module):
        reason = reason._replace(advice=reason.advice.removesuffix(_FIXED))
    inside = f" in {path} ({type(model.get_submodule(path)).__name__})" if path and isinstance(model, nn.Module) else ""
    at = f" (at {spot.source})" if spot.source else ""
    whole = f', or keep the module whole with leaf_modules=("{path}",)' if path else ""
    if not path and (function := _own_function(spot, model)) and reason.kind != "function":
        whole = f", or keep the function whole with leaf_functions=({function},)"
    elif not path and isinstance(model, nn.Module):
        whole = ", or choose nodes of its parts that can be traced"
    return NotTraceable.because(
        f"{name} cannot be traced{inside}: {reason.problem}{at}",
        f"{reason.advice}{whole}",
        kind=reason.kind,
        module=path or name,
        source=spot.source,
        expression=spot.expression,
    )


def _reason(error: Exception, spot: _Spot, model: Any) -> _Reason:
    message, code = str(error), spot.expression
    shown = f"`{code}`" if code else "it"
    if isinstance(error, StateWrite):
        return _Reason(
            "write",
            f"{shown} writes to {error.name}, which the model keeps between calls, and a graph cannot record that",
            "compute a new tensor instead",
        )
    if isinstance(error, TracedAutocast):
        return _Reason(
            "context",
            f"{shown} runs under an autocast that the model turns on, which a graph cannot record",
            "turn autocast on around the calls of the graph instead",
        )
    if "cannot be used as inputs to control flow" in message:
        return _control_flow(shown, spot)
    if "'len' is not supported" in message:
        return _Reason(
            "len",
            f"{shown} takes the length of a traced value",
            "use .shape[0] or .size(0), or leaf_functions=(len,)",
        )
    if "cannot be iterated" in message:
        return _iteration(shown, spot)
    if _CONSTRUCTOR.match(code):
        return _Reason(
            "constructor",
            f"{shown} makes a tensor whose size or content is only known when the model runs",
            "use zeros_like, ones_like, full_like or x.new_zeros(...) on a traced tensor, give the sizes as one "
            "tuple, or keep a fixed tensor as a buffer (register_buffer in __init__)",
        )
    if re.search(r"\brange\(", code):
        return _Reason("range", f"{shown} counts up to a traced value", "pass the count in concrete_args" + _FIXED)
    if re.search(r"\b(int|float|complex|round|index|hex|str)\(", code) and "Proxy" in message:
        return _Reason(
            "number",
            f"{shown} converts a traced value to a Python number",
            "leave out the conversion where a size or a tensor will do (x.shape[0] // 2, x.to(torch.int64)), or "
            "pass the value in concrete_args",
        )
    if isinstance(error, TracedWrite) or "does not support item deletion" in message:
        return _Reason(
            "assignment",
            f"{shown} changes a traced value in a way that a graph cannot record",
            "give the new value a new name, or copy it into the old one with copy_",
        )
    if isinstance(error, TracedKey):
        return _Reason(
            "key",
            f"{shown} looks a traced value up in a dictionary or set",
            "pass what decides it in concrete_args" + _FIXED,
        )
    if outside := _outside(spot):
        return _Reason(
            "function",
            f"{shown} passes a traced value to {outside}, which is not torch's and needs its value",
            f"use torch's own function, or keep it whole with leaf_functions=({outside},)",
        )
    if "Proxy" in message and ("interpreted as an integer" in message or "indices must be" in message):
        return _Reason(
            "number",
            f"{shown} needs a Python number and got a traced value",
            "pass the value in concrete_args" + _FIXED,
        )
    if re.search("(module|parameter) is not (installed as a submodule|a member of this module)", message):
        return _Reason(
            "module",
            f"{shown} uses a module or a parameter that is not part of what is traced",
            "trace an nn.Module that has it as an attribute",
        )
    if called := _kept_by_torch(spot):
        return _Reason(
            "function",
            f"{shown} passes a traced value to {called}, which needs its value",
            f"keep it whole with leaf_functions=({called},)",
        )
    if match := re.match(r"torch\.([fi]info)\(", code):
        return _Reason(
            "number",
            f"{shown} needs a dtype and got a traced value",
            f"take that of a parameter, as in torch.{match[1]}(next(self.parameters()).dtype), or a fixed one",
        )
    missing = isinstance(error, LookupError | AttributeError) or "'NoneType'" in message
    if missing and (hooked := _hooked_layer(model)):
        return _Reason(
            "hook",
            f"{shown} fails ({type(error).__name__}: {message}), perhaps for lack of what the forward hook of {hooked} "
            "stores: layers are recorded, not run, and neither are their hooks",
            f"choose the node {hooked} instead of what its hook stores",
        )
    first = message.splitlines()[0].split(". ")[0] if message else type(error).__name__
    return _Reason("other", first, "change that line")


def _control_flow(shown: str, spot: _Spot) -> _Reason:
    code, statement = spot.expression, spot.statement
    decided = (
        "pass what decides it in concrete_args if it is the same for every input, choose with torch.where if it is not"
    )
    if outside := _outside(spot):
        return _Reason(
            "function",
            f"{shown} passes a traced value to {outside}, which branches on it",
            f"keep it whole with leaf_functions=({outside},)",
        )
    if match := re.match(r"(max|min|sum|any|all|sorted)\(", code):
        return _Reason(
            "function",
            f"{shown} compares traced values in Python",
            f"use torch's own function on tensors, or keep it whole with leaf_functions=({match[1]},)",
        )
    if re.match(r"bool\(", code):
        return _Reason("bool", f"{shown} converts a traced value to a bool", decided)
    if statement.startswith("while"):
        return _Reason(
            "loop",
            f"the number of iterations of `{statement}` depends on a traced value",
            "give it a fixed number of iterations",
        )
    branch = f"`{statement}`" if re.match(r"(el)?if |assert ", statement) else shown
    return _Reason("control_flow", f"{branch} branches on a value that is only known when the model runs", decided)


def _iteration(shown: str, spot: _Spot) -> _Reason:
    statement, names = spot.statement, _keyword_dicts(spot)
    if "**" in spot.expression or any(re.search(rf"\b{name}\b", statement) for name in names):
        return _Reason(
            "kwargs",
            f"`{statement}` reads **kwargs, whose names are not known while the model is traced",
            "name the arguments in the signature of forward, or pass them in concrete_args",
        )
    what = f"the loop `{statement}`" if statement.startswith(("for ", "async for ")) else shown
    return _Reason(
        "iteration",
        f"{what} iterates over a traced value, whose length is only known when the model runs",
        "index it a fixed number of times (x[0], x[1]), unpack it into names, or use unbind, chunk or split with "
        "fixed numbers",
    )


def _keyword_dicts(spot: _Spot) -> list[str]:
    """Return the names of variables that refer to the ``**`` parameter of the traced function."""
    proxies = ((name, value) for name, value in spot.variables.items() if isinstance(value, fx.Proxy))
    return [name for name, proxy in proxies if str(proxy.node.target).startswith("**")]


def _hooked_layer(model: Any) -> str | None:
    """Return the path of the first of torch's layers that has a forward hook; the tracer does not enter these."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    layers = ((path, part) for path, part in parts if type(part).__module__.startswith("torch.nn."))
    return next((path for path, part in layers if path and part._forward_hooks and not [*part.children()]), None)


def _outside(spot: _Spot) -> str | None:
    """Return the name of the called function, unless it belongs to torch, Python or the model's source."""
    called, home = _function(spot) or ("", "")
    own = spot.globals.get("__name__")
    return None if home == own or home.split(".")[0] in ("", "torch", "builtins", "_operator") else called


def _kept_by_torch(spot: _Spot) -> str | None:
    """Return the name of the called function, if it is one of torch's in Python that can be kept whole."""
    called, home = _function(spot) or ("", "")
    return called if home.startswith(("torch.nn.utils.", "torch.nested")) else None


def _function(spot: _Spot) -> tuple[str, str] | None:
    """Return the name of the called function, as it is written, and its module."""
    called = _called(spot.expression)
    first, *rest = (called or "").split(".")
    scope = {**spot.globals, **spot.variables}
    if called is None or first not in scope:
        return None
    value = scope[first]
    for part in rest:
        if type(value).__module__.startswith("torch.fx"):
            return None  # a method of a traced value
        value = getattr(value, part, None)
    if isinstance(value, type) or not callable(value) or isinstance(value, nn.Module):
        return None
    return called, str(getattr(value, "__module__", None) or type(getattr(value, "__self__", value)).__module__)


def _own_function(spot: _Spot, model: Any) -> str | None:
    """Return the name of the function that contains the spot, if it is a top-level function of the model's source."""
    name = spot.code.co_name if spot.code else ""
    found = spot.globals.get(name)
    own = isinstance(found, FunctionType) and found.__code__ is spot.code
    return name if own and found is not model else None


def _called(expression: str) -> str | None:
    """Return the name of the function in a call expression; None for other expressions, even if they start with a
    call."""
    try:
        parsed = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None
    name = ast.unparse(parsed.func) if isinstance(parsed, ast.Call) else ""
    return name if re.fullmatch(r"[A-Za-z_][\w.]*", name) else None


def _spot(error: BaseException, model: Any) -> _Spot:
    """Return the innermost frame in the model's source, skipping torch, Python and libraries that the model calls."""
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    packages = {str(getattr(type(m) if isinstance(m, nn.Module) else m, "__module__", "")).split(".")[0] for m in parts}
    walked = [*traceback.walk_tb(error.__traceback__)]
    summaries = traceback.extract_tb(error.__traceback__)
    for (frame, _), summary in reversed([*zip(walked, summaries, strict=True)]):
        if _is_models(summary.filename, packages):
            statement = (summary.line or "").strip()
            source = f"{_short(summary.filename)}:{summary.lineno or 0}: {statement}"
            expression = _expression(summary) or statement
            return _Spot(source, statement, expression, frame.f_code, frame.f_locals, frame.f_globals)
    return _Spot()


def _is_models(file: str, packages: set[str]) -> bool:
    if _FXCORE in Path(file).parents or file.endswith("torchvision/models/feature_extraction.py"):
        return False
    if "site-packages/" in file:
        package = file.split("site-packages/")[-1].split("/")[0]
        return package != "torch" and package in packages
    return not file.startswith((_STANDARD_LIBRARY, "<frozen", GENERATED))


def _expression(summary: traceback.FrameSummary) -> str:
    """Return the expression that raised the error, from the traceback's columns; empty if it spans several lines."""
    start, end = summary.colno, summary.end_colno
    if start is None or end is None or summary.lineno != summary.end_lineno or summary.line is None:
        return ""
    # ``line`` may be stripped, while columns count bytes from the start of the line in the file.
    original = getattr(summary, "_original_line", "") or summary.line
    return original.encode()[start:end].decode(errors="replace").strip()


def _short(source: str) -> str:
    """Shorten a path to the part after site-packages, or to the file name, so that errors hide installation paths."""
    return source.split("site-packages/")[-1] if "site-packages/" in source else Path(source).name
