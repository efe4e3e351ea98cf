"""Users' own models: how they are described, what is told of wrong descriptions, and their values."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fxcore import FxError, build_extractor, get_model, list_models, load_model, model_graph
from fxcore.errors import BadTensor, NotTraceable
from fxcore.graph.model_part import ModelPart
from fxcore.models.catalog import register
from fxcore.models.descriptions import read_models
from fxcore.models.user_models import BadUserModel, UserEntry, UserModel, user_entry
from tests.fxcore.hooks import hooked

MODULE = '''
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
import fxcore

class Tiny(nn.Module):
    """Two stages; a mask that nobody has to give."""

    def __init__(self, width=8, reads_itself=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(2 * width, 5)
        if reads_itself:
            self.scale = self.head.weight.abs().max().item()

    def forward(self, pixels, mask=None):
        maps = self.body(self.stem(pixels))
        if mask is not None:
            maps = maps * mask
        return self.head(maps.mean((2, 3)))

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 3, 1)
    def forward(self, x):
        return self.c(x) if x.sum() > 0 else x

class Padded(nn.Module):
    def forward(self, x):
        return x if x.shape[2] % 32 == 0 else nn.functional.pad(x, (0, 1, 0, 1))

def squared(x):
    return x * x

def flipped(x):
    if x.mean() > 0:
        return -x
    return x

class Deciding(nn.Module):
    """Its parts decide by values."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 4, 3, 2, 1), Branching()
    def forward(self, x):
        return self.stem(flipped(self.gate(x)))

class Options(nn.Module):
    """Nothing that its forward takes has to be given."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = nn.Sequential(nn.Conv2d(3, 3, 1)), Padded()
    def forward(self, pixels=None, double=False, **more):
        x = squared(self.gate(self.body(pixels)))
        return x + x if double else x

def number():
    return 7

packaged = fxcore.UserModel(builder=Tiny, arguments={"width": 4})
'''
CARELESS = """
import fxcore
from torch import nn

model = fxcore.UserModel(nn.ReLU, weights="tiny.safetensors")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module as an installed package has it."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/mine_for_tests.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield "mine_for_tests"
    sys.modules.pop("mine_for_tests", None)
    register({})


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """What a models.toml of that text describes."""

    def described(text: str) -> dict[str, Any]:
        (tmp_path / "models.toml").write_text(text)
        return dict(read_models(tmp_path))

    return described


def values(entry: UserEntry, nodes: list[str], x: Tensor) -> dict[str, Tensor]:
    """The values of nodes, with the default weights."""
    weights = str(entry.default_weights)
    graph = model_graph(entry, weights)
    extractor = build_extractor(graph, load_model(entry, weights), graph.resolve(nodes))
    with torch.no_grad():
        found: dict[str, Tensor] = extractor.module(x)
    return found


def assert_like_hooks(entry: UserEntry, model: nn.Module, nodes: list[str]) -> None:
    batch = torch.rand(2, 3, *entry.preprocessing().nominal_size())
    for node, value in values(entry, nodes, batch).items():
        torch.testing.assert_close(value, hooked(model.eval(), node, batch), rtol=1e-5, atol=1e-6)


def test_a_module_written_by_hand(module: str, read: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    __import__(module)
    torch.manual_seed(5)
    model = sys.modules[module].Tiny(width=6)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "tiny.safetensors")
    entry = read(f"""
        [models.tiny]
        builder = "{module}:Tiny"
        arguments = {{ width = 6 }}
        weights = "tiny.safetensors"
        preprocessing = {{ resize_size = 40, crop_size = 32, mean = [0.5, 0.5, 0.5], interpolation = "bicubic" }}
        """)["tiny"]
    assert_like_hooks(entry, model, ["body", "stem.1", "head"])
    assert entry.preprocessing().describe() == {
        "resize_size": [40],
        "crop_size": [32],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bicubic",
        "antialias": True,
    }
    assert (entry.default_weights, entry.weights) == ("tiny.safetensors", ("tiny.safetensors",))
    assert entry.weights_info("DEFAULT").num_params == sum(p.numel() for p in model.parameters())
    assert model_graph(entry, "tiny.safetensors").eval_nodes[0] == "pixels"
    assert [spec.name for spec in model_graph(entry).inputs] == ["pixels"]
    assert {name: level.stride for name, level in model_graph(entry).levels.items()} == {"C1": 2, "C2": 4}


