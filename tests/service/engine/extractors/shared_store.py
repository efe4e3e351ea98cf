"""Helpers for the tests of a shared store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from service.engine import Engine
from service.engine.extractors.store import Store
from tests.service.engine.running import PATIENCE

Pair = tuple[Engine, Engine]


def ids(url: str) -> set[str]:
    return {stored.id for stored, _ in Store(url).all()}


class Held:
    """Replace a function of ``owner``, and block one call to it until the test resumes it.

    Args:
        held: whether a call with these arguments counts.
        call: index of the call to block, among the calls that count.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        held: Callable[..., bool] = lambda *args: True,
        call: int = 0,
    ) -> None:
        self.begun, self.resume = threading.Event(), threading.Event()
        function, calls = getattr(owner, name), count()

        def hold(*args: Any) -> Any:
            if held(*args) and next(calls) == call:
                self.begun.set()
                assert self.resume.wait(PATIENCE)
            return function(*args)

        monkeypatch.setattr(owner, name, hold)
