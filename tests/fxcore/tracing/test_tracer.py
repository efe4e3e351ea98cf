"""Tracing: torchvision's names, explained failures, and no other thread disturbed."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision import ops
from torchvision.models.feature_extraction import NodePathTracer, get_graph_node_names

import fxcore
from fxcore import build_extractor, get_model, load_model, model_graph, trace
from fxcore.errors import NotTraceable
from fxcore.graph.model_graph import ModelGraph, trace_graph
from fxcore.passes.out_of_place import out_of_place
from fxcore.tracing.names import names
from fxcore.tracing.node_tracer import Tracer
from tests.fxcore.conftest import OwnEntry


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv1(x)))
        y = torch.relu(self.norm(self.conv1(y)))
        return (x + y).flatten(1).reshape(x.shape) * self.scale


class Odd(nn.Module):
    """Repeated calls, names that end in numbers, functions and methods of one name, a call of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a_1 = Block()
        self.a = Block()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a_1(self.a(self.a_1(x)))
        for block in self.blocks:
            x = block(x) + 1
        if self.training:
            x = x.relu()
        return self.drop(x).add(1).add(2)


def test_annotations_that_are_strings_are_left_out() -> None:
    """As are all of this file, which torch 2.11 cannot write as code."""
    assert not [node for node in Tracer().trace(Odd()).nodes if isinstance(node.type, str)]


@pytest.mark.parametrize("training", [False, True])
def test_names_are_torchvisions(training: bool) -> None:
    model = Odd()
    found = names(trace(model, training=training).graph)
    train, evaluation = get_graph_node_names(model, suppress_diff_warning=True)
    assert found == (train if training else evaluation)
    assert train != evaluation


class _Call:
    """As much of a node as its name depends on."""

    def __init__(self, name: str, op: str) -> None:
        self.name, self.op = name, op

    def __str__(self) -> str:
        return self.name


def test_any_names_are_torchvisions() -> None:
    """Paths and names that end in numbers, one after another, in any order."""
    draw = random.Random(0)
    for _ in range(100):
        ours, theirs = Tracer(), NodePathTracer()
        for _ in range(40):
            path = draw.choice(["", "l", "l.0", "l_1", "l_1_2", "x_1"])
            op = draw.choice(["call_module", "call_function"]) if path else "call_function"
            node: Any = _Call(draw.choice(["add", "add_1", "add_1_2", "x", "x_12", "_0", "relu_"]), op)
            theirs.node_to_qualname[node] = theirs._get_node_qualname(path, node)
            assert ours._get_node_qualname(path, node) == theirs.node_to_qualname[node]


def test_a_shared_layer_that_torchvision_cannot_name() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(nn.ReLU(), layer, layer, layer)
    with pytest.raises(ValueError, match="invalid literal"):
        get_graph_node_names(model)
    assert names(trace(model).graph) == ["input", "0", "1", "1_1", "1_2"]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_a_failed_trace_leaves_torch_as_it_was() -> None:
    call, attribute = nn.Module.__call__, nn.Module.__getattr__
    with pytest.raises(NotTraceable):
        trace(Branches())
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is attribute
    assert names(trace(Block()).graph)


def test_lazy_modules_are_initialized_first() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()).eval()
    with pytest.raises(NotTraceable, match=r"0\.weight of Sequential has no shape yet") as caught:
        trace(model)
    assert (caught.value.extra["module"], caught.value.extra["kind"]) == ("0", "lazy")
    x = torch.randn(1, 3, 8, 8)
    expected = model(x)
    assert torch.equal(trace(model)(x), expected)


@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "raft_small"])
def test_the_models_that_cannot_be_traced_say_why(name: str) -> None:
    """HAZARDS 12: detectors loop over images, and RAFT branches on shapes."""
    model = get_model(name).build_weightless()
    with pytest.raises(NotTraceable) as caught:
        trace(model)
    assert caught.value.extra["source"].startswith("torchvision/")
    assert "/" not in caught.value.detail.split("torchvision/")[0]
    closed = {part.path: part.reason for part in model_graph(name).untraceable}
    assert closed
    assert all(len(reason) > 20 for reason in closed.values())


