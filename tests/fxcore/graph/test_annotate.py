"""Which rows of a value belong to an image, and how many FLOPs compute it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module
from torch.utils.flop_counter import FlopCounterMode

from fxcore import get_model, model_graph
from fxcore.graph.annotate import annotate, count_flops, values_at
from fxcore.graph.flops import FlopCounter
from fxcore.tracing.names import PATH


class Doubled(nn.Module):
    """Each image twice, ``joined`` in some way, through a convolution and back."""

    def __init__(self, joined: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.joined = joined
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.conv(self.joined(x))
        return both.unflatten(0, (2, -1)).mean(0)


class Stacked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, x])


@pytest.mark.parametrize(
    "joined",
    [
        lambda x: torch.cat([x, x.flip(-1)]),
        lambda x: torch.cat((x, x), dim=0),
        lambda x: x.repeat(2, 1, 1, 1),
        lambda x: torch.stack([x, x.flip(-1)]).flatten(0, 1),
        lambda x: x.unsqueeze(0).expand(2, -1, -1, -1, -1).reshape(-1, 3, 8, 8),
        lambda x: x[:, None].transpose(0, 1).expand(2, -1, -1, -1, -1).contiguous().view(-1, 3, 8, 8),
        nn.Sequential(Stacked(), nn.Flatten(0, 1)),
    ],
)
def test_images_after_all_others_are_no_rows_of_one(joined: Callable[[Tensor], Tensor]) -> None:
    module = fx.symbolic_trace(Doubled(joined).eval()).to("meta")
    annotate(module, [(3, 8, 8)], torch.device("meta"))
    rows = {node.name: node.meta.get("rows") for node in module.graph.nodes}
    assert (rows["x"], rows["conv"], rows["mean"]) == (1, 0, 1)


@pytest.mark.parametrize(
    "joined",
    [
        lambda x: torch.cat([x[:, None], x[:, None]], dim=1).flatten(0, 1),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: torch.stack([x, x], 1).reshape(-1, 3, 8, 8),
        lambda x: torch.cat([x, x], 1)[None].view(-1, 3, 8, 8),
        lambda x: torch.cat([x, x], dim=-1).unflatten(-1, (2, 8)).movedim(3, 1).flatten(0, 1).repeat(1, 1, 1, 1),
    ],
)
def test_images_beside_each_other_are(joined: Callable[[Tensor], Tensor]) -> None:
    module = fx.symbolic_trace(Doubled(joined).eval()).to("meta")
    annotate(module, [(3, 8, 8)], torch.device("meta"))
    [conv] = [node for node in module.graph.nodes if node.name == "conv"]
    assert conv.meta["rows"] == 2


def test_values_that_are_computed_for_their_shapes_are_not_kept() -> None:
    """They would take as much memory as all activations."""
    made: list[weakref.ref[Tensor]] = []
    alive = []

    def doubled(x: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        made.append(weakref.ref(value := 2 * x))
        return value

    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(5):
        node = graph.call_function(doubled, (node,))
    graph.output(node)
    node.meta[PATH] = "last"
    found = values_at(fx.GraphModule({}, graph), [(3,)], torch.device("cpu"), ["last"])
    assert found == {"last": ([1, 3], torch.float32)}
    assert alive == [0, 1, 1, 1, 1]


class Mixed(nn.Module):
    """Convolutions, a composite operator, products and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.depthwise(self.stem(x)).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        fused = nn.functional.scaled_dot_product_attention(tokens, mixed, tokens)
        return torch.einsum("nlc,nmc->nlm", fused, mixed)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_they_are_torchs(device: str, mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    model, x = Mixed().eval().to(device), torch.rand(2, 3, 32, 32, device=device)
    with mode():
        with FlopCounterMode(display=False) as expected:
            model(x)
        with FlopCounter() as found:
            model(x)
    assert found.total == expected.get_total_flops() > 0


def test_modules_of_other_threads_are_not_hooked() -> None:
    with FlopCounter():
        assert not module._global_forward_hooks
        assert not module._global_forward_pre_hooks


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16"])
def test_a_graph_has_as_many_for_its_shapes_alone(name: str) -> None:
    """Those of its nodes, whether they are run for their FLOPs or for their shapes, in inference mode."""
    graph, dtype = model_graph(name), get_model(name).dtype
    shapes = [(3, 224, 224)]
    each = count_flops(graph._module, shapes, graph.device, dtype)
    with FlopCounter() as counter:
        values_at(graph._module, shapes, graph.device, graph.by_name, dtype)
    assert counter.total == sum(each.values()) > 10**9
