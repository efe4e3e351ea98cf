"""What is kept of the sizes of rows is bounded in bytes, and counts as memory of the extractor."""

from __future__ import annotations

import pytest
import torch

from service.engine import FeatureOptions
from service.engine.requests.plan.sizes import row_size, sizes
from service.engine.runtime.runtime import SIZES_BYTES
from tests.service.engine.running import MakeEngine, built

pytestmark = pytest.mark.anyio


@pytest.mark.exhaustive
async def test_sizes_are_kept_up_to_so_many_bytes(engine: MakeEngine) -> None:
    """Requests choose shapes, and subsets of the outputs, of which there are more than memory holds."""
    nodes = [f"features.{number}" for number in range(13)]
    async with engine() as running:
        record = await built(running, "squeezenet1_1", nodes)
        before = running.runtimes.eviction.bytes()
        for side in range(64, 164):
            row_size(record.runtime, ((3, side, side),))
        shape = ((3, 64, 64),)
        for number in range(1, 300):
            keys = frozenset(key for bit, key in enumerate(nodes) if number >> bit & 1)
            sizes(record.runtime, [shape], FeatureOptions(keys=keys), 10**9)
        kept = record.runtime.row_sizes.bytes + record.runtime.response_sizes.bytes
        assert SIZES_BYTES < kept <= 2 * SIZES_BYTES
        assert running.runtimes.eviction.bytes() - before == kept
        # What was dropped is found again.
        values = {"x": torch.zeros(1, 3, 64, 64)}
        assert (await running.features(record, values, FeatureOptions(keys=frozenset(nodes[:1])))).images == 1
        running.runtimes.unload(record)
        again = await running.runtimes.load(record)
        assert again.row_sizes.bytes == again.response_sizes.bytes == 0
