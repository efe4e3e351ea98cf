"""Folders of leaf modules that are not torch.nn's: they are assembled from attributes, layers and tensors."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import DeformConv2d

from fxcore import build_extractor, create_extractor, load_model, model_graph
from fxcore.exports import CannotExport, export_folder
from fxcore.toolbox.replace import identity

Reload = Callable[..., Any]


@pytest.fixture
def reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reload:
    """Export a module to a package, and load it from there; packages of all tests are imported into one process."""
    numbers = itertools.count()

    def exported(source: Any, *example_inputs: Tensor) -> Any:
        name = f"package{next(numbers)}_of_{tmp_path.name}"
        export_folder(source, tmp_path / name, example_inputs=example_inputs or None)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name).load()

    return exported


def check(reload: Reload, net: Net, x: Tensor) -> Any:
    """Export a leaf and load it again, and compare the values; return the loaded leaf."""
    module = create_extractor(net.eval(), ["leaf"], x, leaf_modules=[type(net.leaf)])
    assert [node.target for node in module.graph.find_nodes(op="call_module", target="leaf")] == ["leaf"]
    again = reload(module, x)
    with torch.no_grad():
        torch.testing.assert_close(again(x)["leaf"], net(x))
    return again.leaf


class Net(nn.Module):
    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.leaf = leaf

    def forward(self, x: Tensor) -> Any:
        return self.leaf(x)


class Deformed(Net):
    def forward(self, x: Tensor) -> Any:
        return self.leaf(x, x[:, :1, 1:-1, 1:-1].expand(-1, 18, -1, -1))


class Recurrent(Net):
    def forward(self, x: Tensor) -> Any:
        return self.leaf(x)[0]


class Assigning(nn.Module):
    """Writes into slices of a value, one of which is read before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        before = y[:, 2:].sum(1, keepdim=True)
        y[:, :2] = 0
        y[:, 2:] *= before
        out: Tensor = self.head(y)
        return out


class Absent(nn.Module):
    """Has a buffer that is None until a call sets it, a layer that is None, and a dtype that it reads itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)
        self.register_parameter("bias", None)
        self.scale = nn.Parameter(torch.rand(3))
        self.add_module("after", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.full_like(x, 2.0, dtype=next(self.parameters()).dtype)
        x = x * self.seen * self.scale
        x = x if self.bias is None else x + self.bias
        return x if self.after is None else self.after(x)


class Hidden(nn.Module):
    """Has tensors that are missing from its state dict, or have two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.rand(4), persistent=False)
        self.inner = nn.ModuleDict({"one": nn.Linear(4, 4)})
        self.inner["two"] = self.inner["one"]
        self.tied = self.inner["one"].weight
        self.named = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.named(self.inner["two"](self.inner["one"](x))) @ self.tied + self.offset
        return out


class Calling(nn.Module):
    """Calls functions that are attributes."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = functions

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(x)))
        return out


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_writes_into_slices(reload: Reload) -> None:
    net, x = Assigning().eval(), torch.rand(2, 3, 8, 8)
    again = reload(create_extractor(net, ["conv", "head"], x), x)
    with torch.no_grad():
        torch.testing.assert_close(again(x), {"conv": net.conv(x), "head": net(x)})


class Flattening(nn.Module):
    """Has sizes of its input as constants in the part after the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.conv(x)).reshape(-1, 4 * x.shape[2] * x.shape[3])
        return out


def test_parts_of_one_size_refuse_others(reload: Reload) -> None:
    net, x, inner = Flattening().eval(), torch.rand(2, 3, 8, 8), torch.rand(2, 4, 8, 8)
    again = reload(create_extractor(net, ["reshape"], x, inputs=["conv"]), inner)
    torch.testing.assert_close(again(inner)["reshape"], inner.relu().flatten(1))
    with pytest.raises(Exception, match=r"conv must have the sizes \[any, 4, 8, 8\]") as caught:
        again(torch.rand(2, 4, 4, 4))
    assert (type(caught.value).__name__, type(caught.value).__module__) == ("BadTensor", type(again).__module__)


def test_parameters_buffers_and_layers_that_are_none(reload: Reload) -> None:
    made = check(reload, Net(Absent()), torch.rand(2, 3))
    assert dict(made.named_parameters()).keys() == {"scale"}


def test_a_layer_of_torchvision_without_a_bias(reload: Reload) -> None:
    check(reload, Deformed(DeformConv2d(3, 4, 3, bias=False)), torch.rand(2, 3, 8, 8))


