"""The direction of imports: contracts in pyproject.toml, imports for type checkers included."""

from __future__ import annotations

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent


def test_imports_run_one_way_and_in_no_circle() -> None:
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0
