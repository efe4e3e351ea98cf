"""int8 against float32: which models work and how near they stay, what each layer costs, and what may be kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fxcore import Extractor, build_extractor, get_model, load_model, model_graph, trace
from fxcore.analysis.verify import verify
from fxcore.errors import UnknownNode
from fxcore.int8.quantize import CannotQuantize, quantize
from fxcore.photos import calibration_rows
from fxcore.tensors import Tensors
from tests.fxcore.written import Of

# Least cosine similarity of each node's value to float32's, and how many layers are computed in int8. Weights are
# random: errors grow with depth faster than they do in trained models, most of all through ReLU6 and no shortcut, and
# without VNNI activations have seven bits of eight.
TABLE = [
    ("resnet18", {"C3": 0.995, "C5": 0.98, "fc": 0.99}, 32),
    ("mobilenet_v2", {"C1": 0.98, "C2": 0.9, "classifier": 0.9}, 66),
    ("vit_b_32", {"encoder.layers.encoder_layer_3": 0.99}, 51),
]


def make(name: str, nodes: list[str], images: int, side: int = 224) -> tuple[Extractor, list[Tensors]]:
    """An extractor over random weights whose batch norms know the scale of what they see, and photographs for it.

    Freshly made batch norms do not: in MobileNet v2 everything fades to 1e-30, which int8 has no number for.
    """
    graph = model_graph(name).at(side, side)
    model = load_model(get_model(name), "random")
    rows = calibration_rows(graph.preprocessing, graph.inputs, graph.input_size, count=images)

    def take_scale(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        norm.running_var.copy_(args[0].square().mean((0, 2, 3)))

    hooks = [m.register_forward_pre_hook(take_scale) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        model(rows[0][0])
    for hook in hooks:
        hook.remove()
    return build_extractor(graph, model, graph.resolve(nodes)), rows


@pytest.fixture(scope="module")
def small() -> tuple[Extractor, list[Tensors]]:
    return make("resnet18", ["C2", "C3"], 4, side=96)


@pytest.mark.exhaustive
@pytest.mark.no_cover
@pytest.mark.parametrize(("name", "cosines", "layers"), TABLE)
def test_models_that_work(name: str, cosines: dict[str, float], layers: int) -> None:
    extractor, rows = make(name, list(cosines), 4)
    found = quantize(extractor.module, rows)
    errors = verify(extractor.module, found.module, rows[1]).outputs
    assert len(found.layers) == layers
    for node, least in cosines.items():
        assert errors[node].cosine > least, errors
    assert found.layers[0].sqnr > 15  # of seven bits, at least two hold even where most is lost


@pytest.mark.exhaustive
def test_the_report_is_what_the_int8_module_loses(small: tuple[Extractor, list[Tensors]]) -> None:
    """The first layer's error, against the value of a module that ends there; and the order."""
    extractor, rows = small
    first = build_extractor(
        extractor.graph, extractor.module, extractor.graph.resolve(["relu"])
    ).module  # the weights of the extractor
    inputs = (torch.cat([rows[0][0], rows[1][0]]),)
    seen = verify(first, quantize(first, rows).module, inputs).outputs["relu"]
    layers = {layer.name: layer for layer in quantize(extractor.module, rows).layers}
    assert layers["conv1"].relative == pytest.approx(seen.relative, rel=0.2)
    assert layers["conv1"].sqnr == pytest.approx(-20 * math.log10(seen.relative), abs=1)
    assert [layer.sqnr for layer in layers.values()] == sorted(layer.sqnr for layer in layers.values())
    deep = layers["layer2.1.conv2"]
    assert deep.accumulated > 2 * deep.relative  # alone it is given the float model's values


