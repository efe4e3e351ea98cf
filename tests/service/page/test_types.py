"""The page's scripts keep to the types that their JSDoc says, by TypeScript's own compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest

TYPESCRIPT = "typescript@5.9"


@pytest.mark.exhaustive
def test_the_scripts_are_typed():
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("there is no node: the page's scripts are not checked")
    run = [npx, "--yes", "-p", TYPESCRIPT, "tsc"]
    if subprocess.run([*run, "--version"], capture_output=True, timeout=300).returncode:
        pytest.skip("npm does not give TypeScript: the page's scripts are not checked")
    config = Path(__file__).with_name("jsconfig.json")
    checked = subprocess.run([*run, "-p", str(config)], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout
