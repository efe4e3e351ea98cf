"""Warnings are silenced in the thread that asks for it, and nowhere else."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from fxcore.models.catalog import get_model
from fxcore.quiet import quiet


@pytest.fixture
def filters() -> Iterator[list[object]]:
    """The filters of a process in which each warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield list(warnings.filters)


def test_only_the_own_thread_is_quiet(filters: list[object]) -> None:
    inside, warned = threading.Event(), threading.Event()

    def build() -> None:
        with quiet():
            inside.set()
            assert warned.wait(60)
            with quiet():
                warnings.warn("of a builder", stacklevel=1)
            warnings.warn("of a builder", stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn("of its caller", stacklevel=1)

    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build)
        assert inside.wait(60)
        with pytest.raises(UserWarning):
            warnings.warn("of another thread", stacklevel=1)
        warned.set()
        built.result()
    assert list(warnings.filters) == filters


def test_threads_that_overlap_leave_the_filters_as_they_were(filters: list[object]) -> None:
    first, second = threading.Event(), threading.Event()

    def begun_first() -> None:
        with quiet():
            first.set()
            assert second.wait(60)
        first.clear()

    def ended_last() -> None:
        assert first.wait(60)
        with quiet():
            second.set()
            while first.is_set():  # the other has left
                pass
            warnings.warn("of a builder", stacklevel=1)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(begun_first), pool.submit(ended_last)]:
            future.result()
    assert list(warnings.filters) == filters


def test_a_model_built_beside_another_quiet_thread_leaves_the_filters_as_they_were(filters: list[object]) -> None:
    entered, built = threading.Event(), threading.Event()

    def export() -> None:
        with quiet():
            entered.set()
            assert built.wait(60)

    def build() -> nn.Module:
        assert entered.wait(60)
        try:
            return get_model("googlenet").build_weightless()  # whose builder warns
        finally:
            built.set()

    with ThreadPoolExecutor(2) as pool:
        exported, model = pool.submit(export), pool.submit(build)
        assert isinstance(model.result(), nn.Module)
        exported.result()
    assert list(warnings.filters) == filters
