"""Extractors of modules in memory, against torchvision's own and against forward hooks."""

from __future__ import annotations

import copy
import importlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils import parametrizations, parametrize
from torchvision.models import resnet18, squeezenet1_1
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import fxcore
from fxcore.errors import BadArgument, BadTensor, DuplicateKey, FxError, NotTraceable, UnknownNode
from fxcore.exports import CannotExport, export, export_folder
from tests.fxcore.hooks import hooked
from tests.fxcore.written import Of


class Captioner(nn.Module):
    """Two inputs of different types, options, a module called twice, and an in-place operation."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6)
        self.image = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.mix = nn.Linear(6, 6)

    def forward(self, ids: Tensor, image: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> Tensor:
        x = self.mix(self.words(ids)) + self.image(image).mean((2, 3))[:, None]
        if mask is not None:
            x = x * mask[..., None]
        return self.mix(x) if twice else x


@pytest.fixture
def captioner() -> Captioner:
    torch.manual_seed(0)
    return Captioner().eval()


IDS, IMAGE = torch.arange(10).view(2, 5), torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("build", [squeezenet1_1, pytest.param(resnet18, marks=pytest.mark.exhaustive)])
def test_the_values_of_torchvisions_extractor(build: Any) -> None:
    model, x = build().eval(), torch.rand(2, 3, 64, 64)
    paths = get_graph_node_names(model)[1]
    for name in [paths[1], paths[len(paths) // 2], paths[-1]]:
        expected = create_feature_extractor(model, [name])(x)[name]
        found = fxcore.create_extractor(model, {name: "key"}, x)(x)
        assert list(found) == ["key"]
        assert torch.equal(found["key"], expected), name


def test_nodes_have_the_metadata_of_torchs_shape_propagation(captioner: Captioner) -> None:
    inputs = {"ids": IDS, "image": IMAGE.to(memory_format=torch.channels_last)}
    extractor = fxcore.create_extractor(captioner, ["image.0", "mix"], inputs)
    found = {n.name: n.meta["tensor_meta"] for n in extractor.graph.nodes if n.op != "output"}
    with torch.no_grad():
        ShapeProp(extractor).propagate(*inputs.values())
    assert found == {n.name: n.meta["tensor_meta"] for n in extractor.graph.nodes if n.op != "output"}
    assert torch.channels_last in [meta.memory_format for meta in found.values()]


def test_the_module_stays_as_it_is() -> None:
    model = resnet18()  # in train mode, with in-place ReLUs
    before = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    extractor = fxcore.create_extractor(model, ["layer4"], torch.rand(2, 3, 64, 64))
    assert all(part.training for part in model.modules())
    assert model.relu.inplace
    for key, value in model.state_dict(keep_vars=True).items():
        assert value is before[key][0], key
        assert torch.equal(value, before[key][1]), key
    assert extractor.get_submodule("layer4.1.conv2").weight is model.layer4[1].conv2.weight
    assert not any(part.training for part in extractor.modules())
    with pytest.raises(UnknownNode, match="layer4"):
        fxcore.create_extractor(model, ["layer5"], torch.rand(1, 3, 64, 64))
    assert all(part.training for part in model.modules())


def written(x: Tensor) -> Tensor:
    return x.relu_() + 1


def test_an_extractor_made_in_inference_mode() -> None:
    """It sees what a function kept whole writes, and its constants can be kept for a backward pass."""
    torch.manual_seed(0)
    model = Of(lambda m, x: written(m.conv(x)) * torch.arange(8.0), conv=nn.Conv2d(3, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        extractor = fxcore.create_extractor(model, ["conv", "mul"], x.clone(), leaf_functions=[written])
    found = extractor(x)
    torch.testing.assert_close(found["conv"], nn.functional.conv2d(x, model.conv.weight, model.conv.bias))
    assert torch.equal(found["mul"], model(x))
    found["mul"].sum().backward()
    assert model.conv.weight.grad is not None


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2.0


class Looked(nn.Module):
    """Looks rows up in a function, which scales them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(20, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.rows, max_norm=1.0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "first",
    [
        lambda: nn.Embedding(20, 6, max_norm=1.0),
        lambda: nn.EmbeddingBag(20, 6, max_norm=1.0),
        Looked,
        lambda: nn.Sequential(nn.Embedding(20, 6), Counting()),
    ],
    ids=["embedding", "bag", "function", "kept whole"],
)
def test_parameters_that_the_module_itself_writes_to_stay_as_they_are(
    first: Callable[[], nn.Module], training: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.Linear(6, 6)).train(training)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    extractor = fxcore.create_extractor(model, ["1"], IDS, leaf_modules=[Counting])
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    expected = hooked(copy.deepcopy(model).eval(), "1", IDS)
    with torch.no_grad():
        assert torch.equal(extractor(IDS)["1"], expected)