@pytest.mark.exhaustive
def test_layers_can_be_kept_in_float(small: tuple[Extractor, list[Tensors]]) -> None:
    """By node, by path, by the batch norm or activation that is fused into a layer, and a function by its name."""
    extractor, rows = small
    every = [layer.name for layer in quantize(extractor.module, rows).layers]
    assert {"conv1", "layer1.0.conv1", "layer1.0.add", "layer2.1.add"} <= set(every)
    found = quantize(extractor.module, rows, keep=["layer1", "layer2.0.bn1", "layer2.1.add"])
    names = {layer.name for layer in found.layers}
    assert names == {n for n in every if not n.startswith("layer1.") and n not in ("layer2.0.conv1", "layer2.1.add")}
    beside = quantize(extractor.module, rows, keep=["layer2.0.conv1"])  # its input is read by an int8 layer too
    assert "layer2.0.downsample.0" in {layer.name for layer in beside.layers}
    floats = [m for m in found.module.modules() if isinstance(m, nn.Conv2d)]
    assert len(floats) == 5
    whole = quantize(extractor.module, rows, keep=["conv1", "maxpool", "layer1", "layer2"])
    assert verify(extractor.module, whole.module, rows[1]).relative < 1e-5
    with pytest.raises(UnknownNode, match=r"'layer9'"):
        quantize(extractor.module, rows, keep=["layer9"])


@pytest.mark.exhaustive
def test_the_original_and_other_threads_notice_nothing(small: tuple[Extractor, list[Tensors]]) -> None:
    """Nothing is traced again, which would patch nn.Module for every thread."""
    extractor, rows = small
    state = {key: value.clone() for key, value in extractor.module.state_dict().items()}
    with torch.no_grad():
        expected = extractor.module(*rows[0])
    done = threading.Event()
    wrong: list[str] = []

    def serve() -> None:
        while not done.is_set():
            with torch.inference_mode():
                if not torch.equal(extractor.module(*rows[0])["C3"], expected["C3"]):
                    wrong.append("another value")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        quantize(extractor.module, rows)
    finally:
        done.set()
        thread.join()
    assert not wrong
    assert all(torch.equal(value, state[key]) for key, value in extractor.module.state_dict().items())
    assert not any(hasattr(m, "qconfig") for m in extractor.module.modules())


def test_what_is_kept_whole_may_be_called_by_keywords() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, other: torch.Tensor, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return self.conv(x) * scale + other

    torch.manual_seed(0)
    model = Of(lambda m, x: m.branch(x=x, other=x[:, :1, 1:-1, 1:-1]), branch=Branch()).eval()
    rows: list[Tensors] = [(torch.rand(1, 3, 8, 8),) for _ in range(4)]
    found = quantize(trace(model, leaf_modules=[Branch]), rows)
    assert "branch.conv" in {layer.name for layer in found.layers}
    assert verify(model, found.module, rows[0]).cosine > 0.99


@pytest.mark.parametrize("engine", ["x86", "fbgemm", "onednn"])
def test_transposed_convolutions_stay_in_float(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of none of torch's engines for x86 compute both of these, a layer and a function."""
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 16, 3, padding=1), "up": nn.ConvTranspose2d(16, 8, 2, 2)}
    weight = nn.Parameter(torch.rand(8, 8, 2, 2))
    transposed = nn.functional.conv_transpose2d
    model = Of(lambda m, x: transposed(m.up(torch.relu(m.conv(x))), m.weight, stride=2), **layers, weight=weight).eval()
    rows: list[Tensors] = [(torch.rand(1, 3, 8, 8),) for _ in range(4)]
    found = quantize(trace(model), rows)
    assert {layer.name for layer in found.layers} == {"conv"}
    assert verify(model, found.module, rows[0]).cosine > 0.99


