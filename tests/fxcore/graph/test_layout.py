"""Layouts: which axis of a value is what."""

from __future__ import annotations

from torch import nn

from fxcore import model_graph
from tests.fxcore.conftest import OwnEntry


def test_a_batch_norm_of_rows_has_their_layout(own_entry: OwnEntry) -> None:
    entry = own_entry(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.BatchNorm1d(8)))
    info = {node.name: node for node in model_graph(entry).nodes}["2"]
    assert (info.layout, info.channels, info.shape) == ("NC", 8, [None, 8])
