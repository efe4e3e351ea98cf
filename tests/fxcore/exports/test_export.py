"""Exports: each runs in a process that knows nothing of this package, and gives what the extractor gives."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.layers import Attention
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized
from torchvision.models import ConvNeXt, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.resnet import BasicBlock
from torchvision.models.swin_transformer import ShiftedWindowAttention
from torchvision.ops import Conv2dNormActivation

from fxcore import Extractor, ModelEntry, build_extractor, create_extractor, get_model, load_model, model_graph, trace
from fxcore.analysis.verify import verify
from fxcore.errors import BadArgument
from fxcore.exports import FORMATS, CannotExport, ExportUnavailable, UnknownFormat, export, export_folder
from fxcore.exports.subject import subject_of
from fxcore.int8.quantize import quantize
from fxcore.models.user_models import UserModel, user_entry
from fxcore.photos import calibration_rows, input_rows, photos
from fxcore.tensors import Tensors
from fxcore.transforms import apply_transforms
from tests.fxcore.conftest import OwnEntry
from tests.fxcore.written import Of

pytestmark = pytest.mark.usefixtures("in_this_process")

# What each format needs to be loaded; ``inputs`` is a tuple of tensors and ``file`` what was downloaded.
LOADERS = {
    "fx": "import zipfile; zipfile.ZipFile(file).extractall('.')\n"
    "import importlib, glob; name = glob.glob('*_extractor')[0]\n"
    "out = importlib.import_module(name).load()(*inputs)",
    "torch_export": "out = torch.export.load(file).module()(*inputs)",
    "onnx": "import onnxruntime\ns = onnxruntime.InferenceSession(file, providers=['CPUExecutionProvider'])\n"
    "keys = [o.name for o in s.get_outputs()]\n"
    "feed = {i.name: x.numpy() for i, x in zip(s.get_inputs(), inputs)}\n"
    "out = {k: torch.from_numpy(v) for k, v in zip(keys, s.run(keys, feed))}",
    "openvino": "import zipfile; zipfile.ZipFile(file).extractall('.')\nimport openvino\n"
    "m = openvino.Core().compile_model('model.xml', 'CPU', {'INFERENCE_PRECISION_HINT': 'f32'})\n"
    "found = m([x.numpy() for x in inputs])\n"
    "out = {o.any_name: torch.from_numpy(found[o].copy()) for o in m.outputs}",
}

PROGRAM = """
import os
import sys
import torch
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
begun = os.getcwd()
for name in sys.argv[1:]:
    folder, file, number = name.split(":")
    os.chdir(os.path.join(begun, folder))
    sys.path.insert(0, os.getcwd())
    given = load_file(f"inputs{{number}}.safetensors")
    inputs = tuple(given[key] for key in sorted(given))
    with torch.no_grad():
        {load}
    save_file({{k: v.contiguous().clone() for k, v in out.items()}}, f"outputs{{number}}.safetensors")
    print(*out)