@pytest.mark.parametrize(("engine", "by_a_function"), [("x86", False), ("fbgemm", True), ("onednn", False)])
def test_products_of_many_groups_do_not_overflow(
    engine: str, by_a_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 100 groups, which are FBGEMM's also where the CPU has VNNI; the largest products there can be."""

    class Function(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.conv2d(x, self.weight, None, (1, 1), (1, 1), (1, 1), self.groups)

    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    torch.manual_seed(0)
    kind = Function if by_a_function else nn.Conv2d
    model = nn.Sequential(nn.Conv2d(3, 128, 1), kind(128, 128, 3, padding=1, groups=128, bias=False)).eval()
    for weights in model.parameters():
        nn.init.constant_(weights, 1.0)
    rows: list[Tensors] = [(torch.rand(1, 3, 8, 8) * 0.1 + 0.9,) for _ in range(4)]
    found = quantize(trace(model), rows)
    assert len(found.layers) == 2
    assert verify(model, found.module, rows[0]).relative < 0.02


@pytest.mark.parametrize(("groups", "channels"), [(13, 2), (5, 4)])
def test_uneven_groups_stay_in_float_where_packing_them_writes_too_far(
    groups: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the layer and by the function. In int8 the process would die of it, now or later."""
    monkeypatch.setattr(torch.backends.quantized, "engine", "fbgemm")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, groups * channels, 1)
            self.grouped = nn.Conv2d(groups * channels, groups * channels, 3, padding=1, groups=groups)
            self.weight = nn.Parameter(torch.rand(groups * channels, channels, 3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.grouped(self.first(x))
            where = ((1, 1), (1, 1), (1, 1), groups)
            return nn.functional.conv2d(x, self.weight, None, *where)

    torch.manual_seed(0)
    model = Net().eval()
    rows: list[Tensors] = [(torch.rand(1, 3, 8, 8),) for _ in range(4)]
    found = quantize(trace(model), rows)
    assert [layer.name for layer in found.layers] == ["first"]
    assert verify(model, found.module, rows[0]).cosine > 0.99


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("kind", ["forward", "hook", "pre-hook"])
def test_layers_that_differ_from_their_class_stay_in_float(kind: str, place: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    layer = model[place]
    own = layer.forward
    if kind == "forward":
        layer.forward = lambda x: own(x) * 3 + 1
    elif kind == "hook":
        layer.register_forward_hook(lambda module, args, output: output * 3 + 1)
    else:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 3 + 1,))
    rows: list[Tensors] = [(torch.randn(1, 3, 16, 16),) for _ in range(4)]
    assert verify(model, quantize(trace(model), rows).module, rows[0]).relative < 0.1


def test_layers_with_hooks_may_take_keywords() -> None:
    torch.manual_seed(0)
    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "up": nn.ConvTranspose2d(8, 8, 3, stride=2)}
    layers["up"].register_forward_hook(lambda module, args, output: output * 3 + 1)
    model = Of(lambda m, x: m.up(m.first(x), output_size=[34, 34]), **layers).eval()
    rows: list[Tensors] = [(torch.randn(1, 3, 16, 16),) for _ in range(4)]
    assert verify(model, quantize(trace(model), rows).module, rows[0]).relative < 0.1


@pytest.mark.parametrize(
    ("before", "activation"),
    [
        (nn.ConvTranspose2d(16, 8, 2, 2), nn.Sigmoid()),
        (nn.Conv2d(16, 8, 1), nn.Hardsigmoid()),
        (nn.Conv2d(16, 8, 1), nn.Softmax(1)),
    ],
)
def test_what_sigmoids_read_from_a_float_layer_is_not_cut_off(before: nn.Module, activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), before, activation, nn.Conv2d(8, 4, 1)).eval()
    for weights in model.parameters():
        nn.init.normal_(weights, std=0.2)
    rows: list[Tensors] = [(torch.rand(1, 3, 8, 8) * 8 - 3,) for _ in range(4)]
    found = quantize(trace(model), rows, keep="2")
    assert verify(model, found.module, rows[0]).relative < 0.03


@pytest.mark.exhaustive
@pytest.mark.parametrize("by_a_function", [False, True])
def test_relu6_leaves_all_steps_to_the_values_from_0_to_6(by_a_function: bool) -> None:
    """Values before it reach from -300 to 300 here; steps of that range would be coarser than a third of ReLU6's."""

    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu6(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), Function() if by_a_function else nn.ReLU6()).eval()
    nn.init.constant_(model[1].weight, 100.0)
    rows: list[Tensors] = [(torch.randn(1, 3, 16, 16),) for _ in range(8)]
    with torch.no_grad():
        assert model[:2](rows[0][0]).max() > 100
        found = quantize(trace(model), rows)
        got, expected = found.module(rows[0][0]), model(rows[0][0])
    assert [layer.name for layer in found.layers] == ["0"]
    between = (expected > 0) & (expected < 6)
    assert got[between].unique().numel() > 60
    assert got.amin() == 0
    assert 5.9 < float(got.amax()) < 6.1


def test_products_of_all_eight_bits_do_not_overflow() -> None:
    """A tanh's values always take them, and FBGEMM computes more than 100 groups whatever the CPU has."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 128, 1), nn.Tanh(), nn.AvgPool2d(1), nn.Conv2d(128, 128, 3, padding=1, groups=128, bias=False)
    ).eval()
    nn.init.constant_(model[3].weight, 1.0)
    rows: list[Tensors] = [(torch.rand(1, 3, 8, 8) * 9,) for _ in range(4)]
    found = quantize(trace(model), rows)
    assert "3" in {layer.name for layer in found.layers}
    assert verify(model, found.module, rows[0]).relative < 0.03


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([2.0])


def test_the_given_module_is_not_changed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Doubling()).eval()
    before = set(vars(model[1])) | set(model[1]._buffers)
    quantize(trace(model, leaf_modules=["1"]), [torch.randn(4, 3, 4, 4)])
    assert set(vars(model[1])) | set(model[1]._buffers) == before


# what is written in place


def write_below_a_view(y: Tensor, act: nn.Module) -> Tensor:
    view = y.flatten(1)
    act(y)
    return view


def write_through_a_view(y: Tensor, act: nn.Module) -> Tensor:
    y[:, :4].mul_(2)
    return y


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.conv, self.act, self.write = nn.Conv2d(3, 8, 1), nn.ReLU(inplace=True), write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.conv(x), self.act)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("write", [write_below_a_view, write_through_a_view])
def test_writes_that_only_a_view_reads_are_kept(write: Callable[[Tensor, nn.Module], Tensor], leaf: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Written(write)).eval()
    module = trace(model, leaf_modules=[Written] if leaf else [])
    images = torch.randn(16, 3, 4, 4)
    found = quantize(module, images)
    assert verify(model, found.module, images).relative < 0.03
    # A leaf's last operation has the leaf's name.
    name = "0" if leaf and write is write_through_a_view else "0.conv"
    assert name in {layer.name for layer in found.layers}
    assert name not in {layer.name for layer in quantize(module, images, keep=[name]).layers}


# what it is calibrated on


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        made: Tensor = self.one(x) + self.other(y)
        return made


def test_calibration_is_what_verify_takes_or_an_iterable_of_it() -> None:
    torch.manual_seed(0)
    module = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    images = torch.rand(6, 3, 8, 8)
    loader = DataLoader(TensorDataset(images), batch_size=1)
    forms: list[Any] = [
        images,
        (images,),
        [images],
        [(row,) for row in images.split(1)],
        list(images.split(1)),
        iter(images.split(1)),
        loader,
    ]
    expected = module(images)
    for form in forms:
        found = quantize(module, form)
        errors = verify(lambda _: expected, found.module, images)
        assert errors.cosine > 0.999
        assert [layer.name for layer in found.layers] == ["0"]
    two = trace(Both(), concrete_args={"scale": 1.0})
    for form in (images, images.flip(0)), [(images[:4], images[2:]), [images, images]]:
        made = quantize(two, form).module
        assert verify(two, made, (images, images)).cosine > 0.999


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([], "none were given"),
        (iter([]), "none were given"),
        (torch.rand(0, 3, 8, 8), "none were given"),
        (torch.rand(6, 3, 8, 8).split(1), "a list several calls"),
        ([(torch.rand(2, 3, 8, 8), torch.arange(2))], "a list several calls"),
        (None, "not on None"),
        (["chelsea.jpg"], "not on 'chelsea.jpg'"),
        ([{"x": torch.rand(1, 3, 8, 8)}], "not on {'x'"),
    ],
    ids=["empty", "exhausted", "no_rows", "tuple", "labels", "nothing", "names", "mapping"],
)
def test_calibration_that_the_module_does_not_take(wrong: Any, says: str) -> None:
    module = trace(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(CannotQuantize, match=says):
        quantize(module, wrong)
