"""Every example in a docstring of fxcore runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fxcore

MODULES = ["fxcore", *sorted(m.name for m in pkgutil.walk_packages(fxcore.__path__, "fxcore."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [t for name in MODULES for t in finder.find(importlib.import_module(name), name) if t.examples]
    assert len(examples) >= 20