def test_a_timm_model_as_its_builder_makes_it(read: Callable[[str], dict[str, Any]]) -> None:
    entry = read("""
        [models.small]
        builder = "timm:create_model"
        arguments = { model_name = "mobilenetv3_small_050", num_classes = 7 }
        preprocessing = { crop_size = 64, resize_size = 64 }
        """)["small"]
    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050", num_classes=7)
    assert entry.default_weights == "builder"
    assert_like_hooks(entry, model, ["blocks.1", "blocks.5", "classifier"])


def test_a_builder_that_reads_its_parameters(module: str, read: Callable[[str], dict[str, Any]]) -> None:
    entry = read(f'[models.tiny]\nbuilder = "{module}:Tiny"\narguments = {{ reads_itself = true }}')["tiny"]
    assert model_graph(entry).levels["C2"].channels == 16


def test_sparse_tensors_are_refused() -> None:
    built = nn.Conv2d(3, 4, 3)
    built.register_buffer("mask", torch.eye(4).to_sparse())
    with pytest.raises(BadUserModel, match="mask is a sparse tensor: make it dense"):
        user_entry("sparse", UserModel(lambda: built))


class Normalized(nn.Module):
    """Normalises images with a buffer, and has no layers."""

    def __init__(self, channels: int, parameter: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(1, channels, 1, 1))
        weight = torch.rand(4, channels, 3, 3)
        self.weight = nn.Parameter(weight) if parameter else weight
        self.register_buffer("kernel", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x - self.mean, self.weight if isinstance(self.weight, nn.Parameter) else self.kernel)


class Grey(nn.Module):
    """A convolution of one channel, after normalising with a buffer."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, channels, 1, 1), 0.5))
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv((x - self.mean).mean(1, keepdim=True) if self.mean.shape[1] == 3 else x - self.mean)


@pytest.mark.parametrize(
    ("build", "channels"),
    [
        (lambda: Normalized(3, True), 3),
        (lambda: Normalized(3, False), 3),
        (Grey, 1),
        (lambda: Grey(3), 3),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 2)), 1),
        (lambda: nn.Sequential(nn.Flatten(2), nn.Softmax(2)), 3),
    ],
)
def test_channels_of_the_images(build: Callable[[], nn.Module], channels: int) -> None:
    preprocessing = {"crop_size": 32, "resize_size": 32}
    assert user_entry("mine", UserModel(build, preprocessing=preprocessing)).channels == channels


@pytest.mark.parametrize(
    ("lines", "nodes", "closed"),
    [
        ("leaf_modules = 'auto'", ["pixels", "body.0", "gate", "mul"], ["gate"]),
        ("leaf_modules = ['gate', 'MODULE:Options']", ["pixels", "body.0", "gate", "mul"], []),
        ("leaf_modules = ['MODULE:Padded', 'bod*']", ["pixels", "body", "gate", "mul"], []),
        ("leaf_modules = 'gate'\nleaf_functions = ['MODULE:squared']", ["pixels", "body.0", "gate", "squared"], []),
        ("leaf_modules = 'gate'\nconcrete_args = { double = true }", ["pixels", "body.0", "gate", "mul", "add"], []),
    ],
)  # fmt: skip
def test_what_is_kept_whole(
    lines: str, nodes: list[str], closed: list[str], module: str, read: Callable[[str], dict[str, Any]]
) -> None:
    entry = read(f"[models.mine]\nbuilder = 'MODULE:Options'\n{lines}".replace("MODULE", module))["mine"]
    graph = model_graph(entry, "builder")
    assert graph.eval_nodes == nodes
    assert [part.path for part in graph.untraceable] == closed
    torch.manual_seed(0)
    model, x = sys.modules[module].Options(), torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(values(entry, nodes[-1:], x)[nodes[-1]], model(x, double="double" in lines))


def test_what_is_kept_whole_may_decide_by_values(module: str, read: Callable[[str], dict[str, Any]]) -> None:
    """torch's meta tensors have none, so the graph is run on others to know its shapes."""
    lines = "leaf_modules = 'auto'\nleaf_functions = ['MODULE:flipped']"
    entry = read(f"[models.mine]\nbuilder = 'MODULE:Deciding'\n{lines}".replace("MODULE", module))["mine"]
    graph = model_graph(entry, "builder")
    assert graph.eval_nodes == ["x", "gate", "flipped", "stem"]
    assert [graph.at(64, 96).shape_of(graph.at(64, 96).by_name["stem"])] == [[None, 4, 32, 48]]
    assert all(n.meta["value"].is_meta for n in graph.graph.nodes)  # its activations do not stay in memory
    with pytest.raises(BadTensor, match="16 times the pixels of its usual size, 224 x 224"):
        graph.at(4096, 4096)
    with pytest.raises(BadTensor, match="more than 16 times the pixels"):
        graph.values_at([(3, 4096, 4096)], ["stem"])
    part = ModelPart(graph, {"x": "x"}, {"stem": "stem"})
    with pytest.raises(BadTensor, match=r"x \[3, 4096, 4096\] is more than 16 times"):
        part.values_at([(3, 4096, 4096)], ["stem"])
    torch.manual_seed(0)
    model = sys.modules[module].Deciding()
    with torch.no_grad():
        for x in (torch.rand(1, 3, 224, 224), -torch.rand(1, 3, 224, 224)):
            torch.testing.assert_close(values(entry, ["stem"], x)["stem"], model(x))