def test_tensors_that_a_state_dict_leaves_out_or_has_twice(reload: Reload) -> None:
    check(reload, Net(Hidden()), torch.rand(2, 4))


def test_functions_that_a_leaf_calls(reload: Reload) -> None:
    """Functions of Python, of torch itself, whose qualified name differs, and of C++."""
    made = check(reload, Net(Calling(doubled, torch.tanh, F.gelu)), torch.rand(2, 4))
    assert (made.first, made.second, made.third) == (doubled, torch.tanh, F.gelu)


@pytest.mark.parametrize("activation", [F.silu, "relu"])
def test_a_transformer_calls_its_activation(activation: Any, reload: Reload) -> None:
    leaf = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=activation)
    made = check(reload, Net(leaf), torch.rand(2, 5, 8))
    assert made.activation is (F.relu if activation == "relu" else activation)


@pytest.mark.parametrize(
    "leaf",
    [
        nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True, dropout=0.1, proj_size=2),
        nn.GRU(4, 3, bias=False, batch_first=True),
        nn.RNN(4, 3, nonlinearity="relu"),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_recurrent_layers(leaf: nn.Module, reload: Reload) -> None:
    net, x = Recurrent(leaf).eval(), torch.rand(2, 5, 4)
    again = reload(create_extractor(net, {"getitem": "out"}, x), x)
    with torch.no_grad():
        torch.testing.assert_close(again(x)["out"], net(x))


def test_functions_that_cannot_be_imported_are_refused(tmp_path: Path) -> None:
    x = torch.rand(2, 4)
    for function in (lambda x: 2 * x, identity, x.mul):
        module = create_extractor(Net(Calling(doubled, function, F.silu)), ["leaf"], x, leaf_modules=[Calling])
        with pytest.raises(CannotExport, match=r"leaf \(.*Calling\) has 'second', which is neither a plain value nor"):
            export_folder(module, tmp_path / "refused", example_inputs=(x,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "node"), [("timm.tf_efficientnet_b0", "blocks.1"), ("timm.convit_tiny", "blocks.1")])
def test_models_of_timm(name: str, node: str, reload: Reload) -> None:
    """Convolutions without a bias, and attention with indices that are not in its state dict."""
    graph = model_graph(name)
    extractor = build_extractor(graph, load_model(graph.entry, "random"), graph.resolve({node: "out"}))
    x = torch.rand(2, 3, *graph.input_size)
    with torch.no_grad():
        torch.testing.assert_close(reload(extractor)(x)["out"], extractor.module(x)["out"])


class Size(NamedTuple):
    height: int
    width: int


class Sized(nn.Module):
    """Has a named tuple, whose repr needs its class, and a tensor's shape, whose repr needs torch."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.size)


def test_named_tuples_are_refused(tmp_path: Path, reload: Reload) -> None:
    x = torch.rand(2, 12)
    for size in ((3, 4), [3, 4], torch.Size([3, 4])):
        check(reload, Net(Sized(size)), x)
    module = create_extractor(Net(Sized(Size(3, 4))), ["leaf"], x, leaf_modules=[Sized])
    with pytest.raises(CannotExport, match="has 'size', which is neither a plain value nor"):
        export_folder(module, tmp_path / "refused", example_inputs=(x,))


@pytest.mark.parametrize(
    ("name", "nodes", "needed"),
    [
        ("squeezenet1_1", ["features.2"], "torch, safetensors"),
        ("swin_t", ["features.1"], "torch, safetensors, torchvision"),
        ("timm.test_efficientnet", ["blocks.1"], "torch, safetensors, timm"),
    ],
)
def test_the_folder_says_which_packages_it_needs(name: str, nodes: list[str], needed: str, tmp_path: Path) -> None:
    """They are those that its code imports."""
    graph = model_graph(name)
    extractor = build_extractor(graph, load_model(graph.entry, "random"), graph.resolve(nodes))
    export_folder(extractor, tmp_path / "package")
    assert f"Needs {needed}.\n" in (tmp_path / "package" / "README.md").read_text()
    code = (tmp_path / "package" / "module.py").read_text()
    imported = {match.split(".")[0] for match in re.findall(r"^(?:from|import) (\S+)", code, re.MULTILINE)}
    assert imported - sys.stdlib_module_names == set(needed.split(", "))
