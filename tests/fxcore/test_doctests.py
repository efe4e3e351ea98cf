"""Every example in a docstring of fxcore runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import fxcore
from fxcore import list_transforms
from fxcore.errors import FxError

PAGE = Path(fxcore.__file__).parent / "README.md"
MODULES = ["fxcore", *sorted(m.name for m in pkgutil.walk_packages(fxcore.__path__, "fxcore."))]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.failed == 0


def test_the_page_on_the_library() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 40
    assert result.failed == 0


def test_the_page_is_linked_and_names_every_pass() -> None:
    assert "(fxcore/README.md)" in (PAGE.parent.parent / "README.md").read_text()
    page = PAGE.read_text()
    for name in [t.name for t in list_transforms() if t.exact] + ["trace", "quantize", "verify", "profile", "export"]:
        assert name in page, name


def public() -> list[tuple[str, str]]:
    """What is meant to be used, errors aside: module, and name in it."""
    modules = {name: importlib.import_module(name) for name in ("fxcore", "fxcore.transforms", "fxcore.exports")}
    found = []
    for module in modules.values():
        for name in module.__all__:
            value = getattr(module, name)
            error = isinstance(value, type) and issubclass(value, FxError) and value is not FxError
            if callable(value) and not error:
                found.append((value.__module__, value.__qualname__))
    return sorted(set(found))


def test_all_that_is_public_has_an_example() -> None:
    finder = doctest.DocTestFinder()
    lacking = []
    for module, name in public():
        tests = finder.find(getattr(importlib.import_module(module), name), name)
        if not any(test.examples for test in tests):
            lacking.append(f"{module}.{name}")
    assert not lacking
