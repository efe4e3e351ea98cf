"""The page's sizes of ``fit=native`` are the server's."""

import json
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from fxcore import get_model
from fxcore.images.fitting import fitted
from service.schemas.image_size import MAX_SIDE

PAGE = Path(__file__).parents[3] / "service/page"
ASK = """
import { readFileSync } from "node:fs"
import { fixedQuery } from "./size.js"
const found = JSON.parse(readFileSync(0)).map(([side, multiple, height, width]) => {
  const model = { multiple, inputs: [{ shape: [null, 3, 224, 224] }] }
  return fixedQuery(model, { fit: "native", image_size: String(side) }, { bitmap: { height, width } })
})
console.log(JSON.stringify(found))
"""


def test_native_sizes_are_the_servers(tmp_path):
    """Photographs of 3:2 among them, of which a side is often halfway between two multiples."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run the page's scripts")
    for name in ("size.js", "dom.js"):
        shutil.copy(PAGE / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "ask.js").write_text(ASK)
    photos = [(2, 3), (3, 2), (4000, 6000), (300, 451), (1080, 1920), (1, 1), (1, 3000), *product((97, 240), (97, 333))]
    cases = [(*rest, *photo) for *rest, photo in product((64, 160, 224, 320, 448, 640), (1, 14, 16, 32), photos)]
    run = subprocess.run([node, "ask.js"], cwd=tmp_path, input=json.dumps(cases), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    own, halves = get_model("resnet18").preprocessing(), 0
    for (side, multiple, *photo), found in zip(cases, json.loads(run.stdout), strict=True):
        height, width = fitted(own, "native", side, multiple).output_size(*photo)
        halves += side * max(photo) / min(photo) / multiple % 1 == 0.5
        if max(height, width) > MAX_SIDE:  # the server says so of native images
            assert found == {"fit": "native", "image_size": str(side)}
        else:
            assert found == {"fit": "stretch", "image_size": f"{height}x{width}"}, (side, multiple, photo)
    assert halves > 5
