"""The advice of an error, and that following it helps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fxcore import create_extractor, trace
from fxcore.errors import NotTraceable


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        padded: Tensor = pad_packed_sequence(packed, batch_first=True)[0]
        return padded


def refused(module: nn.Module, kind: str) -> str:
    with pytest.raises(NotTraceable) as caught:
        trace(module)
    assert caught.value.extra["kind"] == kind
    return str(caught.value.extra["advice"])


def test_functions_of_torch_that_need_values_are_kept_whole() -> None:
    module, x, lengths = Packed().eval(), torch.rand(2, 3, 4), torch.tensor([3, 2])
    assert "leaf_functions=(pack_padded_sequence,)" in refused(module, "function")
    kept: list[Any] = [pack_padded_sequence, pad_packed_sequence]
    extractor = create_extractor(module, ["getitem_2"], (x, lengths), leaf_functions=kept)
    assert torch.equal(extractor(x, lengths)["getitem_2"], module(x, lengths))


class _Lazy:
    """As global settings that are not configured yet."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("not configured")


LAZY = _Lazy()


def positive(x: Tensor) -> Tensor:
    positive = x.sum() > 0  # as the function itself is called
    return x if positive else -x


class Flips(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return positive(x)


class Listed(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return list(x)


def test_variables_of_the_models_code_do_not_disturb_the_advice() -> None:
    assert "leaf_functions=(positive,)" in refused(Flips(), "control_flow")
    refused(Listed(), "iteration")


class Masked(nn.Module):
    def __init__(self, advised: bool) -> None:
        super().__init__()
        self.weight, self.advised = nn.Parameter(torch.ones(4)), advised

    def forward(self, x: Tensor) -> Tensor:
        limits = torch.finfo(next(self.parameters()).dtype) if self.advised else torch.finfo(x.dtype)
        return (x * self.weight - 1) * limits.max


def test_limits_of_a_dtype_are_those_of_a_parameter() -> None:
    assert "torch.finfo(next(self.parameters()).dtype)" in refused(Masked(advised=False), "number")
    x = torch.rand(2, 4)
    assert torch.equal(trace(Masked(advised=True))(x), Masked(advised=False)(x))


class Hooked(nn.Module):
    """As DPT does: the hook of a layer stores its value, which is read afterwards."""

    def __init__(self, stored: str) -> None:
        super().__init__()
        self.stem, self.late = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)
        self.stored = stored
        self.by_name: dict[str, Tensor] = {}
        self.listed: list[Tensor] = []
        self.alone: Any = None
        self.stem.register_forward_hook(self._store)

    def _store(self, module: nn.Module, given: Any, output: Tensor) -> None:
        self.by_name["stem"] = self.alone = output
        self.listed.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.late(self.stem(x))
        if self.stored == "by name":
            return self.by_name["stem"] * 2
        if self.stored == "listed":
            return self.listed[-1] * 2
        doubled: Tensor = self.alone.mul(2) if self.stored == "method" else self.alone * 2
        return doubled


@pytest.mark.parametrize("stored", ["by name", "listed", "method", "operator"])
def test_values_that_hooks_of_layers_store_are_nodes(stored: str) -> None:
    module, x = Hooked(stored).eval(), torch.rand(2, 3, 4, 4)
    assert "choose the node stem" in refused(module, "hook")
    assert torch.equal(2 * trace(module.stem)(x), module(x))


def test_what_is_missing_without_hooks_is_no_hooks_fault() -> None:
    module = Hooked("by name").eval()
    module.stem._forward_hooks.clear()
    refused(module, "other")


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.mix(x)


class HalfOperation(Half):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.mT


class Full(Half):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.mix(x.float())


@pytest.mark.parametrize("part", [Half(), HalfOperation()])
def test_autocast_that_a_model_turns_on_is_refused(part: nn.Module) -> None:
    model, x = nn.Sequential(part, nn.Tanh()).eval(), torch.randn(3, 4)
    with pytest.raises(NotTraceable, match=r"in 0 \(Half.*runs under an autocast that the model turns on") as caught:
        trace(model)
    assert (caught.value.extra["kind"], caught.value.extra["module"]) == ("context", "0")
    for leaves in ("auto", ("0",)):  # as the error advises
        assert torch.equal(trace(model, leaf_modules=leaves)(x), model(x))


def test_autocast_around_the_trace_is_no_matter() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Full(), nn.Tanh()).eval(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        extractor = create_extractor(model, ["0", "2"], x, leaf_modules=["1"])
        assert extractor(x)["0"].dtype is torch.bfloat16
    assert torch.equal(extractor(x)["2"], model(x))