def test_a_function_to_keep_whole_is_named(module: str, read: Callable[[str], dict[str, Any]]) -> None:
    entry = read(f"[models.mine]\nbuilder = '{module}:Deciding'\nleaf_modules = 'auto'")["mine"]
    with pytest.raises(NotTraceable, match=r"keep the function whole with leaf_functions=\(flipped,\)"):
        model_graph(entry, "builder")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"builder": 3}, "a function that returns an nn.Module, not 3"),
        ({"builder": "resnet18"}, "a function that returns an nn.Module, not 'resnet18'"),
        ({"arguments": [3]}, "arguments is a dictionary by name, not [3]"),
        ({"arguments": {3: 3}}, "arguments is a dictionary by name, not {3: 3}"),
        ({"weights": "tiny.pth"}, "weights is a pathlib.Path or None, not 'tiny.pth'"),
        ({"preprocessing": 224}, "preprocessing is a dictionary by name, not 224"),
        ({"leaf_modules": 3}, "classes, paths and patterns, or 'auto', not 3"),
        ({"leaf_modules": [nn.ReLU()]}, "classes, paths and patterns, or 'auto', not [ReLU()]"),
        ({"leaf_functions": torch.relu}, "leaf_functions is a list of functions, not <built-in"),
        ({"leaf_functions": ["relu"]}, "leaf_functions is a list of functions, not ['relu']"),
        ({"concrete_args": ["x"]}, "concrete_args is a dictionary by name, not ['x']"),
    ],
)
def test_descriptions_of_another_type(attributes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadUserModel) as raised:
        UserModel(**{"builder": nn.ReLU, **attributes})
    assert said in raised.value.detail


def test_an_input_of_another_type() -> None:
    with pytest.raises(BadUserModel, match=r"input is image or video, not \['image'\]"):
        user_entry("mine", UserModel(nn.ReLU, input=["image"]))  # type: ignore[arg-type]


