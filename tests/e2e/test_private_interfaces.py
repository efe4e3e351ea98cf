"""The service without what torch, torchvision and uvicorn do not publish, in servers of their own."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Reference
from tests.e2e.conftest import InterpretedServer, Server, servers, until
from tests.wire import NPY, close, created, read, refused, sent

NODE = "layer1"

TAKEN = {
    "torch.ao": """
import sys, types
import torch  # which imports it itself
for name in [n for n in sys.modules if n == "torch.ao" or n.startswith("torch.ao.")]:
    sys.modules[name] = None
del torch.ao
# What torchvision has there needs torch.ao as it is imported: it goes with it.
sys.modules["torchvision.models.quantization"] = types.ModuleType("torchvision.models.quantization")
""",
    "torch.ops.mkldnn": """
import types
import torch
torch.ops.mkldnn = types.SimpleNamespace()
""",
    "torch.ops.quantized": """
import types
import torch
torch.ops.quantized = types.SimpleNamespace()
""",
    "torchvision.transforms._presets": """
import sys
import torchvision.transforms._presets
sys.modules["torchvision.transforms._presets"] = None
del torchvision.transforms._presets
""",
    "torch._inductor": """
import torch._inductor
del torch._inductor.aoti_compile_and_package
""",
    "torch._subclasses": """
import sys
import torch, torch._dynamo, torchvision  # which import it themselves
sys.modules["torch._subclasses"] = None
""",
    "uvicorn's protocol": """
import sys
sys.modules["uvicorn.protocols.http.httptools_impl"] = None
""",
    "uvicorn's transport": """
import uvicorn.protocols.http.httptools_impl as implementation
del implementation.HttpToolsProtocol._unset_keepalive_if_required
""",
    "uvicorn's supervisor": """
import inspect
import uvicorn.supervisors.multiprocess as module
source = inspect.getsource(module.Process).replace("parent_conn", "parents_end")
exec("from __future__ import annotations\\n" + source, module.__dict__)
""",
}

TOGETHER = {
    "torch and uvicorn's protocol": [name for name in TAKEN if name.startswith("torch") or "protocol" in name],
    "uvicorn's transport and supervisor": ["uvicorn's transport", "uvicorn's supervisor"],
}
"""What is taken from one server, since each starts an interpreter. Without a protocol there is no transport to miss."""

assert sorted(name for names in TOGETHER.values() for name in names) == sorted(TAKEN)

WORKERS = {"uvicorn's transport and supervisor": 2}
"""Server processes where that is about more than one."""


PRIVATE = {
    # Documented as "torch._assert", a traceable assertion.
    "torch._assert": {"fxcore/models/sized_vit.py"},
    "torch._inductor": {"fxcore/backends/inductor.py"},
    "torch._subclasses": {"fxcore/tracing/failures/fake_tensors.py"},
    "torch.ops.mkldnn": {"fxcore/backends/packed.py"},
    # torch.fx cannot be imported without it.
    "torch.utils._pytree": {"fxcore/nesting.py"},
    # Documented in "Extending PyTorch", under this name.
    "torch.utils._python_dispatch": {"fxcore/tracing/dispatch_modes.py"},
    "uvicorn._types": {"service/http/server/connection.py", "service/http/server/protocol_choice.py"},
}
"""Others' private modules → the files that use them, each able to do without. All else that is used is public."""

ROOT = Path(__file__).parents[2]


def names_used(source: str) -> Iterator[str]:
    """Dotted names of what a file uses of others' packages: by import, by attribute, or by ``import_module("…")``."""
    tree = ast.parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: alias.name for alias in node.names}
            imported |= {package: package for package in (alias.name.split(".")[0] for alias in node.names)}
    yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, whole = [], node
            while isinstance(whole, ast.Attribute):
                parts.append(whole.attr)
                whole = whole.value
            if isinstance(whole, ast.Name) and whole.id in imported:
                yield ".".join([imported[whole.id], *reversed(parts)])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("import_module", "find_spec"):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def test_each_private_interface_is_used_in_one_place() -> None:
    used: dict[str, set[str]] = {}
    for path in [*ROOT.glob("fxcore/**/*.py"), *ROOT.glob("service/**/*.py")]:
        for name in names_used(path.read_text()):
            package, *rest = name.split(".")
            ours = package in ("fxcore", "service") or package in sys.stdlib_module_names
            if not ours and any(part.startswith("_") and not part.endswith("__") for part in rest):
                module = next((private for private in PRIVATE if f"{name}.".startswith(f"{private}.")), name)
                used.setdefault(module, set()).add(path.relative_to(ROOT).as_posix())
    assert used == PRIVATE


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """``without("torch.ao", …)``: a server from whose processes these are taken before anything of ours is imported."""
    folder = tmp_path / "taken"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", os.getcwd())]))
    with servers(InterpretedServer, tmp_path) as start:

        def take(*names: str, **settings: Any) -> Server:
            (folder / "sitecustomize.py").write_text("".join(TAKEN[name] for name in names))
            return start(cache_dir=tmp_path / "cache", **settings)

        yield take


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", TOGETHER)
def test_the_service_answers_without(
    names: str, without: Callable[..., Server], photos: dict[str, bytes], reference: Reference
) -> None:
    server = without(*TOGETHER[names], workers=WORKERS.get(names, 1))
    url = f"/v1/models/resnet18/features?nodes={NODE}&weights=random"
    expected = reference("resnet18", "layer1.1.relu_1", [photos["chelsea"]])
    close(read(server.http.post(url, **sent(photos["chelsea"], NPY))), expected, 1e-4)


@pytest.mark.exhaustive
def test_int8_without_torch_ao(without: Callable[..., Server], photos: dict[str, bytes], reference: Reference) -> None:
    """By OpenVINO, with its report per layer; what only torch.ao can do says so."""
    pytest.importorskip("nncf")
    server = without("torch.ao")
    int8 = {"model": "resnet18", "weights": "random", "return_nodes": [NODE], "precision": "int8"}
    made = created(server.http, **int8)
    assert made["backend"] == "openvino"
    id = made["id"]
    layers = until(lambda: server.http.get(f"/v1/extractors/{id}").json()["checks"].get("layers"))
    assert {"conv1", "layer1.0.conv1", "layer1.1.add"} <= {layer["name"] for layer in layers}
    found = read(server.http.post(f"/v1/extractors/{id}/features", **sent(photos["chelsea"], NPY)))
    expected = reference("resnet18", "layer1.1.relu_1", [photos["chelsea"]]).numpy()
    assert (found * expected).sum() / np.linalg.norm(found) / np.linalg.norm(expected) > 0.98
    keep = {"transforms": [{"name": "keep_float", "params": {"nodes": ["conv1"]}}]}
    for spec in (int8 | {"backend": "eager"}, int8 | keep, int8 | {"model": "quantized_resnet18"}):
        refused(server.http.post("/v1/extractors", json=spec), "unsupported", "torch.ao")
    # The float32 service is what it was: graphs and exports.
    assert len(server.http.get("/v1/models").json()["models"]) >= 109
    assert server.http.get("/v1/models/resnet18/graph?format=code").status_code == 200
    made = created(server.http, **int8 | {"precision": "float32", "backend": "eager"})
    assert server.http.get(f"/v1/extractors/{made['id']}/export?format=fx").status_code == 200
