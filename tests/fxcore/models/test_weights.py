"""State dicts: from torch.hub's cache, and drawn under seed 0.

Features are held against torchvision's own builders, which read the same file from the same cache.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore import build_extractor, get_model, load_model, model_graph
from fxcore.errors import WeightsUnavailable
from tests.fxcore.conftest import OwnEntry, Put
from tests.fxcore.model_list import each

SMALL = "shufflenet_v2_x0_5"


def drawn(build: Callable[..., nn.Module], **arguments: Any) -> OrderedDict[str, Tensor]:
    """A state dict for what ``build`` makes, as a training might have left it: with batch statistics of its own.

    Drawn here because the builders' own initialisations take seconds.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.device("meta"):
        state: OrderedDict[str, Tensor] = build(weights=None, **arguments).state_dict()
    for key, value in state.items():
        made = torch.zeros(value.shape, dtype=value.dtype)
        if key.endswith("running_var") or (value.ndim == 1 and key.endswith("weight")):
            made.uniform_(0.5, 1.5, generator=generator)
        elif value.is_floating_point():
            made.normal_(0, value[0].numel() ** -0.5 if value.ndim > 1 else 0.1, generator=generator)
        state[key] = made
    return state


def published(name: str, weights: str) -> nn.Module:
    """torchvision's own model, its weights read from the cache."""
    return torchvision.models.get_model(name, weights=weights).eval()


def features(name: str, weights: str, nodes: list[str], x: Tensor) -> dict[str, Tensor]:
    graph = model_graph(name, weights)
    model = load_model(get_model(name), weights)
    with torch.no_grad():
        values: dict[str, Tensor] = build_extractor(graph, model, graph.resolve(nodes)).module(x)
    return values


def reference(model: nn.Module, nodes: list[str], x: Tensor) -> dict[str, Tensor]:
    """torchvision's own extractor, asked for one node at a time (HAZARDS 1)."""
    with torch.no_grad():
        return {node: create_feature_extractor(model, [node]).eval()(x)[node].clone() for node in nodes}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# -- published weights that are in the cache ---------------------------------------------------------------------------

CACHED = {
    "resnet18": ["layer1.0.bn1", "fc"],
    "mnasnet0_5": ["classifier.1"],  # looks at the version that a state dict carries
    "deeplabv3_mobilenet_v3_large": ["classifier.4", "aux_classifier.4"],
    "r3d_18": ["layer1.0.relu"],
}


@pytest.mark.parametrize("name", each(CACHED, frozenset(("resnet18", "mnasnet0_5"))))
def test_cached_weights_give_torchvisions_features(name: str, put: Put) -> None:
    entry = get_model(name)
    assert entry.default_weights is not None
    arguments = {"weights_backbone": None, "aux_loss": True} if "deeplab" in name else {}
    put(name, entry.default_weights, drawn(torchvision.models.get_model_builder(name), **arguments))
    x = noise(1, 3, 4, 32, 32) if entry.task == "video" else noise(1, 3, 64, 96)
    expected = reference(published(name, entry.default_weights), CACHED[name], x)
    found = features(name, entry.default_weights, CACHED[name], x)
    assert list(found) == CACHED[name]
    for node, value in expected.items():
        torch.testing.assert_close(found[node], value, rtol=1e-5, atol=1e-5)


def test_densenets_old_key_names(put: Put) -> None:
    """The published files still say `norm.1` where the model says `norm1`, and count no batches."""
    state = drawn(torchvision.models.densenet121)
    old = {}
    for key, value in state.items():
        if not key.endswith("num_batches_tracked"):
            old[re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key)] = value
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    put("densenet121", "IMAGENET1K_V1", old)
    expected = published("densenet121", "IMAGENET1K_V1").state_dict()
    loaded = load_model(get_model("densenet121"), "IMAGENET1K_V1").state_dict()
    assert loaded.keys() == expected.keys() == state.keys()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


@pytest.mark.exhaustive
def test_auxiliary_heads_and_transform_input(put: Put) -> None:
    """Their files hold heads that only training uses, and their weights want the input transformed once more."""
    name, node = "googlenet", "inception3a.cat"
    state = drawn(torchvision.models.get_model_builder(name), aux_logits=True, init_weights=False)
    assert any(key.lower().startswith("aux") for key in state)
    put(name, "IMAGENET1K_V1", state)
    x = noise(1, 3, 64, 64)
    model = published(name, "IMAGENET1K_V1")
    assert model.transform_input
    # The node comes after the transformation, which the model without weights does not make.
    assert "mul_1" in model_graph(name, "IMAGENET1K_V1").by_name
    assert "mul_1" not in model_graph(name).by_name
    found = features(name, "IMAGENET1K_V1", [node], x)
    assert torch.equal(found[node], reference(model, [node], x)[node])


