"""In-place aliasing (HAZARDS 4): a node's value is what it was when the node ran, whatever overwrites it later.

The references are copies that a model keeps of its own intermediate values as it runs eagerly. The other hazards are
tested with the noun that they belong to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models.feature_extraction import create_feature_extractor

from fxcore import build_extractor, get_model, load_model, model_graph
from fxcore.graph.model_graph import trace_graph
from tests.fxcore.conftest import OwnEntry
from tests.fxcore.model_list import entry_of


@fx.wrap
def hidden_write(x: Tensor, by: float) -> Tensor:
    """What MViT does to its attention: fx does not look inside."""
    x[:, 0] += by
    return x


@fx.wrap
def hidden_write_into_second(y: Tensor, x: Tensor) -> Tensor:
    x.mul_(2)
    return y + 1


@fx.wrap
def hidden_write_without_result(x: Tensor) -> None:
    x.neg_()


def result_unused(x: Tensor) -> Tensor:
    x.mul_(3)  # pytorch#68301: without a user it would be dropped as dead code
    return x


def chain(x: Tensor) -> Tensor:
    x.add_(1).mul_(2)
    x.sub_(0.5)
    return F.relu(x, True)


def out_argument(x: Tensor) -> Tensor:
    torch.add(x, 1, out=x)
    return x


def second_argument(x: Tensor) -> Tensor:
    return x + hidden_write_into_second(torch.relu(x), x)


def no_result(x: Tensor) -> Tensor:
    hidden_write_without_result(x)
    return x


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu module": nn.ReLU(inplace=True),
    "hardtanh module": nn.Hardtanh(-0.1, 0.1, inplace=True),
    "F.relu(inplace=True)": lambda x: F.relu(x, inplace=True),
    "F.relu(x, True)": lambda x: F.relu(x, True),
    "F.relu_": F.relu_,
    "torch.relu_": torch.relu_,
    "add_": lambda x: x.add_(1),
    "clamp_": lambda x: x.clamp_(min=0, max=0.5),
    "result unused": result_unused,
    "chain": chain,
    "out argument": out_argument,
    "hidden": lambda x: hidden_write(x, 3.0),
    "hidden, second argument": second_argument,
    "hidden, no result": no_result,
}


class Model(nn.Module):
    """Two batch norms; the value of each is overwritten by what follows it."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)
        self.write = copy.deepcopy(write)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self._keep("conv", self.conv(x))
        z = self._keep("norm", self.norm(y))
        written = self.write(z)
        # Who reads the overwritten tensor afterwards sees the new value.
        return self._keep("last", self.last(written + z))

    def _keep(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(value, fx.Proxy):
            self.kept[name] = value.clone()
        return value


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", WRITES)
def test_no_value_depends_on_what_overwrites_it(kind: str, inference: bool, own_entry: OwnEntry) -> None:
    """Whether or not the graph is made in inference mode."""
    torch.manual_seed(0)
    model = Model(WRITES[kind]).eval()
    model.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    entry = own_entry(lambda: Model(WRITES[kind]))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_output = model(x)
        expected = dict(model.kept)
        assert not torch.equal(expected["norm"], model.write(expected["norm"].clone()))
        for module in model.modules():  # as load_model leaves it
            if getattr(module, "inplace", False):
                module.inplace = False
        with torch.inference_mode(inference):
            graph = trace_graph(entry)
        for nodes in (["conv", "norm", "last"], ["norm"], ["norm", graph.eval_nodes[-1]], ["last", "norm"]):
            values = build_extractor(graph, model, graph.resolve(nodes)).module(x)
            for node in nodes:
                torch.testing.assert_close(values[node], expected.get(node, expected_output), rtol=0, atol=0)
        # Every other node too gives alone what it gives in company.
        names = [n.name for n in graph.nodes if n.extractable]
        together = build_extractor(graph, model, graph.resolve(names)).module(x)
        for name in names:
            assert torch.equal(build_extractor(graph, model, graph.resolve([name])).module(x)[name], together[name]), (
                name
            )


def test_augmented_assignment(own_entry: OwnEntry) -> None:
    """`y += x` is an addition to torch.fx; eagerly it overwrites `y`, of which the value before is asked for too."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            y += x
            return y.relu_() * 2

    torch.manual_seed(0)
    model, graph = Residual().eval(), trace_graph(own_entry(Residual))
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model.norm(model.conv(x))
        values = build_extractor(graph, model, graph.resolve(["norm", "add", "relu_", "mul"])).module(x)
        assert torch.equal(values["mul"], model(x))
    assert torch.equal(values["norm"], expected)
    assert torch.equal(values["add"], expected + x)
    assert torch.equal(values["relu_"], (expected + x).relu())


def test_item_assignment_leaves_earlier_values(own_entry: OwnEntry) -> None:
    class Assigns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[:, 0] = 5.0
            return y + 1

    graph, x = trace_graph(own_entry(Assigns)), torch.randn(2, 3, 32, 32)
    values = build_extractor(graph, Assigns().eval(), graph.resolve(["mul", "add"])).module(x)
    assert torch.equal(values["mul"], x * 2)
    assert torch.equal(values["add"], Assigns()(x))


def test_resnets_batch_norms_keep_their_negative_values() -> None:
    """The in-place ReLU after `layer1.0.bn1` overwrites it where torchvision is asked for `layer1` too."""
    graph, model = model_graph("resnet18"), load_model(get_model("resnet18"), "random")
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    alone = build_extractor(graph, model, graph.resolve(["layer1.0.bn1"])).module(x)["layer1.0.bn1"]
    together = build_extractor(graph, model, graph.resolve(["layer1.0.bn1", "layer1"])).module(x)["layer1.0.bn1"]
    assert alone.min() < 0
    assert torch.equal(alone, together)


@pytest.mark.exhaustive
def test_mvits_hidden_writes_are_not_lost() -> None:
    """MViT adds its positions to the attention in a function that fx does not look into and whose result is a view.
    Hooks on the modules around it see what the model computes eagerly."""
    graph = model_graph(entry_of("mvit_v2_s"))
    model = load_model(graph.entry, "random")
    for parameter in model.blocks[0].attn.parameters():
        parameter.mul_(20)  # so that positions matter
    seen: dict[str, Tensor] = {}

    class Done(Exception):
        pass

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen["blocks.0.attn.project.0"] = output.clone()
        raise Done

    x = torch.randn(1, 3, 16, 32, 32, generator=torch.Generator().manual_seed(1))
    handle = model.blocks[0].attn.project[0].register_forward_hook(keep)
    with torch.no_grad(), pytest.raises(Done):
        model(x)
    handle.remove()
    with torch.no_grad():
        nodes = ["blocks.0.attn.matmul", "blocks.0.attn.softmax", "blocks.0.attn.project.0"]
        together = build_extractor(graph, model, graph.resolve(nodes)).module(x)
        alone = build_extractor(graph, model, graph.resolve(["blocks.0.attn.project.0"])).module(x)
    for values in (together, alone):
        assert torch.equal(values["blocks.0.attn.project.0"], seen["blocks.0.attn.project.0"])


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
