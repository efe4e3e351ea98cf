"""Export to a Python package with the graph's generated code, its layers, and the weights as safetensors.

The package imports torch and safetensors, and the packages of the functions and layers that the graph calls, but not
this library.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, fx

from fxcore.errors import BadArgument
from fxcore.exports.description import description_json, require_float, zipped
from fxcore.exports.function_code import define, is_own_leaf
from fxcore.exports.layer_code import ASSEMBLE, empty_code, import_of, layer_code, tensors_of
from fxcore.exports.subject import CannotExport, Subject, subject_of
from fxcore.extractor import Extractor
from fxcore.graph.cut import unused_identifier
from fxcore.passes.base import called_modules
from fxcore.passes.parametrized import with_plain_weights
from fxcore.tensors import dtype_name
from fxcore.tracing.graph_module import attribute
from fxcore.tracing.interpreter import Inputs

_INIT = '''"""{title}"""

from .module import Extractor, load

__all__ = ["Extractor", "load"]
'''

_HEAD = '''"""{title}

Generated from a torch.fx graph: layers and values have the names that they have in the model.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
{imports}

OUTPUTS = {outputs}
"""Key of each output, and the node of the model whose value it is."""
{functions}

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


{assemble}

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

Made by fxserve; runs without it. Needs {packages}.

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
{edits}{preprocessing}
## Outputs

| key | node | shape | layout |
|---|---|---|---|
{outputs}
"""


_EDIT = """
The value of `{node}` is multiplied by `{scale}`, then `{shift}` is added: 1 and 0 keep it.
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
        BadArgument: that name cannot be imported.
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
    package = path.resolve().name
    if package != (importable := unused_identifier(package, set())):
        raise BadArgument(f"{package!r} cannot be imported as a package; name the folder {importable!r}, for example")
    path.mkdir(parents=True, exist_ok=True)
    for name, data in folder_files(subject_of(extractor, example_inputs), package).items():
        (path / name).write_bytes(data)


def folder_zip(subject: Subject) -> bytes:
    """Return the package as a zip."""
    package = unused_identifier(f"{subject.name}_extractor", set())
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
    imported: dict[str, Any] = {}
    layers = _layers(module, imported)
    imports, functions = _globals(code.globals, forward, imported)
    outputs = {o.key: o.node for o in subject.outputs}
    source = _HEAD.format(
        title=title,
        imports="\n".join(imports),
        functions="".join(f"\n\n{function}\n" for function in functions),
        outputs=repr(outputs),
        inputs=", ".join(f"{i.name} {i.layout}".strip() for i in subject.inputs),
        layers="\n".join(f"        {line}" for line in layers) or "        pass",
        forward=textwrap.indent(forward.strip(), "    ") + "\n",
        assemble=ASSEMBLE,
    )
    scales = {edit["scale"] for edit in about["edits"]}
    types, preprocessing = [x.dtype for x in subject.examples()], about["preprocessing"]
    readme = _README.format(
        title=title,
        package=package,
        packages=", ".join(_packages(source)),
        call=", ".join(
            f"torch.{'ones' if i.name in scales else 'zeros'}"
            f"({[1, *i.usual] if i.usual else [d or 1 for d in i.shape]}{_dtype(t)})"
            for i, t in zip(subject.inputs, types, strict=True)
        ),
        inputs="\n".join(
            f"- `{i.name}`: {', '.join([*filter(None, [i.layout]), dtype_name(t)])}, {list(i.shape)}"
            for i, t in zip(subject.inputs, types, strict=True)
        ),
        edits="".join(_EDIT.format(**edit) for edit in about["edits"]),
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


def _packages(source: str) -> list[str]:
    """Return the packages that the code imports besides Python's own, torch and safetensors first."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    first = ["torch", "safetensors"]
    return first + sorted(found - sys.stdlib_module_names - {*first})


def _dtype(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f", dtype={dtype}"


def _tensors(module: fx.GraphModule) -> dict[str, Tensor]:
    """Return copies of the tensors that the graph uses, since safetensors rejects two names for one storage."""
    names = set(_attributes(module))
    for target, layer in called_modules(module).items():
        names |= {f"{target}.{name}" for name in tensors_of(layer)}
    return {name: attribute(module, name).detach().cpu().clone().contiguous() for name in sorted(names)}


def _attributes(module: fx.GraphModule) -> list[str]:
    """Return the targets of tensors that the graph reads itself, except those of layers that it also calls."""
    called = tuple(f"{target}." for target in called_modules(module))
    targets = dict.fromkeys(str(n.target) for n in module.graph.nodes if n.op == "get_attr")
    return [target for target in targets if not target.startswith(called)]


def _layers(module: fx.GraphModule, imported: dict[str, Any]) -> list[str]:
    """Return a line of ``__init__`` for each layer and tensor; add the classes and functions that they import to
    ``imported``, by name."""
    called = called_modules(module)
    lines = [f"_place(self, {target!r}, {layer_code(target, layer, imported)})" for target, layer in called.items()]
    for target in _attributes(module):
        value = attribute(module, target)
        if not isinstance(value, Tensor):
            raise CannotExport(
                f"{target} is a {type(value).__name__}, and only tensors can be read from a file", format="fx"
            )
        lines.append(f"_place(self, {target!r}, {empty_code(value)})")
    return lines


def _globals(names: dict[str, Any], forward: str, imported: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the import statements of the generated code, and the definitions of this library's leaf functions.

    Raises:
        CannotExport: the code uses another object of this library, or one that cannot be imported by name.
    """
    used = {node.id for node in ast.walk(ast.parse(forward.strip())) if isinstance(node, ast.Name)}
    lines = {"import torch", "from torch import nn"}
    lines |= {import_of(name, value) for name, value in imported.items()}
    definitions: dict[str, str] = {}
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
        elif is_own_leaf(value):
            define(name, value, definitions, lines)
        else:
            lines.add(import_of(name, value))
    return sorted(lines), list(definitions.values())