assert not any(name.split(".")[0] in ("fxcore", "service") for name in sys.modules)
"""


def make(name: str, nodes: dict[str, str]) -> Extractor:
    graph = model_graph(name)
    return build_extractor(graph, load_model(get_model(name), "random"), graph.resolve(nodes))


def of_own(entry: ModelEntry, nodes: Any) -> Extractor:
    graph = model_graph(entry).with_nodes_of("attention_maps")
    return build_extractor(graph, load_model(entry, "random"), graph.resolve(nodes))


def photograph(extractor: Extractor, rows: int = 1) -> tuple[torch.Tensor, ...]:
    graph = extractor.graph
    made = input_rows(graph.preprocessing, graph.inputs, photos()[-rows:], graph.input_size)
    return extractor.inputs_from(tuple(torch.cat(parts) for parts in zip(*made, strict=True)))


def check(extractors: Sequence[Extractor], format: str, folder: Path) -> None:
    """Exports give what the extractors do for a photograph."""
    for extractor, inputs, values in computed([(one, [photograph(one)]) for one in extractors], format, folder):
        found = verify(extractor.module, lambda *x, v=values: v, inputs)
        assert found.relative < 1e-4, found


def computed(
    cases: Sequence[tuple[Extractor, Sequence[Tensors]]], format: str, folder: Path
) -> Iterator[tuple[Extractor, Tensors, dict[str, Tensor]]]:
    """Export each extractor, and run the file on its inputs in a fresh process; yield what it returns."""
    asked, batches = [], []
    for place, (extractor, several) in enumerate(cases):
        here = folder / str(place)
        here.mkdir()
        file = here / f"download{FORMATS[format].suffix}"
        file.write_bytes(export(extractor, format))
        assert not any(m.training for m in extractor.module.modules())
        for number, inputs in enumerate(several):
            save_file({str(i): x.contiguous() for i, x in enumerate(inputs)}, here / f"inputs{number}.safetensors")
            asked.append(f"{place}:{file.name}:{number}")
            batches.append((extractor, inputs, here / f"outputs{number}.safetensors"))
    for (extractor, inputs, made), keys in zip(batches, run(format, asked, folder), strict=True):
        assert keys == [output.key for output in extractor.outputs]
        stored = load_file(made)
        yield extractor, inputs, {key: stored[key] for key in keys}


def run(format: str, asked: list[str], folder: Path) -> list[list[str]]:
    """Load and run exports in a fresh process, each ``folder:file:number of its inputs``; the keys of each."""
    program = PROGRAM.format(load=LOADERS[format].replace("\n", "\n        "))
    # -I: neither the working folder nor the environment brings this package onto the path.
    command = [sys.executable, "-I", "-c", program, *asked]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


class Attending(nn.Module):
    """Attention of each kind for whose weights a pass adds a call of this package, after a padded convolution."""

    KINDS = ("vits", "swins", "maxvits", "timms")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8, 4)
        self.vits = nn.MultiheadAttention(8, 2, batch_first=True)
        self.swins = ShiftedWindowAttention(8, [4, 4], [2, 2], 2)
        self.maxvits = RelativePositionalMultiHeadAttention(8, 4, 25)
        self.timms = Attention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.swins(self.stem(x).permute(0, 2, 3, 1))
        tokens = self.timms(maps.flatten(1, 2))
        made: Tensor = self.vits(tokens, tokens, tokens)[0] + self.maxvits(tokens[:, None]).squeeze(1)
        return made


@pytest.mark.exhaustive
def test_folders_run_without_this_package(own_entry: OwnEntry, tmp_path: Path) -> None:
    """ViT reads a parameter and calls nn.MultiheadAttention; Swin calls a function of torchvision; both others have
    layers of torchvision's own, from a module that a function of its name hides. Passes add calls of this package, for
    padding with the mean and for the attention weights of each family; other passes change layers."""
    builders: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
        "vit": (lambda: VisionTransformer(32, 8, 1, 2, 8, 16), "encoder.ln", []),
        "swin": (lambda: SwinTransformer([4, 4], 8, [2], [2], [4, 4]), "features.1", []),
        "convnext": (lambda: ConvNeXt([CNBlockConfig(8, None, 2)]), "features.0", []),
        "attending": (Attending, [f"{kind}.attention" for kind in Attending.KINDS], ["fold_normalization"]),
        "fused": (lambda: Conv2dNormActivation(3, 4), "2", ["fuse_conv_bn"]),
    }
    made = []
    for name, (build, nodes, steps) in builders.items():
        extractor = of_own(replace(own_entry(build), name=name), nodes)
        made.append(replace(extractor, module=apply_transforms(extractor.module, steps)))
    archive = zipfile.ZipFile(io.BytesIO(export(made[-1], "fx")))
    assert b"BatchNorm" not in archive.read("fused_extractor/module.py")
    assert json.loads(archive.read("fused_extractor/extractor.json"))["transforms"][-1]["name"] == "fuse_conv_bn"
    check(made, "fx", tmp_path)


@pytest.mark.exhaustive
def test_the_folder_says_how_to_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = make("mobilenet_v3_small", {"C4": "C4"})
    export_folder(extractor, tmp_path / "small")
    files = {file.name for file in (tmp_path / "small").iterdir()}
    assert files == {"__init__.py", "module.py", "weights.safetensors", "extractor.json", "README.md"}
    about = json.loads((tmp_path / "small" / "extractor.json").read_text())
    assert about["preprocessing"]["resize_size"] == [256]
    assert about["outputs"][0]["node"] == extractor.outputs[0].node
    readme = (tmp_path / "small" / "README.md").read_text()
    assert extractor.outputs[0].node in readme
    assert "[0.485, 0.456, 0.406]" in readme
    code = readme.split("```python\n")[1].split("```")[0]
    monkeypatch.syspath_prepend(tmp_path)
    used: dict[str, Any] = {}
    exec(code, used)
    assert {key: list(value.shape) for key, value in used["outputs"].items()} == {"C4": [1, 48, 14, 14]}


@pytest.mark.parametrize(("name", "importable"), [("my-package", "my_package"), ("class", "_class")])
def test_a_folder_that_cannot_be_imported_is_not_written(tmp_path: Path, name: str, importable: str) -> None:
    with pytest.raises(BadArgument, match=f"name the folder '{importable}'"):
        export_folder(trace(nn.ReLU()), tmp_path / name, example_inputs=torch.ones(1))
    assert not (tmp_path / name).exists()


def test_a_folded_normalization_is_not_described() -> None:
    """Users of the file would normalise twice."""
    extractor = make("squeezenet1_1", {"features.0": "out"})

    def described(**folded: Any) -> Any:
        step = {"name": "fold_normalization", **folded}
        module = apply_transforms(extractor.module, [step])
        return subject_of(replace(extractor, module=module), None).description()["preprocessing"]

    assert (described()["mean"], described()["std"]) == ([0.0] * 3, [1.0] * 3)
    assert described(mean=[0.5] * 3, std=[0.5] * 3) is None  # not that of these weights


@pytest.fixture(scope="module")
def calibrated() -> tuple[Extractor, list[tuple[torch.Tensor, ...]]]:
    """A float extractor, and photographs to calibrate int8 on."""
    extractor = make("resnet18", {"C2": "C2"})
    graph = extractor.graph
    return extractor, calibration_rows(graph.preprocessing, extractor.inputs, graph.input_size, count=4)


@pytest.mark.exhaustive
def test_int8_of_torch_is_refused(calibrated: tuple[Extractor, list[tuple[torch.Tensor, ...]]]) -> None:
    extractor, rows = calibrated
    quantized = replace(extractor, module=quantize(extractor.module, rows).module)
    for format in FORMATS:
        with pytest.raises(CannotExport, match=r"int8, which .* export an extractor in float32"):
            export(quantized, format)


@pytest.mark.exhaustive
@pytest.mark.no_cover
def test_openvino_of_narrow_weights(tmp_path: Path) -> None:
    """Batch norms of trained weights, folded in bfloat16, divide by zero."""
    openvino = pytest.importorskip("openvino")
    graph, model = model_graph("efficientnet_lite0"), load_model(get_model("efficientnet_lite0"), "DEFAULT")
    nodes = graph.resolve(["classifier"])
    exact = build_extractor(graph, model, nodes)
    half = build_extractor(graph, copy.deepcopy(model).bfloat16(), nodes, torch.bfloat16)
    zipfile.ZipFile(io.BytesIO(export(half, "openvino"))).extractall(tmp_path)
    compiled = openvino.Core().compile_model(tmp_path / "model.xml", "CPU")
    inputs = photograph(exact, 4)
    bits = inputs[0].bfloat16().contiguous().view(torch.float16).numpy()
    request = compiled.create_infer_request()
    request.infer([openvino.Tensor(bits, openvino.Shape(bits.shape), openvino.Type.bf16)])
    values = torch.from_numpy(request.output_tensors[0].data.copy()).view(torch.bfloat16)
    assert verify(exact.module, lambda x: {"classifier": values.float()}, inputs).cosine > 0.99


def test_torch_export_of_attention_in_bfloat16() -> None:
    """Attention runs as one kernel in the module and as several operations, which round in between, in the file."""
    x = torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    layers = {"attention": nn.MultiheadAttention(16, 2, batch_first=True), "norm": nn.LayerNorm(16)}
    attention = Of(lambda m, x: m.norm(m.attention(x, x, x, need_weights=False)[0]), **layers).eval().bfloat16()
    extractor = create_extractor(attention, {"norm": "out"}, {"x": x})
    program = torch.export.load(io.BytesIO(export(extractor, "torch_export", example_inputs={"x": x}))).module()
    with torch.no_grad():
        expected = attention(x).float()
    assert (program(x)["out"].float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.exhaustive
def test_a_file_that_is_not_valid_onnx_is_refused() -> None:
    """Convolutions of ONNX had no bfloat16 before its version 22; onnxruntime does not load such a file."""
    graph = model_graph("squeezenet1_1")
    model = load_model(graph.entry, "random").bfloat16()
    extractor = build_extractor(graph, model, graph.resolve(["features.2"]), torch.bfloat16)
    with pytest.raises(CannotExport, match=r"valid ONNX in bfloat16: .*Conv.* in float32 or float16"):
        export(extractor, "onnx")


def read(data: bytes) -> Any:
    """Return the model of a file of OpenVINO."""
    import openvino

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return openvino.Core().read_model(archive.read("model.xml"), archive.read("model.bin"))


def _down(x: Tensor) -> Tensor:
    return torch.div(x.to(torch.int32), 2, rounding_mode="floor")


@pytest.mark.exhaustive
def test_a_file_that_openvino_computes_otherwise_is_refused() -> None:
    """Its converter makes of a division of integers that rounds down one that rounds towards zero."""
    openvino = pytest.importorskip("openvino")
    x = torch.tensor([[-3.0, -2.0, 3.0], [-5.0, 1.0, 4.0]])
    with pytest.raises(CannotExport, match=r"other values in OpenVINO: relative error \d") as caught:
        export(trace(_down), "openvino", example_inputs=(x,))
    assert caught.value.extra["format"] == "openvino"
    data = export(trace(_down), "openvino", example_inputs=(x.abs(),))
    compiled = openvino.Core().compile_model(read(data), "CPU")
    assert compiled([x.abs().numpy()])["output"].tolist() == [[1, 1, 1], [2, 0, 2]]


def test_openvino_files_may_make_bfloat16() -> None:
    """OpenVINO rounds where it likes then, so values are not compared."""
    openvino = pytest.importorskip("openvino")
    model = read(export(trace(_narrowed), "openvino", example_inputs=(torch.randn(2, 3),)))
    assert model.output(0).get_element_type() == openvino.Type.bf16


def _narrowed(x: Tensor) -> Tensor:
    return (x * 2).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "node", "inputs", "shape"),
    [
        ("lraspp_mobilenet_v3_large", "C2", None, (2, 3, 64, 96)),  # its weights' preprocessing fixes no size
        ("squeezenet1_1", "features.5", ["features.2"], (2, 64, 15, 23)),
    ],
)
def test_files_of_one_size_are_of_the_graphs(
    name: str, node: str, inputs: list[str] | None, shape: tuple[int, ...]
) -> None:
    graph = model_graph(name).at(64, 96)
    model = load_model(graph.entry, "random")
    starts = graph.resolve(inputs) if inputs else None
    extractor = build_extractor(graph, model, graph.resolve({node: "out"}), inputs=starts)
    subject = subject_of(extractor, None, any_size=False)
    (x,) = subject.examples()
    about = subject.description()
    assert about["inputs"][0]["shape"] == [None, *shape[1:]] == [None, *x.shape[1:]]
    with torch.no_grad():
        assert about["outputs"][0]["shape"] == [None, *extractor.module(x)["out"].shape[1:]]


class Centred(nn.Module):
    """Subtracts the mean of all images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y - y.mean()


