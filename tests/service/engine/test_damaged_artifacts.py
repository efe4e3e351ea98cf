"""Compiled models that were kept, load, and are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.engine.running import MakeEngine, built, spec

pytestmark = pytest.mark.anyio
pytest.importorskip("openvino")


@pytest.mark.exhaustive
async def test_one_that_loads_and_is_wrong_is_made_again(engine: MakeEngine, tmp_path: Path) -> None:
    async with engine(cache_dir=tmp_path) as running:
        await built(running, "squeezenet1_1", ["features.3"], backend="openvino")
    [weights] = tmp_path.glob("openvino-*/model.bin")
    right = weights.read_bytes()
    weights.write_bytes(bytes(byte ^ 0x80 for byte in right[:4096]) + right[4096:])
    async with engine(cache_dir=tmp_path) as running:
        record = await built(running, "squeezenet1_1", ["features.3"], backend="openvino")
        assert record.checks["max_rel_error"] < 1e-4
    assert weights.read_bytes() == right
    async with engine(cache_dir=tmp_path) as running:  # no artifact is dropped but a wrong one
        made = weights.stat().st_mtime_ns
        await running.extractors.get(spec("squeezenet1_1", ["features.3"], backend="openvino"), 60)
        assert weights.stat().st_mtime_ns == made
