"""What models there are, what they are built of, and that building them without weights takes no memory."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torchvision import models as tv

from fxcore import get_model, list_models
from fxcore.errors import UnknownModel, UnknownWeights
from fxcore.graph.model_graph import trace_graph
from tests.fxcore.model_list import each
from tests.peak_memory import peak, reset_peak


def test_tasks_are_torchvisions_packages() -> None:
    packages = {
        "quantization": tv.quantization,
        "segmentation": tv.segmentation,
        "detection": tv.detection,
        "video": tv.video,
        "optical_flow": tv.optical_flow,
        "classification": torchvision.models,
    }
    entries = list_models("torchvision")
    for task, package in packages.items():
        assert {e.name for e in entries if e.task == task} == set(tv.list_models(module=package)), task


def test_weights_are_torchvisions() -> None:
    for entry in list_models("torchvision"):
        enum = tv.get_model_weights(entry.name)
        assert entry.weights == tuple(w.name for w in enum)
        assert entry.default_weights == enum.DEFAULT.name
        for published in enum:
            info = entry.weights_info(published.name)
            assert (info.url, info.num_params) == (published.url, published.meta["num_params"])
            assert info.metrics == published.meta["_metrics"]
            assert list(info.categories) == list(published.meta.get("categories") or [])
            assert info.file.name == published.url.rsplit("/", 1)[-1]
        assert entry.weights_info("DEFAULT") == entry.weights_info(enum.DEFAULT.name)


def test_cached_says_whether_the_file_is_there() -> None:
    info = get_model("resnet18").weights_info("DEFAULT")
    assert not info.cached
    assert info.file.parent == Path(torch.hub.get_dir()) / "checkpoints"
    info.file.parent.mkdir(parents=True)
    info.file.write_bytes(b"")
    assert info.cached


@pytest.mark.parametrize("name", each(tv.list_models()))
def test_weightless_models(name: str) -> None:
    """HAZARDS 11, RegNet included: nothing is allocated, and each set of weights gets the model that it declares."""
    entry = get_model(name)
    seen = set()
    for weights in entry.weights:
        declared = entry.weights_info(weights).num_params
        if declared in seen:
            continue
        seen.add(declared)
        # int8 models pack their parameters away; of them the float model can be had without weights.
        model = entry.build_weightless("random" if entry.is_quantized(weights) else weights)
        assert not any(module.training for module in model.modules())
        _holds_nothing(model)
        if not entry.is_quantized(weights):
            count = sum(p.numel() for p in model.parameters())
            if entry.task == "detection" and count != declared:
                # torchvision freezes the backbone's batch norms, and frozen ones have no parameters.
                norms = [m for m in model.backbone.modules() if isinstance(m, nn.BatchNorm2d)]
                count -= sum(p.numel() for m in norms for p in m.parameters())
            assert count == declared, weights


def _holds_nothing(model: nn.Module) -> None:
    assert {p.device.type for p in model.parameters()} == {"meta"}
    held = [b for b in model.buffers() if b.device.type != "meta"]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            assert module.running_mean is not None
            assert module.running_mean.device.type == "meta"
        held += [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
    # Attention models keep whole numbers that say which bias belongs where; Swin3D's are the largest.
    assert sum(t.untyped_storage().nbytes() for t in held if t.is_floating_point()) < 2**20
    assert sum(t.untyped_storage().nbytes() for t in held) < 2**25


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_listing_the_nodes_of_large_models_takes_no_memory() -> None:
    """HAZARDS 11, measured: the weights of these two would take 5.1 GB."""
    before = reset_peak()
    for name in ("regnet_y_128gf", "vit_h_14"):
        assert len(trace_graph(get_model(name)).eval_nodes) > 100
    assert peak() - before < 400_000_000


def test_building_leaves_the_random_generator_alone() -> None:
    before = torch.get_rng_state()
    for name in ("vit_b_32", "shufflenet_v2_x0_5"):
        get_model(name).build_weightless()
    get_model("shufflenet_v2_x0_5").build()
    assert torch.equal(torch.get_rng_state(), before)


def test_building_leaves_torch_as_it_was() -> None:
    """Parameters of models made afterwards are real again, also after a builder that fails."""
    entry = dataclasses.replace(get_model("resnet18"), builder=lambda **_: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        entry.build_weightless()
    get_model("resnet18").build_weightless()
    assert nn.BatchNorm2d(3).running_mean.device.type == "cpu"  # type: ignore[union-attr]
    assert nn.Linear(3, 3).weight.device.type == "cpu"


def test_vit_is_built_for_the_size_of_its_weights() -> None:
    """HAZARDS 14: vit_h_14's default weights want 518 px; the bare model asserts 224."""
    for weights, size in (("random", 518), ("IMAGENET1K_SWAG_LINEAR_V1", 224)):
        assert get_model("vit_h_14").build_weightless(weights).image_size == size


@pytest.mark.parametrize("asked", ["IMAGENET1K_V3", "default", "file:", "", "RANDOM", "COCO_V1"])
def test_unknown_weights_list_the_known_ones(asked: str) -> None:
    with pytest.raises(UnknownWeights) as caught:
        get_model("resnet50").canonical_weights(asked)
    assert caught.value.extra["available"] == ["DEFAULT", "IMAGENET1K_V1", "IMAGENET1K_V2", "random"]
    assert all(name in caught.value.detail for name in ("IMAGENET1K_V1", "IMAGENET1K_V2", "random", "file:NAME"))
    near = {"IMAGENET1K_V3": {"IMAGENET1K_V1", "IMAGENET1K_V2"}, "default": {"DEFAULT"}, "RANDOM": {"random"}}
    assert set(caught.value.extra["suggestions"]) == near.get(asked, set())


def test_unknown_models_get_suggestions() -> None:
    for asked, meant in (("RESNET50", "resnet50"), ("vit_b16", "vit_b_16"), ("fasterrcnn", "fasterrcnn_resnet50_fpn")):
        with pytest.raises(UnknownModel) as caught:
            get_model(asked)
        assert meant in caught.value.extra["suggestions"]
        assert meant in caught.value.detail
        assert caught.value.extra["name"] == asked
    with pytest.raises(UnknownModel) as caught:
        get_model("§" * 100_000)
    assert caught.value.extra["suggestions"] == []