def test_packages_describe_models_too(module: str, tmp_path: Path) -> None:
    info = tmp_path / "packages/mine-1.0.dist-info"
    info.mkdir()
    (tmp_path / "packages/careless_for_tests.py").write_text(CARELESS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[fxcore.models]\npackaged-tiny = {module}:packaged\nodd = {module}:number\n"
        f"careless = careless_for_tests:model\ngone = {module}:nothing\n"
    )
    found = dict(read_models(None))
    assert found["packaged-tiny"].weights_info("builder").num_params == 461
    assert "is a function, not a fxcore.UserModel" in found["odd"].detail
    assert "cannot be loaded: BadUserModel: weights is a pathlib.Path or None, not 'tiny" in found["careless"].detail
    assert "cannot be loaded: AttributeError" in found["gone"].detail


WRONG = {
    "one": ("weights = 'x'", "it has no builder"),
    "two": ("builder = 'timm'", "builder is written MODULE:CALLABLE, not 'timm'"),
    "three": (
        "builder = 'no_such_package:x'",
        "cannot be imported: ModuleNotFoundError: No module named 'no_such_pack",
    ),
    "four": ("builder = 'MODULE:nobody'", "cannot be imported: AttributeError"),
    "five": ("builder = 'MODULE:number'", "its builder returned int, not an nn.Module"),
    "six": ("builder = 'MODULE:Tiny'\narguments = { depth = 3 }", "its builder failed: TypeError"),
    "seven": ("builder = 'MODULE:Tiny'\nweights = 'gone.pth'", "there is no weights file"),
    "eight": ("builder = 'MODULE:Tiny'\ninput = 'sound'", "input is image or video, not 'sound'"),
    "nine": (
        "builder = 'MODULE:Tiny'\npreprocessing = { crop = 3 }",
        "preprocessing has no 'crop'; it has resize_size",
    ),
    "ten": (
        "builder = 'MODULE:Tiny'\npreprocessing = { mean = [1, 2] }",
        "mean is a list of three numbers or of one, not [1, 2]",
    ),
    "eleven": ("builder = 'MODULE:Tiny'\nbuild = 1", "'build' is none of builder, arguments"),
    "twelve": ("builder = 'MODULE:Tiny'\ntask = 'video'", "task is classification or segmentation for input 'image'"),
    "thirteen": ("builder = 'MODULE:Tiny'\nleaf_modules = 3", "leaf_modules is text or a list of text, not 3"),
    "fourteen": ("builder = 'MODULE:Tiny'\nleaf_functions = [3]", "leaf_functions is a list of text, not [3]"),
    "fifteen": (
        "builder = 'MODULE:Tiny'\nleaf_modules = 'MODULE:Gone'",
        ":Gone cannot be imported: AttributeError",
    ),
    "sixteen": ("builder = 'MODULE:Tiny'\nconcrete_args = { msk = 1 }", "forward takes pixels, mask, but not 'msk'"),
    "seventeen": (
        "builder = 'MODULE:Tiny'\ninput = 'video'\npreprocessing = { interpolation = 'box' }",
        "box is not an interpolation of clips",
    ),
    "eighteen": ("builder = 'MODULE:Tiny'\npreprocessing = { std = [0.2, 1e-50, 0.2] }", "std is not zero"),
    "nineteen": (
        "builder = 'MODULE:Tiny'\npreprocessing = { mean = [nan] }",
        "list of three numbers or of one, not [nan]",
    ),
    "twenty": (
        "builder = 'MODULE:Tiny'\npreprocessing = { interpolation = ['bilinear'] }",
        "interpolation is one of nearest, ",
    ),
    "resnet50": ("builder = 'MODULE:Tiny'", "there is already a model of this name"),
    "'with space'": ("builder = 'MODULE:Tiny'", "a name is at most 128 letters, digits"),
    "n" * 129: ("builder = 'MODULE:Tiny'", "a name is at most 128 letters, digits"),
}


