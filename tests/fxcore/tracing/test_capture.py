"""Capture: leaf modules and functions, concrete arguments, and failures that explain themselves."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models import resnet18

from fxcore import trace
from fxcore.errors import NotTraceable
from fxcore.tracing.leaves import NotAFunction
from fxcore.tracing.names import names, untraceable_modules
from fxcore.tracing.trace_arguments import UnknownArgument


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class While(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.sum() > 0:
            x = x - 1
        return x


class Either(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2) * x if x.sum() > 0 else x


class Truth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * bool(x.sum())


class Length(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(x)


class Number(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.shape[0])


class Count(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = x + 1
        return x


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for row in x:
            x = x + row
        return x


class Zeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros(x.shape[0], 4)


class Write(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data = x * 2
        return x


class Keep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen[:2]
        seen += x.mean()
        return x * self.seen


class Table(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * {32: 2}.get(x.shape[-1], 1)


class Options(nn.Module):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return F.relu(x, **kwargs)


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * np.sqrt(x)


def clipped(x: Tensor) -> Tensor:
    return x if x.max() < 1 else x / x.max()


_alias = clipped


def helper(x: Tensor) -> Tensor:
    return _alias(x) + 1


class Clip(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return clipped(x) + helper(x)


FAILURES = [
    (Gate, "control_flow", "if x.sum() > 0:", "concrete_args"),
    (Either, "control_flow", "return math.sqrt(2) * x if x.sum() > 0 else x", "concrete_args"),
    (While, "loop", "while x.sum() > 0:", "iterations"),
    (Truth, "bool", "return x * bool(x.sum())", "torch.where"),
    (Length, "len", "return x * len(x)", ".shape[0]"),
    (Number, "number", "return x * int(x.shape[0])", "conversion"),
    (Count, "range", "for _ in range(x.shape[0]):", "concrete_args"),
    (Rows, "iteration", "for row in x:", "unbind"),
    (Zeros, "constructor", "return x + torch.zeros(x.shape[0], 4)", "zeros_like"),
    (Write, "assignment", "x.data = x * 2", "new name"),
    (Keep, "write", "seen += x.mean()", "new tensor"),
    (Table, "key", "return x * {32: 2}.get(x.shape[-1], 1)", "concrete_args"),
    (Options, "kwargs", "return F.relu(x, **kwargs)", "signature"),
    (Numpy, "function", "return x * np.sqrt(x)", "leaf_functions=(np.sqrt,)"),
]


@pytest.mark.parametrize(("kind", "expected", "line", "advice"), FAILURES, ids=[f[0].__name__ for f in FAILURES])
def test_failures_say_where_and_what_to_do(kind: type[nn.Module], expected: str, line: str, advice: str) -> None:
    if kind is Options:
        model: nn.Module = Options()
        path = "Options"
    else:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(kind()))
        path = "1.0"
    with pytest.raises(NotTraceable) as caught:
        trace(model)
    extra = caught.value.extra
    assert extra["kind"] == expected
    assert extra["module"] == path
    file, number, code = extra["source"].split(":", 2)
    assert file == "test_capture.py"
    assert code.strip() == line
    assert Path(__file__).read_text().splitlines()[int(number) - 1].strip() == line
    assert advice in extra["advice"]
    assert line in caught.value.detail
    assert kind is Options or f'leaf_modules=("{path}",)' in caught.value.detail


@pytest.mark.parametrize("kind", [Gate, Length, Zeros, Keep, Numpy])
def test_auto_keeps_the_innermost_module_as_a_leaf(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(kind(), nn.ReLU()))
    graph = trace(model, leaf_modules="auto").graph
    assert list(untraceable_modules(graph)) == ["1.0"]
    assert untraceable_modules(graph)["1.0"]
    assert [n for n in names(graph) if n != "input"][-2:] == ["1.0", "1.1"]


class Loops(nn.Module):
    """Iterates over what its child returns, so that closing the child is not enough."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row * 2 for row in self.gate(x)])


def test_auto_goes_outwards_as_far_as_needed() -> None:
    graph = trace(nn.Sequential(Loops(), nn.ReLU()), leaf_modules="auto").graph
    assert list(untraceable_modules(graph)) == ["0"]


def test_auto_cannot_keep_the_whole_model_as_a_leaf() -> None:
    with pytest.raises(NotTraceable):
        trace(Gate(), leaf_modules="auto")


def test_auto_gives_what_the_model_gives() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Sequential(nn.ReLU(), Rows())).eval()
    traced = trace(model, leaf_modules="auto")
    for x in (torch.randn(2, 4), -torch.ones(2, 4)):
        assert torch.equal(traced(x), model(x))


def test_leaf_modules_by_path_pattern_and_class() -> None:
    model = resnet18().eval()
    assert "layer4.1" in names(trace(model, leaf_modules=("layer4.1",)).graph)
    by_pattern = names(trace(model, leaf_modules=("layer[34].*",)).graph)
    assert "layer3.0" in by_pattern
    assert "layer2.0.conv1" in by_pattern
    kind = type(model.layer1[0])
    by_class = names(trace(model, leaf_modules=(kind,)).graph)
    assert [n for n in by_class if n.startswith("layer1")] == ["layer1.0", "layer1.1"]
    with pytest.raises(UnknownArgument) as caught:
        trace(model, leaf_modules=("layer4.7",))
    assert "layer4.0" in caught.value.extra["suggestions"]