def test_files_of_models_that_compute_one_image_at_a_time_take_one_row() -> None:
    """And folders of models whose names begin with a digit can be imported."""
    entry = user_entry("3d", UserModel(Centred, preprocessing={"resize_size": 32, "crop_size": 32}, batch=False))
    graph = model_graph(entry)
    extractor = build_extractor(graph, load_model(entry, "random"), graph.resolve(["sub"]))
    about = subject_of(extractor, None).description()
    assert about["inputs"][0]["shape"] == [1, 3, 32, 32]
    assert about["outputs"][0]["shape"] == [1, 4, 30, 30]
    program = torch.export.load(io.BytesIO(export(extractor, "torch_export"))).module()
    image = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(program(image), extractor.module(image))
    with pytest.raises((AssertionError, RuntimeError)):
        program(torch.rand(2, 3, 32, 32))
    files = zipfile.ZipFile(io.BytesIO(export(extractor, "fx"))).namelist()
    assert files[0].partition("/")[0].isidentifier()


@pytest.mark.exhaustive
def test_int8_of_openvino_is_made_by_its_export(
    calibrated: tuple[Extractor, list[tuple[torch.Tensor, ...]]],
) -> None:
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    extractor, rows = calibrated
    data = export(extractor, "openvino", calibration=rows)
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert len(archive.read("model.bin")) < 0.3 * sum(p.nbytes for p in extractor.module.parameters())
    assert json.loads(archive.read("extractor.json"))["arithmetic"] == "int8"
    inputs = photograph(extractor)
    compiled = openvino.Core().compile_model(read(data), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    values = {"C2": torch.from_numpy(compiled([inputs[0].numpy()])["C2"].copy())}
    found = verify(extractor.module, lambda x: values, inputs)
    assert found.cosine > 0.98
    assert found.relative > 1e-3
    with pytest.raises(CannotExport, match="calibration is for openvino only"):
        export(extractor, "onnx", calibration=rows)


def test_what_cannot_be_exported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    extractor = make("resnet18", {"C2": "C2"})
    with pytest.raises(UnknownFormat, match="there are fx, torch_export, onnx"):
        export(extractor, "coreml")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name))
    with pytest.raises(ExportUnavailable, match="onnx needs onnxscript") as caught:
        export(extractor, "onnx")
    assert caught.value.extra["missing"] == ["onnxscript"]


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_a_key_that_names_an_input_is_refused_where_names_are_unique(format: str) -> None:
    extractor = make("resnet18", {"C2": "x"})
    with pytest.raises(CannotExport, match=rf"'x' is the name of an input .* unique in {format}; choose another key"):
        export(extractor, format)
    assert export(extractor, "fx")[:2] == b"PK"


