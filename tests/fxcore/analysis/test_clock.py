"""The clock of measurements; on GPUs it leaves the other streams alone, in which another thread may capture a graph."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from fxcore import trace
from fxcore.analysis import clock, profile, verify


def test_it_waits_for_the_current_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, whole = Mock(), Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", whole)
    device = torch.device("cuda", 1)
    assert clock.now(device) <= clock.now(torch.device("cpu"))
    stream.assert_called_once_with(device)
    stream(device).synchronize.assert_called_once_with()
    whole.assert_not_called()


def test_all_measurements_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once a reading, whatever runs."""
    ticks = iter(range(1000))
    for module in (profile, verify):
        monkeypatch.setattr(module, "now", lambda device: float(next(ticks)))
    traced = trace(lambda x: x + 1)
    found = profile.profile(traced, torch.ones(2), runs=2)
    assert [n.milliseconds for n in found.nodes] == [1000, 1000]
    assert found.milliseconds == 1000
    assert verify.verify(traced, traced, (torch.ones(2),), runs=3).speedup == 1
