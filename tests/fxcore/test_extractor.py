"""Extractors: the values asked for, whatever else is asked for, and nothing disturbed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore import Extractor, build_extractor, get_model, load_model, model_graph
from fxcore.errors import UnknownNode
from fxcore.graph.model_graph import trace_graph
from tests.fxcore.conftest import OwnEntry


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    """Models with random weights, shared by extractors as the service shares them."""
    names = ("resnet18", "convnext_tiny", "vit_b_32", "swin_t")
    return {name: load_model(get_model(name), "random") for name in names}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def run(extractor: Extractor, *inputs: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        values: dict[str, Tensor] = extractor.module(*inputs)
    return values


def make(name: str, model: nn.Module, nodes: list[str] | dict[str, str]) -> Extractor:
    graph = model_graph(name)
    return build_extractor(graph, model, graph.resolve(nodes))


def reference(model: nn.Module, node: str, x: Tensor) -> Tensor:
    """torchvision's own extractor, asked for one node (HAZARDS 1)."""
    with torch.no_grad():
        value: Tensor = create_feature_extractor(model, [node]).eval()(x)[node]
    return value.clone()


@pytest.mark.exhaustive
def test_values_do_not_depend_on_what_else_is_asked_for(models: dict[str, nn.Module]) -> None:
    """Asked alone, together, in another order, under another name: bit for bit what torchvision gives for one node."""
    name = "convnext_tiny"
    graph, model, x = model_graph(name), models[name], noise(2, 3, 64, 64)
    nodes = [n.name for n in graph.nodes if n.extractable]
    whole = run(make(name, model, nodes), x)
    assert list(whole) == nodes
    chosen = [*random.Random(name).sample(nodes, 1), graph.levels["C4"].node]
    shuffled = random.Random(1).sample(nodes, len(nodes))
    again = run(make(name, model, shuffled), x)
    assert list(again) == shuffled  # HAZARDS 8
    for node in nodes:
        assert torch.equal(whole[node], again[node]), node
    for node in chosen:
        alone = run(make(name, model, {node: "key"}), x)["key"]
        assert torch.equal(alone, whole[node]), node
        assert torch.equal(alone, reference(model, node, x)), node


def test_overlapping_names_give_each_its_own(models: dict[str, nn.Module]) -> None:
    """HAZARDS 1: in torchvision `features.7.2` beside `features.7` is wrong, and `encoder.ln` beside `encoder` lost."""
    x = noise(1, 3, 64, 64)
    values = run(make("convnext_tiny", models["convnext_tiny"], ["features.7", "features.7.2", "features"]), x)
    expected = reference(models["convnext_tiny"], "features.7.2", x)
    assert list(values) == ["features.7", "features.7.2", "features"]
    assert all(torch.equal(value, expected) for value in values.values())
    x = noise(1, 3, 224, 224)
    values = run(make("vit_b_32", models["vit_b_32"], ["encoder", "encoder.ln"]), x)
    expected = reference(models["vit_b_32"], "encoder.ln", x)
    assert torch.equal(values["encoder"], expected)
    assert torch.equal(values["encoder.ln"], expected)


def test_the_input_itself_and_the_whole_model(models: dict[str, nn.Module]) -> None:
    x = noise(2, 3, 64, 64)
    values = run(make("resnet18", models["resnet18"], ["x", "fc"]), x)
    with torch.no_grad():
        assert torch.equal(values["fc"], models["resnet18"](x))
    assert torch.equal(values["x"], x)


def test_nothing_is_computed_that_was_not_asked_for(models: dict[str, nn.Module]) -> None:
    extractor = make("resnet18", models["resnet18"], ["layer1.0.bn1"])
    nodes = [n.name for n in extractor.module.graph.nodes]
    assert nodes == ["x", "conv1", "bn1", "relu", "maxpool", "layer1_0_conv1", "layer1_0_bn1", "output"]
    assert not hasattr(extractor.module, "layer4")
    assert not any(module.training for module in extractor.module.modules())  # HAZARDS 7


def test_parameters_are_shared_with_the_model(models: dict[str, nn.Module]) -> None:
    model = models["resnet18"]
    own = {p.data_ptr() for p in model.parameters()}
    for nodes in (["layer1"], ["layer4", "fc"], ["C3"]):
        parameters = list(make("resnet18", model, nodes).module.parameters())
        assert parameters
        assert {p.data_ptr() for p in parameters} <= own