@pytest.mark.parametrize(
    ("name", "weights", "arguments"),
    [
        ("fasterrcnn_resnet50_fpn", "COCO_V1", {}),  # frozen batch norms whose eps is 0
        pytest.param(  # and whose is not
            "keypointrcnn_resnet50_fpn",
            "COCO_LEGACY",
            {"num_keypoints": 17, "num_classes": 2},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.exhaustive
def test_backbones_with_frozen_batch_norms(name: str, weights: str, arguments: dict[str, Any], put: Put) -> None:
    """torchvision builds these detectors with frozen batch norms; ours are ordinary ones in eval mode."""
    state = drawn(torchvision.models.get_model_builder(name), weights_backbone=None, **arguments)
    for key in [k for k in state if k.endswith("running_var")]:
        # Variances so small that eps makes a difference, and a layer that gives what it gave before.
        state[key] *= 1e-4
        state[key.replace("running_var", "weight")] *= 1e-2
        del state[key.replace("running_var", "num_batches_tracked")]  # frozen ones count no batches
    put(name, weights, state)
    x = noise(1, 3, 64, 96)
    with torch.no_grad():
        expected = published(name, weights).backbone(x)
    if name == "fasterrcnn_resnet50_fpn":
        found = features(name, weights, ["P2", "P3", "P4", "P5", "P6"], x)
    else:  # the graphs are alike
        with torch.no_grad():
            found = load_model(get_model(name), weights).backbone(x)
    assert len(found) == len(expected)
    for ours, theirs in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.exhaustive
def test_a_vit_is_built_for_the_size_of_its_weights(put: Put) -> None:
    """The SWAG weights want 384 px, and the bare model's position embedding is for 224."""
    weights, node = "IMAGENET1K_SWAG_E2E_V1", "encoder.layers.encoder_layer_0.add_1"
    put("vit_b_16", weights, drawn(torchvision.models.vit_b_16, image_size=384))
    x = noise(1, 3, 384, 384)
    expected = reference(published("vit_b_16", weights), [node], x)[node]
    found = features("vit_b_16", weights, [node], x)[node]
    assert found.shape == (1, 1 + 24 * 24, 768)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["quantized_mobilenet_v2", "quantized_resnet18"])
def test_int8_models_leave_the_engine_of_the_process(name: str) -> None:
    """torchvision sets that of their weights, which would determine how other models are quantized."""
    before = torch.backends.quantized.engine
    entry = get_model(name)
    entry.build(entry.canonical_weights("DEFAULT"))
    assert torch.backends.quantized.engine == before


@pytest.mark.exhaustive
def test_int8_weights(put: Put) -> None:
    """Every node of the int8 model, as the numbers that its integers stand for.

    The scales of int8 additions are no tensors but numbers in the graph: those of the file must be used.
    """
    name, weights = "quantized_resnet18", "IMAGENET1K_FBGEMM_V1"
    made = torchvision.models.get_model(name, weights=None, quantize=True)
    for module in made.modules():
        if isinstance(module, torch.ao.nn.quantized.QFunctional):
            module.scale *= 1.5
    put(name, weights, made.state_dict())
    model = torchvision.models.get_model(name, weights=weights, quantize=True).eval()
    graph = model_graph(name, weights)
    nodes = [n.name for n in graph.nodes if n.extractable]
    assert nodes == graph.eval_nodes
    extractor = build_extractor(graph, load_model(get_model(name), weights), graph.resolve(nodes))
    x = noise(1, 3, 64, 64)
    with torch.no_grad():
        found = extractor.module(x)
        expected = model(x)
    assert torch.equal(found["dequant"], expected)
    for node, value in reference(model, ["layer1.0.add_relu", "layer4.1.conv2"], x).items():
        assert torch.equal(found[node], value.dequantize()), node
    for output in extractor.outputs:
        assert output.dtype == "float32"
        assert found[output.key].dtype == torch.float32
    assert {n.name: n.dtype for n in graph.nodes}["conv1"] == "quint8"


@pytest.mark.exhaustive
def test_int8_weights_that_are_loaded_before_the_conversion(put: Put) -> None:
    """MobileNetV3's file holds the fake-quantized model of quantization-aware training."""
    name, weights = "quantized_mobilenet_v3_large", "IMAGENET1K_QNNPACK_V1"
    builder = torchvision.models.get_model_builder(name)
    bare = builder(weights=None).train()
    bare.load_state_dict(drawn(builder))
    bare.fuse_model(is_qat=True)
    bare.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")
    torch.ao.quantization.prepare_qat(bare, inplace=True)
    with torch.no_grad():
        bare.eval()(noise(2, 3, 64, 64))  # its observers take note of the ranges
    put(name, weights, bare.state_dict())
    model = torchvision.models.get_model(name, weights=weights, quantize=True).eval()
    x = noise(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(load_model(get_model(name), weights)(x), expected)
    assert expected.abs().max() > 0


# -- damaged or missing files ------------------------------------------------------------------------------------------


def _half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _other_model(file: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, file)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: file.write_bytes(b"") and None,
    "text": lambda file: file.write_text("<html>404</html>") and None,
    "half": _half,
    "list": lambda file: torch.save([torch.zeros(2)], file),
    "numbers": lambda file: torch.save({"lr": 0.1}, file),
    "numbered": lambda file: torch.save({0: torch.zeros(2)}, file),
    "other model": _other_model,
}


@pytest.mark.parametrize(
    ("name", "damage"), [(SMALL, "half"), (SMALL, "other model"), ("quantized_shufflenet_v2_x0_5", "half")]
)
def test_a_damaged_file_in_the_cache(name: str, damage: str, put: Put) -> None:
    entry = get_model(name)
    assert entry.default_weights is not None
    file = put(name, entry.default_weights, torchvision.models.get_model(SMALL, weights=None).state_dict())
    DAMAGE[damage](file)
    with pytest.raises(WeightsUnavailable) as caught:
        load_model(entry, entry.default_weights)
    assert caught.value.extra == {"file": file.name, "folder": str(file.parent)}
    assert file.name in caught.value.detail


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Path, str]]:
        return Path.write_text, (self.target, "ran")