def test_a_part_that_compiles_itself_still_does() -> None:
    class Compiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # It raises if nothing was compiled.
            done: Tensor = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(x)
            return done

    model, x = nn.Sequential(Compiled(), nn.Tanh()).eval(), torch.rand(2, 4)
    assert torch.equal(fxcore.create_extractor(model, ["1"], x, leaf_modules=["0"])(x)["1"], model(x))


def test_inputs_without_dimensions() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.mix(x) * scale

    model, x = Scaled().eval(), torch.rand(2, 4)
    extractor = fxcore.create_extractor(model, ["mix", "mul"], (x, torch.tensor(3.0)))
    found = extractor(x, torch.tensor(5.0))
    assert torch.equal(found["mix"], hooked(model, "mix", x, torch.tensor(5.0)))
    assert torch.equal(found["mul"], model(x, torch.tensor(5.0)))


@pytest.mark.parametrize(("make", "name"), [(nn.Sequential.eval, "3"), (fxcore.trace, "3"), (fx.symbolic_trace, "_3")])
def test_training_that_goes_on_does_not_change_it(make: Callable[[nn.Module], nn.Module], name: str) -> None:
    torch.manual_seed(0)
    model = make(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU(inplace=True)).eval())
    x = torch.randn(2, 3, 8, 8)
    extractor, expected = fxcore.create_extractor(model, [name], x), model(x)
    norm = model.get_submodule("1")
    model.train()
    assert torch.equal(extractor(x)[name], expected)
    assert norm.num_batches_tracked == 0
    assert norm.training
    extractor.train()
    assert not model.eval().get_submodule("1").training
    assert extractor.get_submodule("1").training


def test_a_graph_in_train_mode_is_refused_and_left_alone() -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(FxError, match=r"create_extractor needs .*eval mode"):
        fxcore.create_extractor(model, ["_1"], torch.rand(2, 3, 8, 8))
    assert model.get_submodule("1").num_batches_tracked == 0


def test_any_inputs_by_position_and_by_name(captioner: Captioner) -> None:
    mask = torch.ones(2, 5)
    whole = {"ids": IDS, "image": IMAGE, "mask": mask}
    extractor = fxcore.create_extractor(captioner, {"words": "w", "image.2": "i", "mul": "out"}, whole)
    assert [n.name for n in extractor.graph.find_nodes(op="placeholder")] == ["ids", "image", "mask"]
    found = extractor(**whole)
    assert torch.equal(found["w"], hooked(captioner, "words", **whole))
    assert torch.equal(found["i"], hooked(captioner, "image", **whole))
    assert torch.equal(found["out"], captioner(**whole))
    assert torch.equal(extractor(IDS, IMAGE, mask)["out"], found["out"])
    options = {"ids": IDS, "image": IMAGE, "twice": True}
    twice = fxcore.create_extractor(captioner, {"mix_1": "out"}, options)
    assert torch.equal(twice(IDS, IMAGE)["out"], captioner(**options))
    # What holds no tensor keeps its value, or its default: the branches are taken so.
    bare = fxcore.create_extractor(captioner, {"add": "out"}, (IDS, IMAGE))
    assert [n.name for n in bare.graph.find_nodes(op="placeholder")] == ["ids", "image"]
    assert torch.equal(bare(IDS, IMAGE)["out"], captioner(IDS, IMAGE))


