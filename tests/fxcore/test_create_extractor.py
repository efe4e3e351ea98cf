"""Extractors of modules in memory, against torchvision's own and against forward hooks."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
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
from torchvision.models import mobilenet_v3_small, resnet18, swin_v2_t
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import fxcore
from fxcore.errors import BadArgument, BadTensor, DuplicateKey, FxError, NotTraceable, UnknownNode
from fxcore.exports import CannotExport, export, export_folder
from fxcore.graph.cut import OpenCut
from fxcore.tracing.names import names


def hooked(module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
    """What the part at ``path`` returns in a run of the module itself."""
    seen: list[Any] = []
    handle = module.get_submodule(path).register_forward_hook(lambda m, i, o: seen.append(copy.deepcopy(o)))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        handle.remove()
    return seen[-1]


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


@pytest.mark.parametrize(
    "build", [resnet18, *(pytest.param(b, marks=pytest.mark.exhaustive) for b in (mobilenet_v3_small, swin_v2_t))]
)
def test_the_values_of_torchvisions_extractor(build: Any) -> None:
    model, x = build().eval(), torch.rand(2, 3, 64, 64)
    paths = get_graph_node_names(model)[1]
    for name in [paths[1], paths[len(paths) // 2], paths[-1]]:
        expected = create_feature_extractor(model, [name])(x)[name]
        found = fxcore.create_extractor(model, {name: "key"}, x)(x)
        assert list(found) == ["key"]
        assert torch.equal(found["key"], expected), name


def test_in_place_operations_do_not_change_what_was_asked_for() -> None:
    model, x = resnet18().eval(), torch.rand(1, 3, 64, 64)
    found = fxcore.create_extractor(model, ["layer1", "layer1.0.bn1"], x)(x)
    model.layer1[0].relu.inplace = False  # the hook itself would see what the ReLU wrote
    assert torch.equal(found["layer1.0.bn1"], hooked(model, "layer1.0.bn1", x))
    assert torch.equal(found["layer1"], hooked(model, "layer1", x))


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

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return written(self.conv(x)) * torch.arange(8.0)

    torch.manual_seed(0)
    model, x = Writing().eval(), torch.randn(2, 3, 8, 8)
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


class Normed(nn.Module):
    """Computes with buffers: by themselves, through a view, and with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x - self.mean.view(1, -1))
        x = x / (self.variance + 1e-5).sqrt()
        return x + self.mix.bias * self.variance


class Codebook(nn.Module):
    """Looks up the nearest code, as VQ-VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("codes", torch.randn(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        codes = torch.cat([self.codes, torch.zeros(1, 6)])
        distance = x.pow(2).sum(1, keepdim=True) - 2 * x @ codes.t() + codes.pow(2).sum(1)
        return nn.functional.embedding(distance.argmin(1), codes) + x.mean()


class Chosen(Codebook):
    """Python needs the value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * int(self.count)


@pytest.mark.parametrize("kind", [Normed, Codebook])
@pytest.mark.parametrize("change", ["load_state_dict", "training", "average"])
def test_weights_that_change_change_it(kind: Callable[[], nn.Module], change: str) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(32, 6)
    expected_names = get_graph_node_names(model)[1]
    assert names(fxcore.trace(model).graph) == expected_names
    last = expected_names[-1]
    extractor = fxcore.create_extractor(model, [last], x)
    late = fxcore.create_extractor(model, [last], x, inputs=["mix"])
    before = model(x)
    if change == "load_state_dict":
        model.load_state_dict({name: torch.rand_like(value) * 3 for name, value in model.state_dict().items()})
    elif change == "training":
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        extractor(x)[last].square().mean().backward()
        optimizer.step()
    else:
        for buffer in model.buffers():
            buffer.lerp_(torch.rand_like(buffer) * 3, 0.5)
    assert not torch.equal(model(x), before)
    torch.testing.assert_close(extractor(x)[last], model(x))
    torch.testing.assert_close(late(hooked(model, "mix", x))[last], model(x))


def test_a_buffer_whose_value_python_needs() -> None:
    model, x = Chosen().eval(), torch.randn(32, 6)
    [last] = get_graph_node_names(model)[1][-1:]
    assert torch.equal(fxcore.create_extractor(model, [last], x)(x)[last], model(x))


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


@pytest.mark.parametrize("first", ["moving, k=2", "moving, k=2, /"])
@pytest.mark.parametrize("hooked", [False, True])
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


class Trunk(nn.Module):
    """Computes its first part with or without gradients, writes in place, and splits."""

    def __init__(self, gradients: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(4, 6), nn.Linear(6, 4), nn.ReLU(inplace=True)
        self.gradients = gradients

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.gradients):
            y = self.first(x)
            y += 1
            y = self.act(y)
            one, other = y.chunk(2, 1)
            largest, _ = y.max(1, keepdim=True)
        return self.last(torch.cat([one, other.exp()], 1)) * largest + self.first.bias[:4] * x


class WithoutGradientsInside(Trunk):
    @torch.no_grad()
    def looked_up(self, x: Tensor) -> Tensor:
        return self.first(x).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.looked_up(x) * self.first(x))


