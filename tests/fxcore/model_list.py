"""Every model that torchvision lists, with some weights and a valid input."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import pytest
import timm
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torchvision.models.video.mvit import MSBlockConfig, MViT

from fxcore import ModelEntry, WeightsInfo, get_model, list_models
from fxcore.images.presets import VideoClassification
from fxcore.models.torchvision_models import TorchvisionEntry

ALL = [entry.name for entry in list_models("torchvision")]
CLOSED = [entry.name for entry in list_models("torchvision") if entry.task in ("detection", "optical_flow")]
TRACEABLE = [name for name in ALL if name not in CLOSED]

# One model of each family, a small one if there is a choice. Exhaustive tests run over all of these.
FAMILIES = frozenset((
    "alexnet", "convnext_tiny", "deeplabv3_mobilenet_v3_large", "densenet121", "efficientnet_b0", "efficientnet_v2_s",
    "fasterrcnn_mobilenet_v3_large_320_fpn", "fcn_resnet50", "fcos_resnet50_fpn", "googlenet", "inception_v3",
    "keypointrcnn_resnet50_fpn", "lraspp_mobilenet_v3_large", "maskrcnn_resnet50_fpn", "maxvit_t", "mc3_18",
    "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "mvit_v2_s", "quantized_mobilenet_v2", "raft_small",
    "regnet_y_400mf", "resnet18", "retinanet_resnet50_fpn", "s3d", "shufflenet_v2_x0_5", "squeezenet1_1",
    "ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "swin3d_t", "swin_t", "swin_v2_t", "vgg11", "vit_b_32",
))  # fmt: skip

# One model of each kind of architecture that the tests distinguish. Every test always runs over these.
KINDS = frozenset((
    "lraspp_mobilenet_v3_large", "quantized_mobilenet_v2", "raft_small", "resnet18", "ssdlite320_mobilenet_v3_large",
    "swin_t", "vit_b_32",
))  # fmt: skip

OF_FAMILIES = [name for name in ALL if name in FAMILIES]

# The other models run no product code that the models above do not, and coverage would double the time of a sweep.
# Only for tests without a service: no_cover ends the tracing of threads that run meanwhile, for good.
SWEPT = (pytest.mark.exhaustive, pytest.mark.no_cover)


def each(names: Iterable[str], always: frozenset[str] = KINDS) -> list[ParameterSet]:
    """Return a parameter for each of ``names``; those not in ``always`` are exhaustive and run without coverage."""
    return [pytest.param(name, marks=() if name in always else SWEPT) for name in names]


# Values are compared at these sizes if the model accepts any size, so that the largest models take seconds.
SMALL = {"classification": 64, "quantization": 64, "segmentation": 64, "video": 32}
SMALLEST = 32
FIXED_SIZE = ("vit_", "maxvit", "mvit", "s3d", "inception", "quantized_inception", "alexnet", "swin_v2")


@cache
def entry_of(name: str) -> ModelEntry:
    """Return the entry of a model; for MViT, one with three blocks for clips of 32 x 32, since a pass of ``mvit_v2_s``
    takes 64 billion multiplications."""
    if name != "mvit_v2_s":
        return get_model(name)
    info = WeightsInfo("V1", "http://127.0.0.1:9/mvit-00000000.pth", 0, {}, ())
    preset = partial(VideoClassification, crop_size=(32, 32), resize_size=(32, 32))
    return TorchvisionEntry("mvit", "video", _mvit, {"V1": info}, "V1", transforms={"V1": preset}, meta={"V1": {}})


def small_swin() -> nn.Module:
    """Build a timm Swin for images of 32 x 32, of four windows each, whose attention has 2 heads of 4 channels."""
    sizes: Any = {"img_size": 32, "patch_size": 4, "window_size": 4, "num_classes": 5}
    torch.manual_seed(0)
    return timm.models.SwinTransformer(**sizes, embed_dim=8, depths=(2,), num_heads=(2,)).eval()


def _mvit(*, weights: object = None) -> nn.Module:
    """Build a small MViT in the way that ``mvit_v2_s`` is built."""
    blocks = [
        MSBlockConfig(heads, before, after, [3, 3, 3], [3, 3, 3], [1, step, step], [1, kept, kept])
        for heads, before, after, step, kept in ((1, 16, 16, 1, 4), (2, 16, 32, 2, 2), (2, 32, 32, 1, 2))
    ]
    return MViT(
        (32, 32),
        16,
        blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=10,
    )


# A prime number of values, so that no row of a weight repeats another.
_VALUES = torch.empty(1_000_003).uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(0))


def filled(name: str, *, shrink: bool = False) -> nn.Module:
    """Return a model of :func:`entry_of` with some weights, which only need to be drawn fast, since both sides of a
    comparison use them.

    Args:
        shrink: build a ViT for images of 4 x 4 patches.
    """
    model = entry_of(name).build_weightless()
    if shrink and name.startswith("vit_"):
        _shrink(model)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                count = parameter.numel()
                value = torch.empty(count)
                for start in range(0, count, len(_VALUES)):
                    value[start : start + len(_VALUES)] = _VALUES[: count - start]
                value = value.view(parameter.shape)
                module._parameters[key] = nn.Parameter(value, requires_grad=False)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            module.running_mean = torch.empty(module.num_features).uniform_(-0.1, 0.1, generator=generator)
            module.running_var = torch.empty(module.num_features).uniform_(0.5, 2, generator=generator)
            module.num_batches_tracked = torch.zeros((), dtype=torch.long)
            if module.weight is not None:
                # Near one, so that the signal does not vanish after a hundred layers.
                module.weight.data.uniform_(0.8, 1.2, generator=generator)
    return model.eval()


def small_input(name: str) -> Tensor:
    """Return the smallest input that ``filled(name, shrink=True)`` accepts."""
    entry = entry_of(name)
    if name.startswith("vit_"):
        side = 4 * (14 if name == "vit_h_14" else int(name.split("_")[-1]))
        shape = (3, side, side)
    else:
        size = entry.preprocessing("random").nominal_size()
        side = size[0] if name.startswith(FIXED_SIZE) else SMALLEST
        side = 96 if "inception" in name else side
        shape = (3, 16, side, side) if entry.task == "video" else (3, side, side)  # type: ignore[assignment]
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))


def _shrink(vit: nn.Module) -> None:
    """Change a ViT to accept images of 4 x 4 patches; the sizes of its blocks do not change."""
    vit.image_size = 4 * int(vit.patch_size)  # type: ignore[arg-type,assignment]
    vit.seq_length = 17  # type: ignore[assignment]
    encoder = vit.get_submodule("encoder")
    width = encoder.pos_embedding.shape[-1]
    encoder.pos_embedding = nn.Parameter(torch.empty(1, 17, width, device="meta"), requires_grad=False)
