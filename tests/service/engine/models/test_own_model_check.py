"""Own models are run when the service starts. Values are compared with the module, each image alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxcore.analysis.agreement import GraphDiffers
from fxcore.errors import UnknownNode
from fxcore.extractor import build_extractor
from fxcore.graph.model_graph import trace_graph
from fxcore.models.user_models import BadUserModel, UserEntry, UserModel, user_entry
from fxcore.models.weights import load_model
from service.engine.models.own_model_check import checked
from service.engine.models.own_models import _tried


class Net(nn.Module):
    def __init__(self, unseen: Callable[[Tensor], Tensor], last: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.unseen, self.last = nn.Conv2d(3, 8, 8, 8), unseen, last or nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unseen(self.conv(x).relu_().mean(2)))


def time_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1).flatten(0, 1)


def attention_across(x: Tensor) -> Tensor:
    turned = x.permute(1, 0, 2)
    return nn.functional.scaled_dot_product_attention(turned, turned, turned).permute(1, 2, 0)


def entry_of(build: Callable[[], nn.Module], **described: Any) -> UserEntry:
    return user_entry("net", UserModel(build, preprocessing={"resize_size": 64, "crop_size": 64}, **described))


def run_check(entry: UserEntry) -> UserEntry:
    return checked(entry, trace_graph(entry, "builder"))


def test_rows_in_which_images_are_mixed_are_not_offered() -> None:
    class Recogniser(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(8, -1, 5).permute(1, 0, 2)

    entry = run_check(entry_of(lambda: Recogniser(time_first)))
    graph = trace_graph(entry, "builder")
    assert entry.apart == {"flatten", "last"}
    with pytest.raises(UnknownNode, match=r"'last' has rows that cannot be assigned to one image each"):
        graph.resolve(["last"])
    model, images = load_model(entry, "builder"), torch.randn(3, 3, 64, 64)
    made = build_extractor(graph, model, graph.resolve({"permute_1": "out"})).module(images)["out"]
    torch.testing.assert_close(made, torch.cat([model(x[None]) for x in images]))


def test_rows_that_are_mixed_from_the_third_on_are_not_offered() -> None:
    entry = run_check(entry_of(lambda: Net(lambda x: torch.cat([x[:2], x[2:].flip(0)]), nn.Flatten())))
    assert {"cat", "last"} < entry.apart


@pytest.mark.parametrize(
    ("unseen", "last", "node"),
    [
        (lambda x: (x - x.mean(0)).mT, None, "sub"),
        (lambda x: x.softmax(0).mT, None, "softmax"),
        (attention_across, nn.Flatten(), "scaled_dot_product_attention"),
        (lambda x: x, nn.BatchNorm1d(8, track_running_stats=False), "last"),
        (lambda x: (x + x[2:3].sum()).mT, None, "getitem"),
    ],
)
def test_values_that_depend_on_the_batch_are_refused_or_computed_one_by_one(
    unseen: Callable[[Tensor], Tensor], last: nn.Module | None, node: str
) -> None:
    with pytest.raises(BadUserModel, match=rf"first in {node}; set batch = false"):
        run_check(entry_of(lambda: Net(unseen, last)))
    assert not run_check(entry_of(lambda: Net(unseen, last), batch=False)).apart


class Counting(nn.Module):
    """Adds the number of its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.flatten(1) + 0.01 * self.calls


class Smoothed(nn.Module):
    """Averages with the values of its last call, so that only other images change what it computes."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x
        return x.flatten(1) if last is None else (x.flatten(1) + last.flatten(1)) / 2


@pytest.mark.parametrize(("last", "batch"), [(Counting, True), (Counting, False), (Smoothed, True)])
def test_state_between_calls_is_refused(last: type[nn.Module], batch: bool) -> None:
    with pytest.raises(BadUserModel, match="last computes another value from the same image when it is called again"):
        run_check(entry_of(lambda: Net(lambda x: x, last()), leaf_modules=["last"], batch=batch))


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore::DeprecationWarning")
def test_torchscript_that_overwrites_its_input_is_served() -> None:
    entry = entry_of(lambda: Net(lambda x: x.mT, nn.Sequential(torch.jit.script(nn.ReLU(inplace=True)))))
    assert run_check(entry) == entry


def test_a_graph_that_differs_is_refused() -> None:
    typed = entry_of(lambda: Net(lambda x: x.mT * 2 if isinstance(x, Tensor) else x.mT))
    with pytest.raises(GraphDiffers, match="first in last"):
        run_check(typed)
    with pytest.raises(GraphDiffers, match="first in last"):
        run_check(dataclasses.replace(typed, batch=False))


def with_noise(x: Tensor) -> Tensor:
    return (x + torch.randn(x.shape)).mT


@pytest.mark.parametrize("draw", [lambda x: nn.functional.dropout(x, training=True).mT, with_noise])
def test_a_model_that_draws_random_numbers_is_served(draw: Callable[[Tensor], Tensor]) -> None:
    entry = entry_of(lambda: Net(draw), leaf_functions=[with_noise])
    assert run_check(entry) == entry


def test_a_model_whose_weights_are_not_loaded_is_refused() -> None:
    """The builder's only module is made while models are built without weights."""
    build = functools.cache(lambda: Net(lambda x: x.mT))
    with pytest.raises(BadUserModel, match=r"tensors that have no values \(device meta\).*a new module at each call"):
        run_check(entry_of(build))


@dataclasses.dataclass
class Output:
    hidden: Tensor
    pooled: Tensor


@pytest.mark.parametrize("wrong", [False, True])
def test_returned_dataclasses_are_compared(wrong: bool) -> None:
    class Returning(Net):
        def forward(self, x: Tensor) -> Output:  # type: ignore[override]
            hidden = self.conv(x)
            return Output(hidden, hidden.mean((2, 3)) * (2 if wrong and isinstance(x, Tensor) else 1))

    entry = entry_of(lambda: Returning(lambda x: x))
    if not wrong:
        assert run_check(entry) == entry
        return
    with pytest.raises(GraphDiffers, match="computes other values than the module"):
        run_check(entry)


def test_a_model_that_ends_the_process_is_refused() -> None:
    class Ending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(3)

    found = _tried("ending", entry_of(lambda: Net(lambda x: x.mT, Ending()), leaf_modules=["last"]))
    assert isinstance(found, BadUserModel)
    assert found.detail == "model 'ending': SystemExit: 3"


class KeepsDropping(Net):
    def train(self, mode: bool = True) -> KeepsDropping:
        super().train(mode)
        self.last.train()
        return self


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Net(nn.functional.dropout), "model 'net' draws random numbers in eval mode, first in dropout"),
        (lambda: KeepsDropping(torch.relu, nn.Dropout()), "eval() leaves last in train mode"),
        (lambda: Net(torch.relu, nn.Dropout()), ""),
    ],
)
def test_dropout_that_stays_on_is_logged(
    build: Callable[[], nn.Module], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_check(entry_of(build))
    assert len(caplog.records) == bool(says)
    assert says in caplog.text


def test_what_cannot_run_on_the_cpu_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                raise RuntimeError("no kernel for this device")
            return x

    entry = entry_of(lambda: Net(lambda x: x.mT, Elsewhere()), leaf_modules=["last"])
    assert run_check(entry) == entry
    assert "no kernel for this device" in caplog.text
