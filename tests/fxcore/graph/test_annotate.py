"""Which rows of a value belong to an image."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from fxcore.graph.annotate import annotate, values_at
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
    ("joined", "rows"),
    [
        # All images, then all again: no rows of one image.
        (lambda x: torch.cat([x, x.flip(-1)]), 0),
        (lambda x: torch.cat((x, x), dim=0), 0),
        (lambda x: x.repeat(2, 1, 1, 1), 0),
        (lambda x: torch.stack([x, x.flip(-1)]).flatten(0, 1), 0),
        (lambda x: x.unsqueeze(0).expand(2, -1, -1, -1, -1).reshape(-1, 3, 8, 8), 0),
        (lambda x: x[:, None].transpose(0, 1).expand(2, -1, -1, -1, -1).contiguous().view(-1, 3, 8, 8), 0),
        (nn.Sequential(Stacked(), nn.Flatten(0, 1)), 0),
        # Each image beside itself.
        (lambda x: torch.cat([x[:, None], x[:, None]], dim=1).flatten(0, 1), 2),
        (lambda x: x.repeat_interleave(2, 0), 2),
        (lambda x: torch.stack([x, x], 1).reshape(-1, 3, 8, 8), 2),
        (lambda x: torch.cat([x, x], 1)[None].view(-1, 3, 8, 8), 2),
        (lambda x: torch.cat([x, x], dim=-1).unflatten(-1, (2, 8)).movedim(3, 1).flatten(0, 1).repeat(1, 1, 1, 1), 2),
    ],
)
def test_rows_of_an_image_that_stands_twice(joined: Callable[[Tensor], Tensor], rows: int) -> None:
    module = fx.symbolic_trace(Doubled(joined).eval()).to("meta")
    annotate(module, [(3, 8, 8)], torch.device("meta"))
    found = {node.name: node.meta.get("rows") for node in module.graph.nodes}
    assert (found["x"], found["conv"], found["mean"]) == (1, rows, 1)


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


class Unlike(nn.Module):
    """Norms of inputs in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm2d(3)
        self.layer = nn.LayerNorm((3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.batch(x.contiguous(memory_format=torch.channels_last)).transpose(1, 2))


def test_norms_have_the_values_of_torch() -> None:
    model, values = Unlike().eval(), dict[str, Tensor]()
    for name, part in model.named_children():
        part.register_forward_hook(lambda _m, _i, out, name=name: values.update({name: out}))
    model(torch.zeros(1, 3, 8, 8))
    module = fx.symbolic_trace(Unlike().eval()).to("meta")
    annotate(module, [(3, 8, 8)], torch.device("meta"))
    for name, value in values.items():
        [node] = module.graph.find_nodes(op="call_module", target=name)
        found = node.meta["value"]
        assert (found.shape, found.stride(), found.dtype) == (value.shape, value.stride(), value.dtype), name


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.LayerNorm(4)])
def test_norms_of_other_sizes_fail_as_they_do_when_they_run(norm: nn.Module) -> None:
    module = fx.symbolic_trace(nn.Sequential(norm).eval())
    with pytest.raises(RuntimeError):
        module(torch.zeros(1, 3, 8, 8))
    with pytest.raises(RuntimeError):
        annotate(module.to("meta"), [(3, 8, 8)], torch.device("meta"))