class WritesWithoutGradients(Trunk):
    """Adds in place to a value that has gradients, which keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            y += 1
        return self.last(y)


@pytest.mark.parametrize("made_without", [False, True])
@pytest.mark.parametrize(
    "build", [lambda: Trunk(gradients=True), Trunk, WithoutGradientsInside, WritesWithoutGradients]
)
def test_gradients_are_the_modules(build: Callable[[], nn.Module], made_without: bool) -> None:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(3, 4, requires_grad=True)
    with torch.set_grad_enabled(not made_without):
        [last] = get_graph_node_names(model)[1][-1:]
        extractor = fxcore.create_extractor(model, [last], x.detach())
    inputs = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), inputs, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(extractor(x)[last].square().sum(), inputs, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, expected)


def test_values_computed_without_gradients_have_none() -> None:
    model, x = Trunk().eval(), torch.randn(3, 4)
    traced = fxcore.trace(model)
    for extractor in (fxcore.create_extractor(m, ["first", "mul"], x) for m in (model, traced)):
        found = extractor(x)
        assert not found["first"].requires_grad
        assert found["mul"].requires_grad
        assert torch.equal(found["first"], model.first(x))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, found: Tensor) -> Tensor:  # type: ignore[override]
        return found


class Estimator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = StraightThrough.apply(x)  # type: ignore[no-untyped-call]
        return made


def test_parts_kept_whole_keep_their_backward() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Estimator(), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    extractor = fxcore.create_extractor(model, ["2"], x.detach(), leaf_modules=[Estimator])
    [expected], [found] = (torch.autograd.grad(y.sum(), [x]) for y in (model(x), extractor(x)["2"]))
    torch.testing.assert_close(found, expected)


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


@pytest.mark.exhaustive
def test_export_of_what_trace_returns(captioner: Captioner, tmp_path: Path) -> None:
    traced = fxcore.trace(captioner.image)  # it has a single output, not a dict
    export_folder(traced, tmp_path / "alone", example_inputs=IMAGE)
    torch.save(IMAGE, tmp_path / "x.pt")
    code = "import torch; from alone import load; print(load()(torch.load('x.pt'))['output'].double().sum().item())"
    told = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(told.stdout) == pytest.approx(captioner.image(IMAGE).double().sum().item())
    archive = export(traced, "fx", example_inputs=IMAGE)
    assert "Preprocessing" not in zipfile.ZipFile(io.BytesIO(archive)).read("Sequential_extractor/README.md").decode()


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return x + y, x.shape[0]


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


@pytest.mark.parametrize(
    "call",
    [
        lambda m: fxcore.transforms.decompose(m, rules=3),
        lambda m: fxcore.transforms.decompose(m, rules=[torch.relu]),
        lambda m: fxcore.transforms.decompose(m, 3),
        lambda m: fxcore.transforms.fold_normalization(m, mean="abc", std=3),
        lambda m: fxcore.transforms.fold_normalization(m, mean=["a", "b", "c"], std=[1, 1, 1]),
        lambda m: fxcore.transforms.fold_normalization(m, mean=[0, 0, 0], std=None),
        lambda m: fxcore.trace(m, leaf_modules=3),
        lambda m: fxcore.trace(m, leaf_modules=[nn.ReLU()]),
        lambda m: fxcore.trace(m, leaf_modules=[int]),
        lambda m: fxcore.trace(m, leaf_functions=len),
        lambda m: fxcore.trace(m, concrete_args=["input"]),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(call: Any) -> None:
    module: fx.GraphModule = fxcore.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())
    with pytest.raises(FxError, match=r"rules|operations|mean|leaf_modules|leaf_functions|concrete_args"):
        call(module)


class Gated(nn.Module):
    """Adds a token for each row, as transformers do, and overwrites a value that another name has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.token, self.last = nn.Linear(4, 6), nn.Parameter(torch.rand(1, 1, 6)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        kept = y
        y += 1
        z = torch.cat([self.token.expand(x.size(0), -1, -1), kept], 1)
        return self.last(z) * x.mean()


def test_it_begins_at_inner_nodes_and_gives_what_the_module_does() -> None:
    module, x = Gated().eval(), torch.rand(3, 5, 4)
    begin = ["first", "mean"]
    front = fxcore.create_extractor(module, begin, (torch.rand(2, 5, 4),))
    back = fxcore.create_extractor(module, {"mul": "end"}, (torch.rand(2, 5, 4),), inputs=begin)
    assert [str(n.target) for n in back.graph.find_nodes(op="placeholder")] == begin
    with torch.no_grad():
        assert torch.equal(back(**front(x))["end"], module(x))


def test_what_it_would_need_beside_its_inputs_is_named() -> None:
    with pytest.raises(OpenCut, match="give mean too") as caught:
        fxcore.create_extractor(Gated().eval(), ["mul"], (torch.rand(2, 5, 4),), inputs=["first"])
    assert caught.value.extra["missing"] == ["mean"]


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