def test_building_disturbs_neither_the_model_nor_other_extractors() -> None:
    """HAZARDS 5: torchvision leaves the model in train mode when a name is unknown."""
    model, graph, x = load_model(get_model("resnet18"), "random"), model_graph("resnet18"), noise(2, 3, 64, 64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = {name: id(module) for name, module in model.named_modules()}
    first = make("resnet18", model, ["layer2"])
    quiet = run(first, x)["layer2"]
    for nodes in (["layer1.0.bn1"], ["layer1", "layer4"]):
        build_extractor(graph, model, graph.resolve(nodes))
        assert not any(module.training for module in [*model.modules(), *first.module.modules()])
    with pytest.raises(UnknownNode):
        build_extractor(graph, model, graph.resolve(["layer1", "no such node"]))
    assert not any(module.training for module in [*model.modules(), *first.module.modules()])
    assert torch.equal(run(first, x)["layer2"], quiet)
    assert {name: id(module) for name, module in model.named_modules()} == modules
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert int(after["bn1.num_batches_tracked"]) == 0


@pytest.mark.parametrize("name", ["swin_t", "vit_b_32"])
def test_each_image_has_its_own_row(name: str, models: dict[str, nn.Module]) -> None:
    """What one image gives does not depend on the others in the batch."""
    size = 224 if name == "vit_b_32" else 64
    graph, x = model_graph(name), noise(3, 3, size, size)
    nodes = [n.name for n in graph.nodes if n.extractable]
    extractor = make(name, models[name], random.Random(name).sample(nodes, 15))
    together, alone = run(extractor, x), run(extractor, x[1:2])
    for output in extractor.outputs:
        rows = output.rows_per_image
        assert together[output.key].shape[0] == 3 * rows
        torch.testing.assert_close(together[output.key][rows : 2 * rows], alone[output.key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["swin_t", "shufflenet_v2_x0_5"])
def test_outputs_are_described_as_they_come(name: str) -> None:
    graph = model_graph(name)
    model = load_model(get_model(name), "random")
    nodes = [n.name for n in graph.nodes if n.extractable]
    extractor = make(name, model, nodes)
    height, width = graph.input_size
    values = run(extractor, noise(1, 3, height, width))
    assert [o.key for o in extractor.outputs] == nodes
    for output, info in zip(extractor.outputs, [n for n in graph.nodes if n.extractable], strict=True):
        value = values[output.key]
        assert output.node == info.name
        assert [d if d is not None else r for d, r in zip(output.shape, value.shape, strict=True)] == list(value.shape)
        assert output.shape[0] is None
        assert list(value.shape[1:]) == info.shape[1:]  # type: ignore[index]
        assert str(value.dtype) == f"torch.{output.dtype}" == f"torch.{info.dtype}"
        assert output.bytes_per_image == value.numel() * value.itemsize
        assert value.shape[0] == output.rows_per_image == info.rows_per_image


@pytest.mark.parametrize(
    ("name", "node", "layout", "shape"),
    [
        ("swin_t", "features.1", "NHWC", [56, 56, 96]),
        ("swin_t", "permute", "NCHW", [768, 7, 7]),
        ("convnext_tiny", "features.1.0.block.0", "NCHW", [96, 56, 56]),
        ("convnext_tiny", "features.1.0.block.2", "NHWC", [56, 56, 96]),
        ("vit_b_32", "encoder.layers.encoder_layer_3.mlp", "tokens", [50, 768]),
        ("vit_b_32", "conv_proj", "NCHW", [768, 7, 7]),
        ("vit_b_32", "getitem_5", "NC", [768]),
        ("resnet18", "layer3", "NCHW", [256, 14, 14]),
        ("resnet18", "flatten", "NC", [512]),
    ],
)
def test_layouts_say_which_axis_is_what(name: str, node: str, layout: str, shape: list[int]) -> None:
    """HAZARDS 15: Swin is NHWC inside, ViT is tokens."""
    graph = model_graph(name)
    exact = graph.resolve([node])[node]
    info = next(n for n in graph.nodes if n.name == exact)
    assert (info.layout, info.shape) == (layout, [None, *shape])


def test_channels_and_strides_follow_the_layout() -> None:
    info = {n.name: n for n in model_graph("swin_t").nodes}
    assert (info["features.3.1.add_1"].channels, info["features.3.1.add_1"].stride) == (192, 8)
    info = {n.name: n for n in model_graph("vit_b_32").nodes}
    assert (info["conv_proj"].channels, info["conv_proj"].stride) == (768, 32)
    assert (info["encoder.ln"].channels, info["encoder.ln"].stride) == (768, None)


class Centring(nn.Module):
    """Computes with its buffers: tracing keeps what comes of that, and not how."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("order", torch.tensor([0, 1, 2, 3]))
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x - self.mean.view(1, 3, 1, 1))
        y = y * (self.norm.running_var + self.norm.eps).rsqrt().view(-1, 1, 1)
        return y[:, self.order.flip(0)] * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(-1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_those_of_the_weights(dtype: torch.dtype, own_entry: OwnEntry, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Centring().eval()
    model.mean += torch.tensor([1.0, -2.0, 3.0])
    model.order.copy_(torch.tensor([2, 0, 3, 1]))
    model.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    entry = own_entry(Centring)
    graph, loaded = trace_graph(entry), load_model(entry, "file:own.safetensors", tmp_path).to(dtype)
    last, x = graph.eval_nodes[-1], noise(2, 3, 32, 32).to(dtype)
    with torch.no_grad():
        expected = model.to(dtype)(x)
    for _ in range(2):  # what the first extractor left in the model serves the second
        extractor = build_extractor(graph, loaded, {"value": last, "conv": "conv"}, dtype)
        values = run(extractor, x)
        for output in extractor.outputs:
            assert values[output.key].dtype == getattr(torch, output.dtype) == dtype
        # The reference's last product is in float32, where torch makes tensors of numbers.
        near = {"rtol": 0, "atol": 0} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
        torch.testing.assert_close(values["value"], expected.to(dtype), **near)
    assert loaded.state_dict().keys() == model.state_dict().keys()


class Grid(nn.Module):
    """Asks a buffer where it is, and has a layer of its own take a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("periods", torch.linspace(1, 2, 3))
        self.conv, self.query, self.mix = nn.Conv2d(3, 3, 1), nn.Parameter(torch.ones(1, 1, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2).mT
        places = y.new_ones(y.shape[1], 1).to(self.periods.device) / self.periods
        return (y + places) @ self.mix(self.query.expand(y.shape[0], -1, -1)).mT


def test_the_graph_runs_where_the_model_is(own_entry: OwnEntry) -> None:
    entry = own_entry(Grid)
    graph, model = trace_graph(entry), load_model(entry, "random")
    assert next(n.flops for n in graph.nodes if n.name == "mix") == 2 * 3 * 3
    last, x = graph.eval_nodes[-1], noise(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(run(build_extractor(graph, model, {"value": last}), x)["value"], expected)
    elsewhere = model.to("meta")
    value = run(build_extractor(graph, elsewhere, {"value": last}), x.to("meta"))["value"]
    assert (value.device.type, value.shape) == ("meta", expected.shape)


def test_other_sizes(models: dict[str, nn.Module]) -> None:
    extractor = make("resnet18", models["resnet18"], ["layer3", "avgpool"])
    for height, width in ((64, 64), (96, 160), (33, 47)):
        values = run(extractor, noise(1, 3, height, width))
        found = model_graph("resnet18").values_at([(3, height, width)], ["layer3.1.relu_1", "avgpool"])
        assert found["layer3.1.relu_1"] == (list(values["layer3"].shape), torch.float32)
        assert found["avgpool"] == (list(values["avgpool"].shape), torch.float32)


def test_video_models_that_hold_immutable_lists() -> None:
    """HAZARDS 14: swin3d's graph trips a plain interpreter on meta tensors."""
    graph = model_graph("swin3d_t")
    info = {n.name: n for n in graph.nodes}
    assert info[graph.resolve(["features.0"])["features.0"]].shape == [None, 8, 56, 56, 96]
    assert graph.input_shape == [None, 3, 16, 224, 224]


@pytest.mark.parametrize("name", ["googlenet", "quantized_inception_v3"])
def test_train_and_eval_graphs_differ(name: str) -> None:
    """HAZARDS 13: the auxiliary heads run in training alone; what can be asked for is the eval graph."""
    graph = model_graph(name)
    only_in_training = set(graph.train_nodes) - set(graph.eval_nodes)
    assert any(n.lower().startswith("aux") for n in only_in_training)
    assert not any(n.lower().startswith("aux") for n in graph.eval_nodes)
    assert set(graph.by_name) == set(graph.eval_nodes)
    assert model_graph("resnet18").train_nodes == model_graph("resnet18").eval_nodes


def test_torchvision_still_has_these_hazards() -> None:
    """If one of these fails, torchvision was mended and a remedy here may go."""
    model = load_model(get_model("resnet18"), "random")
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    x = torch.randn(1, 3, 64, 64)
    both = create_feature_extractor(model, ["layer1.0.bn1", "layer1"]).eval()(x)
    assert both["layer1.0.bn1"].min() == 0
    with pytest.raises(ValueError, match="not present"):
        create_feature_extractor(model, ["no such node"])
    assert model.training
