"""What the tests of a shared store have in common beside fixtures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from service.engine.extractors.store import Store
from tests.service.engine.running import PATIENCE


def ids(url: str) -> set[str]:
    return {stored.id for page in Store(url).pages() for stored, _ in page}


class Held:
    """Stands where a function of ``owner`` stands, and holds one call of it until the test lets it go on.

    Args:
        call: which one is held, counted from 0 among those whose arguments ``held`` is true of.
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