def test_each_invalid_description_is_reported_and_affects_no_other(
    module: str, read: Callable[[str], dict[str, Any]]
) -> None:
    text = "\n".join(f"[models.{name}]\n{lines}" for name, (lines, _) in WRONG.items())
    found = read(f"{text}\n[models.good]\nbuilder = 'MODULE:Tiny'".replace("MODULE", module))
    assert len(found) == len(WRONG) + 1
    for name, (_, said) in WRONG.items():
        error = found[name.strip("'")]
        assert isinstance(error, BadUserModel)
        assert error.detail.startswith(f"model '{name.strip(chr(39))}': "), error.detail
        assert said in error.detail
    register(found)
    assert get_model("good").task == "classification"
    assert "good" in {entry.name for entry in list_models()}
    with pytest.raises(FxError, match="description of model 'six' is invalid"):
        get_model("six")


@pytest.mark.parametrize(("text", "said"), [("[models", "models.toml: "), ("[net]\nbuilder = 'a:b'", "[models.NAME]")])
def test_a_file_that_is_wrong_as_a_whole(text: str, said: str, read: Callable[[str], dict[str, Any]]) -> None:
    with pytest.raises(FxError) as caught:
        read(text)
    assert said in caught.value.detail


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout())
        self.register_buffer("mean", torch.rand(4))
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
        made: Tensor = (self.body(pixels) - self.mean.view(4, 1, 1)) * self.scale.view(4, 1, 1)
        return made if mask is None else made * mask


@pytest.mark.parametrize("file", [False, True], ids=["builders", "file"])
def test_a_module_in_memory_is_neither_moved_nor_changed(file: bool, tmp_path: Path) -> None:
    """In train mode, with its gradients: the server takes a copy that shares the weights."""
    model = Own().train()
    kind, attributes = type(model), dict(vars(model))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: (id(tensor), tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}
    weights = tmp_path / "own.safetensors" if file else None
    if weights is not None:
        save_file({name: tensor.detach() + 1 for name, tensor in tensors.items() if tensor.ndim}, weights)
    entry = user_entry("own", UserModel(lambda: model, weights=weights, preprocessing={"crop_size": 32}))
    graph = model_graph(entry)
    loaded = load_model(entry, entry.canonical_weights("DEFAULT"))
    extractor = build_extractor(graph, loaded, graph.resolve(["body", "mul"]), torch.float64)
    loaded.double()
    with torch.no_grad():
        extractor.module.double()(torch.rand(2, 3, 32, 32, dtype=torch.float64))
    assert type(model) is kind
    assert vars(model).keys() == attributes.keys()
    assert all(part.training for part in model.modules())
    assert model.body[2].inplace
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert (id(tensor), tensor.data_ptr()) == values[name][:2], name
        assert torch.equal(tensor, values[name][2]), name
        assert tensor.requires_grad == isinstance(tensor, nn.Parameter)
    assert not file or torch.equal(loaded.scale, (model.scale + 1).double())
    if not file:
        again = load_model(entry, entry.canonical_weights("DEFAULT"))
        assert again.scale.data_ptr() == model.scale.data_ptr()


def test_a_module_in_memory_that_cannot_be_copied() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(BadUserModel, match="use a builder that makes a new one"):
        user_entry("own", UserModel(lambda: model))


class Optional(nn.Module):
    """Its only argument has a default."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor | None = None) -> Tensor:
        assert x is not None
        out: Tensor = self.conv(x).relu()
        return out


def test_an_image_that_has_a_default_is_an_input() -> None:
    entry = user_entry("optional", UserModel(Optional, preprocessing={"crop_size": 32}))
    assert [(spec.name, spec.shape) for spec in model_graph(entry).inputs] == [("x", (None, 3, 32, 32))]
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(values(entry, ["relu"], x)["relu"], Optional()(x))


class DropPath(nn.Module):
    """Skips whole rows in training; torch.fx cannot record a random tensor of as many rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1, 1, 1) < 0.9) if self.training else x


def test_what_only_training_runs_need_not_be_traceable() -> None:
    entry = user_entry("dropping", UserModel(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), DropPath(), nn.ReLU())))
    graph = model_graph(entry)
    assert (graph.eval_nodes, graph.train_nodes) == (["input", "0", "2"], [])
    x = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(values(entry, ["2"], x)["2"], load_model(entry, "builder")(x))
