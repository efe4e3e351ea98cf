"""Export to a Python package with the graph's generated code, its layers, and the weights as safetensors.

The package imports torch and safetensors (and torchvision, if the graph calls a function of it), but not this library.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, fx, nn

from fxcore.exports.description import description_json, require_float, zipped
from fxcore.exports.subject import CannotExport, Subject, subject_of
from fxcore.extractor import Extractor
from fxcore.passes.base import called_modules, hooked
from fxcore.passes.parametrized import with_plain_weights
from fxcore.tensors import dtype_name
from fxcore.tracing.graph_module import attribute
from fxcore.tracing.interpreter import Inputs

# Arguments of layers that are not attributes of the same name, with a function that reads the value from the layer.
_FROM_LAYER = {
    "bias": lambda m: next((getattr(m, n) for n in ("bias", "in_proj_bias") if hasattr(m, n)), None) is not None,
    "add_bias_kv": lambda m: m.bias_k is not None,
}
_EVERY_MODULE = frozenset(vars(nn.Module()))
_OURS = ("fxcore", "service", "__main__")

_INIT = '''"""{title}"""

from .module import Extractor, load

__all__ = ["Extractor", "load"]
'''

_HEAD = '''"""{title}

Generated from a torch.fx graph: layers and values have the names that they have in the model.
"""

from pathlib import Path

from safetensors.torch import load_file
{imports}

OUTPUTS = {outputs}
"""Key of each output, and the node of the model whose value it is."""


class Extractor(nn.Module):
    """Compute OUTPUTS from {inputs}; return a dict with their keys."""

    def __init__(self) -> None:
        super().__init__()
{layers}

{forward}

def load(weights: str | Path = Path(__file__).with_name("weights.safetensors")) -> Extractor:
    """Return the extractor with its weights, in eval mode."""
    with torch.device("meta"):  # the weights come from the file; no memory is filled beforehand
        extractor = Extractor()
    extractor.load_state_dict(load_file(weights), strict=True, assign=True)
    return extractor.eval().requires_grad_(False)


def _assemble(kind: type, attributes: dict, parts: dict) -> nn.Module:
    """Make a layer of the class ``kind`` from its attributes, layers and tensors, without calling its __init__."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(attributes)
    for name, part in parts.items():
        _place(made, name, part)
    return made


def _place(root: nn.Module, path: str, value: nn.Module | torch.Tensor) -> None:
    """Set root.a.b.c where path is "a.b.c", creating the modules between."""
    *parents, name = path.split(".")
    for part in parents:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    if isinstance(value, nn.Module):
        root.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    else:
        root.register_buffer(name, value)
