"""Find and run passes by name, with parameters from JSON.

Parameters are numbers and names of operations, modules and nodes; none can contain code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from fxcore.errors import BadArgument
from fxcore.passes.attention import attention_maps
from fxcore.passes.base import APPLIED, Applied, BadParameter, Transform, UnknownTransform, applied
from fxcore.passes.fold_constants import fold_constants
from fxcore.passes.fold_normalization import MEAN, STD, fold_normalization
from fxcore.passes.fuse_conv_bn import fuse_conv_bn
from fxcore.passes.keep_float import keep_float
from fxcore.passes.out_of_place import out_of_place
from fxcore.passes.remove import remove
from fxcore.tracing.interpreter import require_graph

_PER_CHANNEL = {"type": "array", "items": {"type": "number"}}

_BY_NAME: dict[str, Transform] = {}


def register(*transforms: Transform) -> None:
    """Register passes, so that they are listed and can be run by name.

    :mod:`fxcore.toolbox` registers its own passes when ``fxcore`` is imported.
    """
    _BY_NAME.update({made.name: made for made in transforms})


register(
    Transform("fuse_conv_bn", "Fold batch norms into the convolutions before them.", {}, fuse_conv_bn),
    Transform("fold_constants", "Replace expressions of parameters and buffers with their values.", {}, fold_constants),
    Transform("out_of_place", "Replace in-place operations with out-of-place ones.", {}, out_of_place),
    Transform(
        "remove",
        "Remove operations that do nothing in eval mode.",
        {"dropout": {"type": "boolean", "default": True}, "identity": {"type": "boolean", "default": True}},
        remove,
    ),
    Transform(
        "fold_normalization",
        "Fold the normalisation of images into the first convolution; the input is in [0, 1].",
        {"mean": {**_PER_CHANNEL, "default": list(MEAN)}, "std": {**_PER_CHANNEL, "default": list(STD)}},
        fold_normalization,
        changes_input=True,
    ),
    Transform(
        "keep_float",
        "Keep nodes, or all nodes under a path, in float32 with precision=int8.",
        {"nodes": {"type": "array", "items": {"type": "string"}}},
        keep_float,
    ),
    Transform(
        "attention_maps",
        "Add a node `<module>.attention` with the attention weights per head for each attention layer.",
        {},
        attention_maps,
        adds_nodes=True,
    ),
)


def list_transforms() -> list[Transform]:
    """Return all passes that can be run by name.

    >>> "fuse_conv_bn" in [t.name for t in list_transforms()]
    True
    """
    return list(_BY_NAME.values())


def get_transform(name: str) -> Transform:
    """Return the pass called ``name``.

    Raises:
        UnknownTransform: there is no pass of that name.

    >>> get_transform("remove").description
    'Remove operations that do nothing in eval mode.'
    """
    if name not in _BY_NAME:
        near = difflib.get_close_matches(name[:64], _BY_NAME, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(_BY_NAME)}"
        raise UnknownTransform(f"there is no transform {name[:64]!r}; {hint}", name=name[:64], suggestions=near)
    return _BY_NAME[name]


def parse(wanted: str | Mapping[str, Any]) -> tuple[Transform, dict[str, Any]]:
    """Parse a name, or ``{"name": …, parameter: value, …}``, into a pass and its validated parameters.

    Raises:
        UnknownTransform: there is no pass of that name.
        BadParameter: a parameter is unknown, missing or invalid.

    >>> transform, parameters = parse({"name": "remove", "identity": False})
    >>> transform.name, parameters
    ('remove', {'dropout': True, 'identity': False})
    """
    given = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise UnknownTransform(
            "a transform is a name, or an object with a `name` and parameters", name=None, suggestions=[]
        )
    found = get_transform(name)
    parameters = {}
    for key in given:
        if key not in found.parameters:
            known = ", ".join(found.parameters) or "none"
            raise BadParameter(
                f"{name} has no parameter {str(key)[:64]!r}; it has {known}", transform=name, parameter=str(key)[:64]
            )
    for key, schema in found.parameters.items():
        if key not in given and "default" not in schema:
            raise BadParameter(f"{name} needs the parameter {key!r}", transform=name, parameter=key)
        value = given.get(key, schema.get("default"))
        problem = _problem(value, schema)
        if problem:
            raise BadParameter(f"the parameter {key!r} of {name} must be {problem}", transform=name, parameter=key)
        parameters[key] = value
    return found, parameters


def apply_transforms(module: fx.GraphModule, wanted: Sequence[str | Mapping[str, Any]]) -> fx.GraphModule:
    """Run passes by name, in order, on a copy of ``module``.

    Args:
        wanted: names, or ``{"name": …, parameter: value, …}``.

    Returns:
        The new module; :func:`~fxcore.passes.base.applied` lists what each pass changed.

    Raises:
        NotAGraph: ``module`` is not a graph module.
        BadArgument: ``wanted`` is not a list.
        UnknownTransform, BadParameter: a pass or parameter is invalid; raised before any pass runs.
        CannotTransform: a pass cannot be applied.

    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout()).eval())
    >>> [(a.name, a.changes) for a in applied(apply_transforms(model, ["fuse_conv_bn", "remove"]))]
    [('fuse_conv_bn', 1), ('remove', 1)]
    """
    require_graph(module)
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise BadArgument(f"transforms are a list such as ['fuse_conv_bn'], not {wanted!r:.100}")
    steps = [parse(one) for one in wanted]
    for found, parameters in steps:
        module = found.run(module, **parameters)
        *before, last = applied(module)
        module.meta[APPLIED] = (*before, Applied(last.name, last.changes, parameters))
    return module


def described(transform: Transform) -> dict[str, Any]:
    """Describe a pass for JSON.

    >>> described(get_transform("keep_float"))["parameters"]
    {'nodes': {'type': 'array', 'items': {'type': 'string'}}}
    """
    fields = {name: value for name, value in vars(transform).items() if name != "run"}
    return {**fields, "parameters": {name: dict(schema) for name, schema in transform.parameters.items()}}


def _problem(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return a description of ``schema`` if ``value`` does not match it, else None."""
    kind = schema["type"]
    if kind == "array":
        if not isinstance(value, (list, tuple)):
            return "a list"
        return next((f"a list, each item {p}" for p in (_problem(v, schema["items"]) for v in value) if p), None)
    if kind == "boolean":
        return None if isinstance(value, bool) else "true or false"
    if kind == "number":
        return None if isinstance(value, (int, float)) and not isinstance(value, bool) else "a number"
    if not isinstance(value, str):
        return "a string"
    return None if value in schema.get("enum", [value]) else "one of " + ", ".join(schema["enum"])