@pytest.mark.parametrize(("first", "hooked"), [("moving, k=2", True), ("moving, k=2, /", False)])
@pytest.mark.parametrize("name", ["fixed", "function", "positions", "inner", "defaults", "narrow", "forward", "call"])
def test_arguments_with_any_name(name: str, hooked: bool, first: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def forward(self, {first}, {name}=None): return self.mix(moving) * k - self.mix({name})", scope)
    model = type("Registration", (nn.Module,), scope)()
    model.mix = nn.Linear(4, 4)
    if hooked:
        model.register_forward_hook(lambda module, inputs, output: output * 3)
    x, y = torch.rand(2, 3, 4)
    found = fxcore.create_extractor(model, {"sub": "out"}, {"moving": x, name: y})(x, y)["out"]
    assert torch.equal(found * 3 if hooked else found, model(x, 2, y))


def test_a_traced_module_with_parts_kept_whole() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Gate(), nn.Tanh())).eval(), torch.rand(2, 4)
    with pytest.raises(NotTraceable):
        fxcore.create_extractor(model, ["1.1"], x)
    for extractor in (
        fxcore.create_extractor(model, ["1.0", "1.1"], x, leaf_modules="auto"),
        fxcore.create_extractor(fxcore.trace(model, leaf_modules="auto"), ["1.0", "1.1"], x),
    ):
        assert torch.equal(extractor(x)["1.0"], hooked(model, "1.0", x))
        assert torch.equal(extractor(x)["1.1"], hooked(model, "1.1", x))


def test_shapes_are_drawn(captioner: Captioner) -> None:
    extractor = fxcore.create_extractor(captioner, {"image.2": "maps"}, (IDS, IMAGE))
    assert "[2, 6, 6, 6]" in fxcore.render(extractor, "table")
    assert "maps: image.2" in fxcore.render(extractor, "mermaid")


def test_the_tools_take_what_it_returns(captioner: Captioner) -> None:
    extractor = fxcore.create_extractor(captioner, {"add": "out"}, {"ids": IDS, "image": IMAGE})
    named = {"image": IMAGE, "ids": IDS}
    assert fxcore.verify(captioner, lambda ids, image: extractor(ids, image)["out"], named).max_abs == 0.0
    assert fxcore.verify(extractor, extractor, named).allclose
    assert any(node.name == "mix" for node in fxcore.profile(extractor, named, runs=1).nodes)
    assert fxcore.check_health(extractor, named).healthy
    images = fxcore.create_extractor(captioner.image, {"2": "maps"}, IMAGE)
    int8 = fxcore.quantize(images, IMAGE)
    assert (
        torch.nn.functional.cosine_similarity(
            int8.module(IMAGE)["maps"].flatten(), captioner.image(IMAGE).flatten(), dim=0
        )
        > 0.99
    )


@pytest.mark.exhaustive
def test_export_of_several_inputs(captioner: Captioner) -> None:
    extractor = fxcore.create_extractor(captioner, {"words": "w", "add": "out"}, (IDS, IMAGE))
    other = IDS[:1].flip(1), IMAGE[1:]
    expected = captioner(*other)
    session = onnxruntime.InferenceSession(export(extractor, "onnx", example_inputs=(IDS, IMAGE)))
    out = session.run(["out"], {"ids": other[0].numpy(), "image": other[1].numpy()})[0]
    assert torch.allclose(torch.from_numpy(out), expected, atol=1e-5)
    program = torch.export.load(io.BytesIO(export(extractor, "torch_export", example_inputs=(IDS, IMAGE)))).module()
    assert torch.allclose(program(*other)["out"], expected, atol=1e-5)


class TwoRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(int(x.shape[0]), -1)


@pytest.mark.exhaustive
def test_programs_of_one_number_of_rows_are_refused() -> None:
    """A leaf that makes the number of rows a constant is right in eager mode for any number."""
    x = torch.rand(2, 5)
    module = fxcore.create_extractor(nn.Sequential(nn.ReLU(), TwoRows()).eval(), ["1"], x, leaf_modules=[TwoRows])
    with pytest.raises(CannotExport, match=r"Constraints violated .*size\(\)\[0\]"):
        export(module, "torch_export", example_inputs=(x,))


