"""What freed modules leave behind is given back."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import fx

from fxcore import memory


def generated() -> list[str]:
    return [name for name in linecache.cache if name.startswith("<eval_with_key>")]


def test_sources_of_generated_modules_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SOURCES", 3)
    module = fx.symbolic_trace(torch.nn.ReLU())
    for _ in range(50):
        module.recompile()
    assert len(generated()) >= 50
    memory.give_back()
    latest = generated()
    assert len(latest) == 3
    # A traceback through the latest still shows its source.
    assert linecache.getline(latest[-1], 1) or linecache.getline(latest[-1], 2)
    assert module.forward.__code__.co_filename == latest[-1]
    assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_memory_is_released_where_torch_fx_keeps_no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.fx.graph_module._loader")
    memory.give_back()