class Waiting(nn.Module):
    """Stops in the midst of its trace until something else has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.inside.set()
        self.go_on.wait(60)
        return self.norm(x) + 1


def test_other_threads_in_the_midst_of_a_trace() -> None:
    """HAZARDS 6: what torch.fx replaces while it traces, it replaces for the whole process."""
    model, x = load_model(get_model("convnext_tiny"), "random"), torch.randn(1, 3, 64, 64)
    graph = model_graph("convnext_tiny")
    extractor = build_extractor(graph, model, graph.resolve(["C3"])).module
    compiled = torch.compile(lambda t: t.relu() + 1, backend="eager")
    with torch.no_grad():
        expected, c3 = model(x), extractor(x)["C3"]
        compiled(x)
    waiting = Waiting().eval()
    graphs: list[fx.Graph] = []
    thread = threading.Thread(target=lambda: graphs.append(trace(waiting).graph))
    thread.start()
    try:
        assert waiting.inside.wait(60)
        with torch.no_grad():
            assert torch.equal(model(x), expected)
            assert torch.equal(extractor(x)["C3"], c3)
            if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):  # torch 2.11's is one for all threads
                assert torch.equal(compiled(x), x.relu() + 1)
            # Even of the model that is being traced; int8 models are, while they serve.
            assert isinstance(waiting.norm.weight, nn.Parameter)
            assert torch.equal(waiting.norm(x), F.batch_norm(x, torch.zeros(3), torch.ones(3)))
        assert isinstance(model.features[1][0].block[1], ops.Permute)  # a class, as ever
        assert isinstance(ops.Permute([0, 1]), ops.Permute)
        assert ops.box_area(torch.tensor([[0.0, 0.0, 2.0, 3.0]])).item() == 6
        assert next(nn.Linear(2, 2).parameters()).shape == (2, 2)
        entry = get_model("quantized_mobilenet_v2")
        assert len(list(entry.build_weightless().modules())) == len(list(entry.build().modules()))
    finally:
        waiting.go_on.set()
        thread.join()
    assert names(graphs[0]) == ["x", "norm", "add"]


def test_one_trace_at_a_time() -> None:
    """Two at once would put each other's replacements back (pytorch#187589)."""
    call, attribute = nn.Module.__call__, nn.Module.__getattr__
    waiting, block = Waiting().eval(), Block().eval()
    expected = names(trace(block).graph)
    graphs: dict[str, fx.Graph] = {}
    first = threading.Thread(target=lambda: graphs.update(waiting=trace(waiting).graph))
    second = threading.Thread(target=lambda: graphs.update(block=trace(block).graph))
    first.start()
    try:
        assert waiting.inside.wait(60)
        second.start()
        second.join(0.5)
        assert graphs == {}
    finally:
        waiting.go_on.set()
        first.join()
    second.join()
    assert names(graphs["waiting"]) == ["x", "norm", "add"]
    assert names(graphs["block"]) == expected
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is attribute


def test_a_graph_is_traced_once_for_all_who_ask(own_entry: OwnEntry) -> None:
    built = []

    def build() -> nn.Module:
        built.append(1)
        return Block()

    entry = own_entry(build)
    graphs: list[ModelGraph] = []
    threads = [threading.Thread(target=lambda: graphs.append(model_graph(entry))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(graphs) == 8
    assert len({id(graph) for graph in graphs}) == 1
    assert len(built) == 1


class Affine(nn.Module):
    def __init__(self, factor: float, reverse: bool = False) -> None:
        super().__init__()
        self.factor, self.reverse = factor, reverse

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.factor
        return y - x if self.reverse else x - y


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (Affine(2), Affine(2), True),
        (Affine(2), Affine(3), False),
        (Affine(2), Affine(2, reverse=True), False),
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), False),
        (Affine(2), nn.Sequential(Affine(2)), False),
        (nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=2, dilation=2), False),
    ],
)
def test_the_fingerprint_tells_names_arguments_and_settings_apart(
    own_entry: OwnEntry, one: nn.Module, other: nn.Module, equal: bool
) -> None:
    """Offline runs go on if fingerprints are equal, with files of both models."""
    first, second = (trace_graph(own_entry(lambda part=part: nn.Sequential(nn.ReLU(), part))) for part in (one, other))
    assert [n.shape for n in first.nodes] == [n.shape for n in second.nodes]
    assert (first.fingerprint == second.fingerprint) is equal


def test_a_part_called_self_does_not_hide_the_module() -> None:
    """As in the attention of BERT, traced alone."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self, self.output = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.output(self.self(x)) + x
            return out

    model, x = Attention().eval(), torch.rand(2, 4)
    module = trace(model)
    assert torch.equal(module(x), model(x))
    assert torch.equal(out_of_place(module)(x), model(x))
    assert names(module.graph) == ["x", "self", "output", "add"]


class Embedding(nn.Module):
    """Cuts its tables to the length of its input, as in the text models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(50, 8), nn.Embedding(64, 8)
        self.register_buffer("places", torch.arange(64)[None], persistent=False)
        self.register_buffer("table", torch.rand(1, 64, 8))

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places[:, : ids.shape[1]]
        total: Tensor = self.word(ids) + self.position(places) + self.table[:, : ids.size(1)]
        return total


def test_buffers_are_cut_to_the_size_of_an_input() -> None:
    model = nn.Sequential(Embedding(), nn.LayerNorm(8)).eval()
    module = trace(model)
    for length in (5, 9):
        ids = torch.randint(50, (3, length))
        assert torch.equal(module(ids), model(ids))
    parts = fxcore.create_extractor(model, ["0.word", "1"], torch.randint(50, (2, 5)))
    assert torch.equal(parts(ids)["0.word"], model[0].word(ids))
    assert torch.equal(parts(ids)["1"], model(ids))
    assert not trace(nn.Sequential(nn.BatchNorm2d(3), Scaled())).graph.find_nodes(op="get_attr")  # torchvision's names


class Counting(nn.Module):
    """Cuts a table to the length of its input, and counts its calls in a buffer."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("table", torch.rand(1, 64))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.table[:, : x.shape[1]]
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return y + self.calls


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_are_cut_and_written_to_are_refused(in_place: bool) -> None:
    model = Counting(in_place).eval()
    with pytest.raises(NotTraceable):
        trace(model)
    assert model(torch.zeros(2, 4)).shape == (2, 4)
    assert torch.equal(model.calls, torch.ones(1))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(self.scale[:2].sum().item())


def test_graphs_are_not_shared_with_the_tracer() -> None:
    """A graph from the cache is the same after extractors have been made of it."""
    graph = model_graph("resnet18")
    before = str(graph.graph)
    build_extractor(graph, load_model(get_model("resnet18"), "random"), graph.resolve(["layer1.0.bn1", "C5"]))
    assert str(graph.graph) == before
