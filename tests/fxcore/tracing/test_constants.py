"""What a model makes of nothing while it is traced is a constant of its graph, and what it draws is told."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxcore import ModelEntry, check_health, model_graph, trace
from fxcore.errors import NotTraceable
from fxcore.tracing.constants import FrozenDraw, frozen
from fxcore.transforms import fuse_conv_bn

HERE = Path(__file__).name


class Noisy(nn.Module):
    def __init__(self, noise: Callable[[], Tensor] = lambda: torch.randn(4)) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise()


DRAWS: dict[str, Callable[[], Tensor]] = {
    "randn": lambda: torch.randn(4),
    "normal": lambda: torch.empty(4).normal_(),
    "uniform": lambda: torch.zeros(4).uniform_().exp(),
    "bernoulli": lambda: torch.bernoulli(torch.full((4,), 0.5)),
}
CONSTANTS: dict[str, Callable[[], Tensor]] = {
    "ones": lambda: torch.ones(4),
    "arange": lambda: torch.arange(4).float() / 4,
    "fill": lambda: torch.empty(4).fill_(2.0),
    "tensor": lambda: torch.tensor([1.0, 2.0, 3.0, 4.0]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_value_frozen_into_a_constant_warns(name: str) -> None:
    with pytest.warns(FrozenDraw, match=rf"^Noisy draws random numbers .*{name} at {HERE}:\d+: ") as told:
        module = trace(Noisy(DRAWS[name]))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert [made.random for made in frozen(module.graph).values()] == [True]
    # Which passes and copies keep, and health knows.
    (attribute,) = frozen(fuse_conv_bn(module).graph)
    found = check_health(fuse_conv_bn(module), torch.zeros(4))
    assert found.frozen == [attribute]
    assert not found.healthy


@pytest.mark.parametrize("name", CONSTANTS)
def test_other_constants_are_known_and_not_warned_of(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = trace(Noisy(CONSTANTS[name]))
    (made,) = frozen(module.graph).values()
    assert (made.function, made.random) == (name, False)
    assert made.source.startswith(f"{HERE}:")
    assert check_health(module, torch.zeros(4)).healthy
    assert torch.equal(module(torch.zeros(4)), CONSTANTS[name]())


def test_memory_that_was_never_set_is_random() -> None:
    (made,) = frozen(trace(Noisy(lambda: torch.empty(4))).graph).values()
    assert made == made._replace(function="empty", random=True)


def test_a_random_value_in_control_flow_warns() -> None:
    with pytest.warns(FrozenDraw, match=r"rand at .*torch\.rand\(1\)\.item\(\) < 2"):
        module = trace(lambda x: x if torch.rand(1).item() < 2 else -x)
    assert not frozen(module.graph)


@pytest.mark.parametrize("draw", [torch.randn_like, lambda x: x.new_empty(4).normal_(), lambda x: torch.bernoulli(x)])
def test_random_operations_in_the_graph_do_not_warn(draw: Callable[[Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = trace(lambda x: draw(x))
    assert not frozen(module.graph)
    x = torch.full((4,), 0.5)
    assert any(not torch.equal(module(x), module(x)) for _ in range(9))


def test_random_numbers_of_other_threads_do_not_warn() -> None:
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(0.001):
            torch.randn(4)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))))
    finally:
        stop.set()
        thread.join()


def test_a_catalogued_model_with_random_values_warns_too(own_entry: Any) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x + torch.randn(32))

    entry: ModelEntry = own_entry(Own)
    with pytest.warns(FrozenDraw, match=r"randn at "):
        graph = model_graph(entry)
    assert [made.function for made in frozen(graph.graph).values()] == ["randn"]


class Counting(nn.Module):
    """Keeps the number of its calls, and adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0].add_(1)
        return x + self.calls.sum()


def test_a_model_that_writes_to_its_buffers_is_refused_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Identity(), Counting()).eval()
    with pytest.raises(NotTraceable, match=r"1 \(Counting\): .*add_\(1\)` writes to 1.calls, which") as caught:
        trace(model)
    assert (caught.value.extra["kind"], caught.value.extra["module"]) == ("write", "1")
    assert torch.equal(model[1].calls, torch.zeros(2, 2))
    # Kept whole it counts on.
    for leaves in ("auto", ("1",)):
        counted = trace(model, leaf_modules=leaves)
        before = float(model[1].calls[0, 0])
        assert float(counted(torch.tensor(0.0))) == 2 * (before + 1)


def test_what_a_model_writes_in_training_is_undone() -> None:
    model = Counting().train()
    model.calls += 3
    trace(model, training=True)
    assert torch.equal(model.calls, torch.full((2, 2), 3.0))


def test_writing_to_tensors_of_its_own_making_is_no_matter() -> None:
    class Fresh(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.calls.clone().add_(1)

    assert torch.equal(trace(Fresh().eval())(torch.zeros(2, 2)), torch.ones(2, 2))
