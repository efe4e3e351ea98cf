"""What a forward stores in attributes while it is traced does not stay there."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxcore
from fxcore.tracing.tracer import record


class Cached(nn.Module):
    """Computes a table in the first call, and keeps it in ``held``."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        if not self.held:
            table = torch.zeros_like(y[:1]) + 0.5
            if isinstance(self.held, dict):
                self.held["table"] = table
            else:
                self.held.append(table)
        made: Tensor = y * (self.held["table"] if isinstance(self.held, dict) else self.held[0])
        return made


class Positions(nn.Module):
    """Computes a table for each length, in an attribute that its constructor sets or not."""

    def __init__(self) -> None:
        super().__init__()
        self.length: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.length is None or self.length != x.shape[1]:
            self.length = x.shape[1]
            self.table = torch.zeros_like(x[:1]) + 0.5
        if not hasattr(self, "scale"):
            self.scale = torch.ones_like(x[:1]) * 3
        if (x > 1e9).any():
            return x
        return x * self.table * self.scale


@pytest.mark.parametrize("held", [{}, []], ids=["dict", "list"])
def test_containers_hold_what_they_held(held: Any) -> None:
    model, other = Cached(held).eval(), Cached(type(held)()).eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = other(x)
        extractor = fxcore.create_extractor(model, ["mul"], x)
        assert not held
        torch.testing.assert_close(extractor(x)["mul"], expected)
        fxcore.trace(model)
        assert not held
        torch.testing.assert_close(model(x), expected)


class Recording(nn.Module):
    """Collects the values of its layers by hooks that its first call registers, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        self.last = Branching()
        self.hooked = False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, given, output: self.seen.append(output))
            self.hooked = True
        self.seen.clear()
        self.layers(x)
        first, second, third = self.seen
        made: Tensor = self.last(first + 2 * second + 3 * third)
        return made


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if (x > 1e9).any() else x.tanh()


def test_hooks_that_a_forward_registers_are_registered_once() -> None:
    model = Recording().eval()
    x = torch.randn(2, 4)
    with torch.no_grad():
        found = fxcore.trace(model, leaf_modules="auto")(x)
        assert not model.hooked
        torch.testing.assert_close(found, model(x))


class Doubling(nn.Module):
    """Has its layer doubled by a hook that its first call registers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.layer.register_forward_hook(lambda module, given, output: output * 2)
            self.hooked = True
        made: Tensor = self.layer(x)
        return made


def test_hooks_that_a_forward_registers_at_leaves_stay_there() -> None:
    model = Doubling().eval()
    x = torch.randn(2, 4)
    with torch.no_grad():
        found = fxcore.trace(model)(x)
        assert not model.layer._forward_hooks
        torch.testing.assert_close(found, model(x))


def test_modules_that_become_leaves_start_afresh() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Positions(), nn.Linear(4, 4)).eval()
    other = nn.Sequential(nn.Linear(4, 4), Positions(), nn.Linear(4, 4)).eval()
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    with torch.no_grad():
        extractor = fxcore.create_extractor(model, ["1", "2"], x, leaf_modules="auto")
        torch.testing.assert_close(extractor(x)["2"], other(x))
    assert model[1].length is None


def test_traces_in_both_modes_start_afresh() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Positions()).eval()
    record(model.train(), leaf_modules="auto")
    record(model.eval(), leaf_modules="auto")
    assert model[1].length is None
    assert not hasattr(model[1], "scale")


def test_traces_of_one_model_at_a_time_leave_nothing_in_it() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(Cached):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            inside.set()
            go_on.wait(10)
            return made

    model = Waiting({}).eval()
    threads = [threading.Thread(target=fxcore.trace, args=(model,)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    time.sleep(0.2)  # until the second waits for the first
    go_on.set()
    for thread in threads:
        thread.join()
    assert model.held == {}


class Final(dict[str, int]):
    """Cannot be written to, like the outputs of ``transformers``."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError

    def __delitem__(self, key: str) -> None:
        raise RuntimeError


def test_dictionaries_that_cannot_be_written_to() -> None:
    model = nn.ReLU()
    model.settings = Final(a=1)  # type: ignore[assignment]
    fxcore.trace(nn.Sequential(model))
    assert model.settings == {"a": 1}