def test_leaf_functions_wherever_they_are_called_from() -> None:
    model = Clip().eval()
    with pytest.raises(NotTraceable):
        trace(model)
    graph = trace(model, leaf_functions=(clipped,)).graph
    calls = [n for n in graph.nodes if n.target is clipped]
    assert len(calls) == 2
    assert _alias is clipped
    assert isinstance(clipped, types.FunctionType)
    x = torch.randn(3, 4)
    assert torch.equal(fx.GraphModule(model, graph)(x), model(x))


def halved(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_torchscript_functions_and_classes_are_no_leaf_functions() -> None:
    scripted = torch.jit.script(halved)
    with pytest.raises(NotAFunction, match=r"halved is TorchScript.*leaf_modules"):
        trace(lambda x: scripted(x), leaf_functions=[scripted])
    with pytest.raises(NotAFunction):
        trace(Number(), leaf_functions=(int,))


def test_leaf_functions_are_restored_after_a_failure() -> None:
    before = clipped
    with pytest.raises(NotTraceable):
        trace(nn.Sequential(Clip(), Gate()), leaf_functions=(clipped,))
    assert globals()["clipped"] is before
    assert globals()["_alias"] is before


def test_other_threads_call_the_function_itself() -> None:
    """A thread that runs the model while it is traced gets values, not nodes."""
    inside, finished = threading.Event(), threading.Event()
    seen: list[Tensor] = []

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert finished.wait(120)
            return clipped(x)

    def infer() -> None:
        assert inside.wait(120)
        seen.append(clipped(torch.full((2,), 4.0)))
        seen.append(nn.Sequential(nn.ReLU())(torch.ones(1)))
        finished.set()

    thread = threading.Thread(target=infer)
    thread.start()
    graph = trace(Waits(), leaf_functions=(clipped,)).graph
    thread.join()
    assert torch.equal(seen[0], torch.ones(2))
    assert torch.equal(seen[1], torch.ones(1))
    assert sum(n.target is clipped for n in graph.nodes) == 1


class Choice(nn.Module):
    def forward(self, x: Tensor, negative: bool = False, times: int = 1) -> Tensor:
        if negative:
            x = -x
        for _ in range(times):
            x = x + 1
        return x


def test_concrete_arguments_specialise() -> None:
    model = Choice().eval()
    with pytest.raises(NotTraceable):
        trace(model)
    traced = trace(model, concrete_args={"negative": True, "times": 3})
    assert float(traced(torch.tensor(5.0))) == -2
    assert names(traced.graph) == ["x", "neg", "add", "add_1", "add_2"]
    with pytest.raises(UnknownArgument) as caught:
        trace(model, concrete_args={"negativ": True})
    assert caught.value.extra["suggestions"] == ["x", "negative", "times"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask, mask_2: x * mask_2,
        lambda x, mask, mask_1: x * mask_1,
        lambda x, mask_1, mask: x * mask_1 + 1,
        lambda x, mask, mask_1: x * 2,
        lambda x, mask_1, mask: x * 2,
    ],
)
@pytest.mark.parametrize("value", [None, 1.0])
def test_inputs_named_like_numbered_fixed_arguments_stay(function: Callable[..., Tensor], value: float | None) -> None:
    traced, x, other = trace(function, concrete_args={"mask": value}), torch.rand(3), torch.rand(3)
    [name] = inspect.signature(function).parameters.keys() - {"x", "mask"}
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == ["x", name]
    assert torch.equal(traced(x, other), function(x=x, mask=value, **{name: other}))


def test_leaf_functions_that_no_module_has_a_name_for() -> None:
    """In variables around the model's source, at any depth; in attributes; and in globals of code that was executed."""

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def outer(x: Tensor) -> Tensor:
        return doubled(x) + 1

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.run = doubled

        def forward(self, x: Tensor) -> Tensor:
            return self.run(doubled(x)) + outer(x)

    before, model = doubled, Inside().eval()
    graph = trace(model, leaf_functions=(doubled,)).graph
    assert sum(n.target is before for n in graph.nodes) == 3
    assert doubled is before is model.run
    assert torch.equal(fx.GraphModule(model, graph)(torch.ones(2)), torch.full((2,), 7.0))
    space: dict[str, Any] = {"nn": nn, "__name__": "executed"}
    exec(
        "def halved(x):\n    return x / 2\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return halved(x)\n",
        space,
    )
    assert names(trace(space["Net"](), leaf_functions=(space["halved"],)).graph) == ["x", "halved"]
    with pytest.raises(NotAFunction, match="no variable that refers to it"):
        trace(model, leaf_functions=(lambda x: x,))


class OneLine(nn.Module):
    """Its code contains what ends a clause in messages."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0: x = -x; x = x + 1  # fmt: skip  # noqa: E701, E702
        return x


def test_the_reason_of_a_part_kept_whole_has_all_of_its_line() -> None:
    model = nn.Sequential(nn.ReLU(), OneLine())
    reason = untraceable_modules(trace(model, leaf_modules="auto").graph)["1"]
    assert "if x.sum() > 0: x = -x; x = x + 1" in reason
    with pytest.raises(NotTraceable) as caught:
        trace(model)
    error = caught.value
    assert error.detail == f"{error.problem}; {error.extra['advice']}"
    assert "problem" not in error.extra
    assert reason == error.problem
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is NotTraceable
        assert (again.detail, again.problem, again.extra) == (error.detail, error.problem, error.extra)