'''

_README = """# {title}

Made by fxserve; runs without it. Needs torch, safetensors{torchvision}.

```python
import torch
from {package} import load

extractor = load()
with torch.inference_mode():
    outputs = extractor({call})  # {{key: tensor}}
```

Run it from the folder that holds `{package}`. `extractor.json` says all of this for programs.

## Inputs

{inputs}
{preprocessing}
## Outputs

| key | node | shape | layout |
|---|---|---|---|
{outputs}
"""


_PREPROCESSING = """
Preprocessing of the images (RGB, scaled to [0, 1] before mean and std):

{}
"""


def export_folder(extractor: Extractor | fx.GraphModule, path: Path, *, example_inputs: Inputs | None = None) -> None:
    """Write a Python package to ``path``; ``from name import load`` imports it.

    It contains ``__init__.py``, ``module.py``, ``weights.safetensors``, ``extractor.json`` and a README.

    Args:
        extractor: an extractor, or a graph module of tensors.
        path: the folder; its name is the package's name.
        example_inputs: inputs of a graph module, see :func:`fxcore.exports.export`.

    Raises:
        CannotExport: a layer or function cannot be imported without this library.

    >>> import sys, tempfile
    >>> from fxcore import build_extractor, get_model, load_model, model_graph
    >>> graph = model_graph("squeezenet1_1")
    >>> model = load_model(get_model("squeezenet1_1"), "random")
    >>> extractor = build_extractor(graph, model, graph.resolve(["features.2"]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_folder(extractor, Path(folder) / "squeeze_early")
    ...     sys.path.insert(0, folder)
    ...     from squeeze_early import load
    ...     sys.path.remove(folder)
    ...     again = load()
    >>> x = torch.rand(1, 3, 64, 64)
    >>> torch.equal(again(x)["features.2"], extractor.module(x)["features.2"])
    True
    """
    path.mkdir(parents=True, exist_ok=True)
    for name, data in folder_files(subject_of(extractor, example_inputs), path.name).items():
        (path / name).write_bytes(data)


def folder_zip(subject: Subject) -> bytes:
    """Return the package as a zip."""
    package = re.sub(r"\W", "_", f"{subject.name}_extractor")
    return zipped({f"{package}/{name}": data for name, data in folder_files(subject, package).items()})


def folder_files(subject: Subject, package: str) -> dict[str, bytes]:
    """Return the files of the package, by name."""
    require_float(subject, "fx")
    module, about = with_plain_weights(subject.module), subject.description()
    weights = f" ({about['weights']})" if about["weights"] else ""
    title = f"Features of {subject.name}{weights}: {', '.join(o.key for o in subject.outputs)}."
    title = title.replace('"', "'").replace("\\", "/")
    code = module.graph.python_code("self", verbose=False)
    # torch.fx marks functions for its tracer at the top of the code, which would be an error inside a class.
    forward = re.sub(r"^torch\.fx\._symbolic_trace\.wrap\(.*\)\n", "", code.src, flags=re.MULTILINE)
    classes: dict[str, type] = {}
    layers = _layers(module, classes)
    imports = _imports(code.globals, forward, classes)
    outputs = {o.key: o.node for o in subject.outputs}
    source = _HEAD.format(
        title=title,
        imports="\n".join(imports),
        outputs=repr(outputs),
        inputs=", ".join(f"{i.name} {i.layout}".strip() for i in subject.inputs),
        layers="\n".join(f"        {line}" for line in layers) or "        pass",
        forward=_indented(forward),
    )
    ast.parse(source)
    types, preprocessing = [x.dtype for x in subject.examples()], about["preprocessing"]
    readme = _README.format(
        title=title,
        package=package,
        torchvision=", torchvision" if any("torchvision" in line for line in imports) else "",
        call=", ".join(
            f"torch.zeros({[1, *i.usual] if i.usual else [d or 1 for d in i.shape]}{_dtype(t)})"
            for i, t in zip(subject.inputs, types, strict=True)
        ),
        inputs="\n".join(
            f"- `{i.name}`: {', '.join([*filter(None, [i.layout]), dtype_name(t)])}, {list(i.shape)}"
            for i, t in zip(subject.inputs, types, strict=True)
        ),
        preprocessing=_PREPROCESSING.format("\n".join(f"- {key}: {value}" for key, value in preprocessing.items()))
        if preprocessing
        else "",
        outputs="\n".join(f"| {o.key} | {o.node} | {o.shape} | {o.layout} |" for o in subject.outputs),
    )
    return {
        "__init__.py": _INIT.format(title=title).encode(),
        "module.py": source.encode(),
        "weights.safetensors": save(_tensors(module)),
        "extractor.json": description_json(subject),
        "README.md": readme.encode(),
    }


def _dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f", dtype={dtype}"


def _indented(forward: str) -> str:
    lines = forward.strip().splitlines()
    return "\n".join(f"    {line}" if line else "" for line in lines) + "\n"


def _tensors(module: fx.GraphModule) -> dict[str, Tensor]:
    """Return copies of the tensors that the graph uses, since safetensors rejects two names for one storage."""
    names = set(_attributes(module))
    for target, layer in called_modules(module).items():
        names |= {f"{target}.{name}" for name in layer.state_dict()}
    return {name: attribute(module, name).detach().cpu().clone().contiguous() for name in sorted(names)}


def _attributes(module: fx.GraphModule) -> list[str]:
    """Return the targets of tensors that the graph reads itself, except those of layers that it also calls."""
    called = tuple(f"{target}." for target in called_modules(module))
    targets = dict.fromkeys(str(n.target) for n in module.graph.nodes if n.op == "get_attr")
    return [target for target in targets if not target.startswith(called)]


def _layers(module: fx.GraphModule, classes: dict[str, type]) -> list[str]:
    """Return a line of ``__init__`` for each layer and tensor; add classes that are not torch.nn's to ``classes``."""
    called = called_modules(module)
    lines = [f"_place(self, {target!r}, {_made(target, layer, classes)})" for target, layer in called.items()]
    for target in _attributes(module):
        value = attribute(module, target)
        if not isinstance(value, Tensor):
            raise CannotExport(
                f"{target} is a {type(value).__name__}, and only tensors can be read from a file", format="fx"
            )
        empty = f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
        parameter = isinstance(value, nn.Parameter)
        lines.append(f"_place(self, {target!r}, {f'nn.Parameter({empty})' if parameter else empty})")
    return lines


def _made(target: str, layer: nn.Module, classes: dict[str, type]) -> str:
    """Return an expression that creates a layer like ``layer``, without its weights.

    Raises:
        CannotExport: the layer's class cannot be imported without this library, it has attributes that are not plain
            values, or it has hooks or its own ``forward``.
    """
    kind = type(layer)
    if hooked(layer):
        own = "a forward of its own" if "forward" in vars(layer) else "hooks"
        raise CannotExport(
            f"{target} has {own}, which the format fx cannot contain; use another format",
            format="fx",
            module=target,
        )
    if getattr(nn, kind.__name__, None) is kind and kind is not nn.Sequential:
        arguments = _arguments(layer)
        if arguments is not None:
            return f"nn.{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    children = {name: _made(f"{target}.{name}", child, classes) for name, child in layer.named_children()}
    if isinstance(layer, nn.Sequential) and kind.forward is nn.Sequential.forward:
        return f"nn.Sequential({', '.join(children.values())})"
    return _assembled(target, layer, children, classes)


def _arguments(layer: nn.Module) -> dict[str, Any] | None:
    """Return the arguments that a torch.nn layer was created with; None if its attributes do not show them."""
    kind = type(layer)
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in ("device", "dtype") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        from_layer = _FROM_LAYER.get(name)
        if from_layer is None and not hasattr(layer, name):
            continue
        value = from_layer(layer) if from_layer is not None else getattr(layer, name)
        if parameter.default is parameter.empty or value != parameter.default:
            arguments[name] = value
    if not all(_is_literal(value) for value in arguments.values()):
        return None
    try:
        with torch.device("meta"):
            again = kind(**arguments)
    except (TypeError, ValueError):
        return None
    same = {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in layer.state_dict().items()}
    return arguments if same and repr(again) == repr(layer) else None


def _assembled(target: str, layer: nn.Module, children: dict[str, str], classes: dict[str, type]) -> str:
    """Return an expression that assembles a layer from its attributes and parts, as unpickling does."""
    kind = type(layer)
    where = f"{target} ({kind.__module__}.{kind.__qualname__})"
    if kind.__module__.split(".")[0] in _OURS or "." in kind.__qualname__ or isinstance(layer, fx.GraphModule):
        raise CannotExport(
            f"{where} cannot be imported without this package; use another format", format="fx", module=target
        )
    plain = {key: value for key, value in vars(layer).items() if key not in _EVERY_MODULE and not callable(value)}
    wrong = [key for key, value in plain.items() if not _is_literal(value)]
    if wrong:
        raise CannotExport(f"{where} has {wrong[0]!r}, which is not a plain value", format="fx", module=target)
    tensors = {
        name: f"torch.empty({tuple(value.shape)}, dtype={value.dtype})"
        for name, value in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    }
    parts = ", ".join(f"{name!r}: {made}" for name, made in {**children, **tensors}.items())
    # Use a name without dots: the module torchvision.ops.stochastic_depth is hidden by the function of that name.
    name = f"{kind.__module__}.{kind.__name__}".replace(".", "_")
    classes[name] = kind
    return f"_assemble({name}, {plain!r}, {{{parts}}})"


def _is_literal(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_literal(v) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _imports(names: dict[str, Any], forward: str, classes: dict[str, type]) -> list[str]:
    """Return the import statements of the generated code.

    Raises:
        CannotExport: the code uses an object of this library, or one that cannot be imported by name.
    """
    used = {node.id for node in ast.walk(ast.parse(forward.strip())) if isinstance(node, ast.Name)}
    lines = {"import torch", "from torch import nn"}
    lines |= {_import_of(name, kind) for name, kind in classes.items()}
    for name, value in names.items():
        if name not in used or name == "torch":
            continue
        if name in ("inf", "nan"):
            lines.add(f"from math import {name}")
        elif name == "NoneType":
            lines.add("from types import NoneType")
        elif isinstance(value, str):  # an unevaluated annotation of the model
            lines.add(f"{name} = {value!r}")
        elif isinstance(value, types.ModuleType):
            lines.add(f"import {value.__name__} as {name}")
        else:
            lines.add(_import_of(name, value))
    return sorted(lines)


def _import_of(name: str, value: Any) -> str:
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    ours = module is None or module.split(".")[0] in _OURS
    if ours or getattr(sys.modules.get(str(module)), str(qualified), None) is not value:
        raise CannotExport(
            f"the graph calls {module}.{qualified}, which a folder without this package cannot import; "
            "use another format or leave that transform out",
            format="fx",
            function=f"{module}.{qualified}",
        )
    return f"from {module} import {qualified} as {name}" if qualified != name else f"from {module} import {name}"