@pytest.mark.exhaustive
def test_export_of_what_trace_returns(captioner: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = fxcore.trace(captioner.image)  # it has a single output, not a dict
    export_folder(traced, tmp_path / "alone", example_inputs=IMAGE)
    monkeypatch.syspath_prepend(tmp_path)
    torch.testing.assert_close(importlib.import_module("alone").load()(IMAGE)["output"], captioner.image(IMAGE))
    archive = export(traced, "fx", example_inputs=IMAGE)
    assert "Preprocessing" not in zipfile.ZipFile(io.BytesIO(archive)).read("Sequential_extractor/README.md").decode()


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return x + y, x.shape[0]


def test_the_device_meta_has_no_values_to_check_on() -> None:
    module, given = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).eval().to("meta"), torch.empty(4, 2, device="meta")
    with pytest.raises(
        BadTensor, match=r"the device meta have no values to check the graph on; .* or trace the module"
    ):
        fxcore.create_extractor(module, ["0"], given)
    assert fxcore.create_extractor(fxcore.trace(module), ["0"], given)(given)["0"].shape == (4, 3)


def test_what_is_refused(captioner: Captioner) -> None:
    x = torch.rand(2, 3)
    pair = fxcore.trace(Pair())
    for call, error, says in [
        (lambda: fxcore.create_extractor(captioner, ["nowhere"], (IDS, IMAGE)), UnknownNode, "nowhere"),
        (lambda: fxcore.create_extractor(Pair(), ["getattr"], (x, x)), UnknownNode, "getattr"),
        (lambda: fxcore.create_extractor(captioner, 3, (IDS, IMAGE)), BadArgument, "3"),  # type: ignore[arg-type]
        (lambda: fxcore.create_extractor(captioner, [], (IDS, IMAGE)), UnknownNode, "at least one"),
        (lambda: fxcore.create_extractor(captioner, {"mix": "a", "words": "a"}, (IDS, IMAGE)), DuplicateKey, "a"),
        (lambda: fxcore.create_extractor(captioner, ["mix"], IDS), BadTensor, "image"),
        (lambda: fxcore.create_extractor(captioner, ["mix"], {"idz": IDS}), BadTensor, "idz"),
        (lambda: fxcore.create_extractor(captioner, ["mix"], (IMAGE, IDS)), BadTensor, "cannot take"),
        (lambda: fxcore.create_extractor(lambda x: x, ["x"], x), FxError, "module"),  # type: ignore[arg-type]
        (lambda: export(pair, "fx"), BadTensor, "example_inputs"),
        (lambda: export(pair, "onnx", example_inputs=(x, x)), CannotExport, "returns"),
        (lambda: export(nn.ReLU(), "fx"), FxError, "trace"),  # type: ignore[arg-type]
        (lambda: fxcore.verify(pair, pair, (x,)), BadTensor, "y"),
        (lambda: fxcore.profile(pair, (x, x, x)), BadTensor, "x"),
        (lambda: fxcore.check_health(pair, {"z": x}), BadTensor, "z"),
    ]:
        with pytest.raises(error, match=says):
            call()


class Parametrized(nn.Module):
    """A leaf with a parametrized weight and an in-place part, which is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(3, 3))
        self.parametrized = parametrizations.spectral_norm(nn.Linear(3, 3))
        self.act = nn.ReLU(inplace=True)
        self.weight = nn.Parameter(torch.ones(3))
        parametrize.register_parametrization(self, "weight", nn.Softplus())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x) * self.weight)
        return out


def test_leaves_with_parametrized_weights_and_in_place_parts() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), Parametrized()).eval(), torch.randn(4, 3)
    extractor = fxcore.create_extractor(model, ["0", "1"], x, leaf_modules=["1"])
    with torch.no_grad():
        expected, found = {"0": hooked(model, "0", x), "1": hooked(model, "1", x)}, extractor(x)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)
    assert model[1].act.inplace
