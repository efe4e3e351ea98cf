"""No family of models makes a tensor on another device than its input's, or copies values between the host and the
device, which cannot be captured: walked on CUDA without one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxcore import build_extractor, model_graph
from fxcore.backends.cudagraphs import OnDevice, watched
from tests.fxcore.model_list import each, entry_of

CUDA = torch.device("cuda", 0)


def move(module: nn.Module) -> None:
    """Replace parameters and buffers by fake ones on CUDA, those that are shared once."""
    moved: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, value in tensors.items():
                if value is not None and value not in moved:
                    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
                    moved[value] = nn.Parameter(fake, False) if isinstance(value, nn.Parameter) else fake
                if value is not None:
                    tensors[name] = moved[value]


# One of each kind of layer that makes tensors of its own.
NAMES = [
    *("convnext_tiny", "densenet121", "efficientnet_b0", "fasterrcnn_mobilenet_v3_large_320_fpn", "googlenet"),
    *("lraspp_mobilenet_v3_large", "maxvit_t", "mvit_v2_s", "quantized_mobilenet_v2", "raft_small", "resnet18", "s3d"),
    *("shufflenet_v2_x0_5", "ssdlite320_mobilenet_v3_large", "swin3d_t", "swin_t", "swin_v2_t", "vit_b_32"),
]


@pytest.mark.parametrize("name", each(NAMES, frozenset(["lraspp_mobilenet_v3_large", "raft_small"])))
def test_every_node(name: str) -> None:
    graph = model_graph(entry_of(name))
    nodes = {name: name for name, node in graph.by_name.items() if isinstance(node.meta.get("value"), Tensor)}
    module = build_extractor(graph, entry_of(name).build_weightless().eval(), nodes).module
    with FakeTensorMode(), torch.no_grad():
        move(module)
        x = [torch.empty(2, *(size or 1 for size in spec.shape[1:]), device=CUDA) for spec in graph.inputs]
        values = watched(module)(*x)
    assert {key: value.device for key, value in values.items()} == dict.fromkeys(nodes, CUDA)


@pytest.mark.parametrize(
    ("function", "copied"),
    [
        (lambda x: x[torch.arange(3)], "index"),
        (lambda x: x + torch.ones(3).to(x.device), "_to_copy"),
        (lambda x: torch.ones(4, 3).copy_(x), "copy_"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: x[torch.arange(3, device=x.device)] * torch.tensor(0.5), None),
        (lambda x: x.half().mT.contiguous() + torch.ones(2).sum(), None),
    ],
)
def test_copies_are_refused(function: Callable[[Tensor], Tensor], copied: str | None) -> None:
    with FakeTensorMode():
        x = torch.empty(4, 3, device=CUDA)
        with OnDevice(), nullcontext() if copied is None else pytest.raises(RuntimeError, match=rf"aten\.{copied}\."):
            function(x)
