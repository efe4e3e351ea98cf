"""What compiled models keep between passes, in processes of their own: threads and memory are a process's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fxcore.backends import BACKENDS, Options, residents
from fxcore.backends.openvino import OpenVINOModule
from tests.e2e.forked import script
from tests.fxcore.backends.conftest import Build

pytest.importorskip("openvino")

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
from fxcore import build_extractor, get_model, load_model, model_graph
from fxcore.backends import BACKENDS, Options, residents
from fxcore.memory import give_back, use_one_heap

use_one_heap()
asked = json.loads(sys.argv[1])
residents.FIXED_MODELS = asked.get("most", residents.FIXED_MODELS)
graph = model_graph(asked["model"])
model = load_model(get_model(asked["model"]), "random")

def threads():
    return len(os.listdir("/proc/self/task"))

def resident():
    give_back()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def lowered(node, cache=Path(asked["cache"])):
    module = build_extractor(graph, model, graph.resolve([node])).module
    options = Options(threads=asked["threads"], cache=cache)
    return BACKENDS["openvino"].lower(module, (torch.ones(2, 3, 224, 224),), options)

first = lowered(asked["nodes"][0])  # brings the library, and its workers
first(torch.rand(1, 3, 96, 96))
before = threads(), resident()
kept = [lowered(node) for node in asked["nodes"][1:]]
for rows in asked["rows"]:
    for one in kept:
        one(torch.rand(rows, 3, 224, 224))
after = threads(), resident()
counted = sum(sum(one.storages().values()) + one.grown for one in kept)
print(json.dumps({"threads": after[0] - before[0], "bytes": after[1] - before[1], "counted": counted}))
"""


def grown(build: Build, cache: Path, folder: Path, **asked: Any) -> dict[str, int]:
    """By how much threads and memory of a process grow over the first of ``nodes``, and what of that is counted."""
    for node in asked["nodes"]:  # here, where children are forked; the process finds them in the cache
        module, example = build(asked["model"], node).module, torch.ones(2, 3, 224, 224)
        BACKENDS["openvino"].lower(module, (example,), Options(threads=asked["threads"], cache=cache))
    status = script(PROGRAM, folder, json.dumps({"cache": str(cache), **asked})).wait(600)
    assert status == 0, (folder / "stderr").read_text()
    found: dict[str, int] = json.loads((folder / "stdout").read_text().splitlines()[-1])
    return found


NODES = ["features.0", "features.1", "features.2"]


@pytest.mark.exhaustive
def test_threads_are_bounded(extractor: Build, artifacts: Path, tmp_path: Path) -> None:
    sizes = {"model": "squeezenet1_1", "nodes": NODES, "rows": [1, 2, 3]}
    found = grown(extractor, artifacts, tmp_path, threads=2, most=2, **sizes)
    assert found["threads"] <= 2 * (2 + 2) + 1, found  # two extractors, two models of a size, a worker
    found = grown(extractor, artifacts, tmp_path, threads=1, **sizes)
    assert found["threads"] == 0, found


@pytest.mark.exhaustive
def test_what_is_counted_is_what_they_take(extractor: Build, artifacts: Path, tmp_path: Path) -> None:
    sizes = {"model": "resnet18", "nodes": ["layer1", "layer4"], "rows": [1, 2, 4, 16]}
    found = grown(extractor, artifacts, tmp_path, threads=2, **sizes)
    assert 0.75 * found["bytes"] < found["counted"] < 2 * found["bytes"], found


@pytest.mark.exhaustive
def test_intermediate_values_are_bounded(
    extractor: Build, batch: torch.Tensor, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [extractor("mobilenet_v3_small", node).module for node in NODES]
    one, other, last = (
        BACKENDS["openvino"].lower(module, (batch[:2],), Options(threads=2, cache=artifacts)) for module in modules
    )
    assert isinstance(one, OpenVINOModule)
    many = batch.repeat(3, 1, 1, 1)[..., :220]  # not the usual size, which fixed models compute
    empty = one.grown
    expected = one(many)
    taken = one.grown - empty
    assert taken > many.nbytes
    monkeypatch.setattr(residents, "SCRATCH_BYTES", int(1.5 * taken))
    other(many)
    last(many)
    assert one.grown == empty
    again = one(many)
    assert all(torch.equal(value, again[key]) for key, value in expected.items())
