"""Helpers for the tests of a shared store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from service.engine import Engine
from service.engine.extractors.store import Store, Stored
from service.schemas.specs import ExtractorSpec
from tests.service.engine.running import PATIENCE

Pair = tuple[Engine, Engine]


SPEC = ExtractorSpec(
    model="resnet18", weights="IMAGENET1K_V1", return_nodes={"layer4": "C5"}, transforms=["fold_constants"]
)
IDS = [f"{number:012x}" for number in range(120)]


def extractor(id: str, fingerprint: str = "fingerprint") -> Stored:
    return Stored(id=id, spec=SPEC, return_nodes={"C5": "layer4.1.relu_1"}, fingerprint=fingerprint)


def opened(url: str, **limits: int) -> Store:
    store = Store(url, **limits)
    store.check()
    return store


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Take the folder ``store`` of ``folder`` away, as when a mount is lost."""
    (folder / "store").rename(folder / "aside")
    yield
    (folder / "aside").rename(folder / "store")


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
