"""How many compiled extractors there may be."""

from __future__ import annotations

import pytest

from service.engine.placement import CompiledLimits, compiled_limits


@pytest.mark.parametrize(("threads", "usual", "most"), [(None, 16, 128), (200, 16, 25), (40, 5, 5), (1, 1, 1)])
def test_compiled_extractors_are_limited_by_the_threads_of_the_process(
    threads: int | None, usual: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.engine.placement.available_threads", lambda: threads)
    assert compiled_limits(compute_threads=2) == CompiledLimits(usual, most)
    assert compiled_limits(compute_threads=1) == CompiledLimits(256, 256)