@pytest.mark.exhaustive
def test_keys_may_be_names_of_inner_values_and_weights(own_entry: OwnEntry) -> None:
    """Torch calls other values of the exported graph by these names."""
    onnxruntime = pytest.importorskip("onnxruntime")
    keys = {"1.relu_1": "relu", "1.bn1": "add", "1.add": "1.conv1.weight", "0": "relu_1", "1.relu": "val_0"}
    extractor = of_own(own_entry(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 4), BasicBlock(8, 8))), keys)
    (x,) = photograph(extractor)
    session = onnxruntime.InferenceSession(export(extractor, "onnx"), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values = dict(zip(names, map(torch.from_numpy, session.run(None, {"input": x.numpy()})), strict=True))
    assert verify(extractor.module, lambda x: values, x).relative < 1e-4


class Small(nn.Module):
    """A convolution with something done to it; in a container that is kept whole, and alone."""

    def __init__(self, prepare: Callable[[nn.Conv2d], nn.Module]) -> None:
        super().__init__()
        self.inside = Conv2dNormActivation(3, 4)
        self.inside[0] = prepare(self.inside[0])
        self.alone = prepare(nn.Conv2d(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.alone(self.inside(x))
        return out


def small(prepare: Callable[[nn.Conv2d], nn.Module]) -> Extractor:
    sizes = {"resize_size": 32, "crop_size": 32}
    entry = user_entry("small", UserModel(functools.partial(Small, prepare), {}, preprocessing=sizes))
    model = load_model(entry, entry.default_weights)
    graph = model_graph(entry, entry.default_weights)
    return build_extractor(graph, model, graph.resolve({"alone": "out"}))


@pytest.mark.exhaustive
def test_parametrised_weights_are_exported_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for prepare in parametrizations.weight_norm, parametrizations.spectral_norm:
        extractor = small(prepare)
        inputs = photograph(extractor)
        program = torch.export.load(io.BytesIO(export(extractor, "torch_export"))).module()
        export_folder(extractor, tmp_path / prepare.__name__)
        for loaded in program, importlib.import_module(prepare.__name__).load():
            assert verify(extractor.module, loaded, inputs).relative < 1e-4
        layers = [m for m in extractor.module.modules() if isinstance(m, nn.Conv2d)]
        assert all(is_parametrized(layer, "weight") for layer in layers)  # the extractor is what it was


def tripled(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 3 * output


def with_hook(layer: nn.Conv2d) -> nn.Module:
    layer.register_forward_hook(tripled)
    return layer


def with_own_forward(layer: nn.Conv2d) -> nn.Module:
    layer.forward = lambda x: -layer._conv_forward(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


def of_a_local_class(layer: nn.Conv2d) -> nn.Module:
    class Local(nn.Conv2d):
        pass

    Local.__module__, Local.__qualname__ = "torch.nn.modules.conv", "Local"  # a leaf, as parametrised classes are
    layer.__class__ = Local
    return layer


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (with_hook, r"inside\.0 has hooks"),
        (with_own_forward, r"inside\.0 has a forward of its own"),
        (of_a_local_class, r"torch\.nn\.modules\.conv\.Local, which a folder"),
    ],
)
def test_what_a_folder_would_lose_is_refused(prepare: Callable[[nn.Conv2d], nn.Module], reason: str) -> None:
    with pytest.raises(CannotExport, match=reason):
        export(small(prepare), "fx")


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> Tensor:
        return self.weight * 2


def test_a_module_without_inputs_is_refused() -> None:
    with pytest.raises(CannotExport, match="has no inputs"):
        export(trace(Constant()), "fx", example_inputs=())


def test_functions_of_this_package_are_refused() -> None:
    extractor = make("resnet18", {"C2": "C2"})
    graph = fx.Graph()
    graph.output({"C2": graph.call_function(model_graph, (graph.placeholder("x"),))})
    own = Extractor(fx.GraphModule({}, graph), extractor.graph, extractor.outputs, extractor.dtype)
    with pytest.raises(CannotExport, match=r"calls fxcore\.graph\.model_graph\.model_graph"):
        export(own, "fx")
