"""What actors send is what the driver merges; without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from service.offline.batches import Result
from service.offline.folder import Folder
from service.offline.inputs.sources import Source
from service.offline.outputs.spec_file import SpecFile
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.runners.runner import RowLayout
from service.offline.statistics.reducer import Reduction
from service.offline.statistics.statistics import Statistics

pytest.importorskip("pyarrow")

from service.cluster.reduced import merge_table, reduced_table


def test_tables_of_several_actors_are_merged(tmp_path: Path) -> None:
    rows, layouts = {"mid": torch.randn(5, 3, 2, 2)}, {"mid": RowLayout("NCHW")}
    paths = list("abcde")
    tables = []
    for part in (slice(3, 5), slice(0, 3)):
        some = Statistics.empty("mean,cov,top:2", layouts, rows)
        some.add(Result(paths[part], {"mid": rows["mid"][part]}, []))
        tables.append(reduced_table(some, paths[part], [("x", "broken")] if part.start else []))
    empty = Statistics.empty("mean,cov,top:2", layouts, rows)
    made = {"model": "m", "weights": "w", "return_nodes": {"mid": "layer"}}
    outputs = [{"key": "mid", "node": "layer"}]
    spec = SpecFile({"spec": made, "fingerprint": "f", "outputs": outputs, "reduce": "mean,cov,top:2"})
    folder = WorkingFolder(Folder(tmp_path))
    folder.index.add([Source(path, path) for path in [*paths, "x"]])
    reduction = Reduction(folder, empty, spec)
    for table in tables:
        merge_table(reduction, table)
    reduction.finish()
    assert folder.index.counts() == (6, 5, 1)
    folder.close()
    found = load_file(tmp_path / "stats.safetensors")
    values = rows["mid"].double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.from_numpy(found["mid.mean"]), values.mean(1))
    torch.testing.assert_close(torch.from_numpy(found["mid.cov"]), values.cov())