def test_a_file_in_the_cache_runs_no_code(put: Put, tmp_path: Path) -> None:
    file = put(SMALL, "IMAGENET1K_V1", {})
    torch.save({"weight": Bomb(tmp_path / "ran")}, file)
    with pytest.raises(WeightsUnavailable):
        load_model(get_model(SMALL), "IMAGENET1K_V1")
    assert not (tmp_path / "ran").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "ran").exists()  # the file would have


# -- random ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["shufflenet_v2_x0_5", "mnasnet0_5", "quantized_mobilenet_v2", "lraspp_mobilenet_v3_large"],
)
def test_random_is_torchvisions_initialisation_under_seed_0(name: str) -> None:
    arguments = {"weights_backbone": None} if name.startswith("lraspp") else {}
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = load_model(get_model(name), "random").state_dict()
    assert torch.equal(torch.get_rng_state(), before)  # whoever draws numbers beside us draws the same as without us
    torch.manual_seed(0)
    expected = torchvision.models.get_model(name, weights=None, **arguments).state_dict()
    assert first.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(first[key], value), key


def test_random_is_repeatable_while_other_models_are_built() -> None:
    entry = get_model(SMALL)
    quiet = load_model(entry, "random").state_dict()
    stop = threading.Event()

    def build() -> None:
        while not stop.is_set():
            get_model("vit_b_32").build_weightless()
            get_model("resnet18").build()

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            state = load_model(entry, "random").state_dict()
            assert all(torch.equal(state[key], value) for key, value in quiet.items())
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_each_load_is_private_in_eval_mode_and_out_of_place() -> None:
    one, other = (load_model(get_model("resnet18"), "random") for _ in range(2))
    pointers = {p.data_ptr() for p in one.parameters()}
    assert not pointers & {p.data_ptr() for p in other.parameters()}
    assert not any(getattr(m, "inplace", False) for m in one.modules())
    assert not any(m.training for m in one.modules())
    assert not any(p.requires_grad for p in one.parameters())
    assert {p.dtype for p in one.parameters()} == {torch.float32}


def in_wrappers(model: nn.Module) -> dict[str, Mapping[str, Any]]:
    """What training scripts save of ``model``, by what they wrap it in."""
    state = model.state_dict()
    compiled = torch.compile(torch.nn.DataParallel(model))
    return {
        "DataParallel": torch.nn.DataParallel(model).state_dict(),
        "torch.compile": torch.compile(model).state_dict(),
        "both": compiled.state_dict(),
        "AveragedModel": torch.optim.swa_utils.AveragedModel(model).state_dict(),
        "Lightning": {"state_dict": {f"model.{key}": value for key, value in state.items()}, "epoch": 3},
        "Lightning and torch.compile": {"state_dict": {f"model._orig_mod.{key}": v for key, v in state.items()}},
    }


@pytest.mark.exhaustive
def test_checkpoints_of_wrapped_models(tmp_path: Path) -> None:
    """Of a model that converts old keys by their versions."""
    torch.manual_seed(2)
    trained = torchvision.models.get_model("mnasnet0_5")
    for wrapper, saved in in_wrappers(trained).items():
        torch.save(saved, tmp_path / "mine.pth")
        loaded = load_model(get_model("mnasnet0_5"), "file:mine.pth", tmp_path).state_dict()
        assert loaded.keys() == trained.state_dict().keys(), wrapper
        assert all(torch.equal(value, loaded[key]) for key, value in trained.state_dict().items()), wrapper


def test_keys_of_the_models_own_are_no_wrapper(tmp_path: Path, own_entry: OwnEntry) -> None:
    """Of a model that has all of it in a part called ``model``; only DataParallel's prefix is in the way."""

    def build() -> nn.Module:
        whole = nn.Module()
        whole.model = nn.Conv2d(3, 4, 1)
        return whole

    trained = build()
    torch.save({f"module.{key}": value for key, value in trained.state_dict().items()}, tmp_path / "mine.pth")
    loaded = load_model(own_entry(build), "file:mine.pth", tmp_path)
    assert torch.equal(loaded.get_parameter("model.weight"), trained.get_parameter("model.weight"))
    torch.save({f"other.{key}": value for key, value in trained.state_dict().items()}, tmp_path / "other.pth")
    with pytest.raises(WeightsUnavailable, match=r"other\.model\.weight"):
        load_model(own_entry(build), "file:other.pth", tmp_path)
