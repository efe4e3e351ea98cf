"""Numbers as the page writes them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "service/page"
ASK = """
import { flops, megabytes, parameters } from "./numbers.js"
const numbers = [999, 1e3, 999.4e3, 999.7e3, 999.7e6, 1.5e9]
console.log(JSON.stringify(numbers.flatMap((n) => [megabytes(n), flops(n), parameters(n)])))
"""


def test_numbers_have_three_digits_and_no_exponent(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run the page's scripts")
    shutil.copy(PAGE / "numbers.js", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "ask.js").write_text(ASK)
    run = subprocess.run([node, "ask.js"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    numbers = ["999 ", "1.00 k", "999 k", "1.00 M", "1.00 G", "1.50 G"]
    written = [text for one in numbers for text in (f"{one}B", f"{one}FLOPs", f"{f'{one}'.strip()} parameters")]
    assert json.loads(run.stdout) == written
