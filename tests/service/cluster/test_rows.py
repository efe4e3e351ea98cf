"""The Parquet files of runs on Ray, written by pyarrow as Ray writes them; without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fxcore.errors import FxError
from service.offline.batches import Result
from service.offline.folder import Folder
from service.offline.inputs.sources import Source
from service.offline.outputs.index import Index

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet

from service.cluster.rows import Output, locked, schema_of, table_of

ROWS = {"C4": torch.arange(6.0).reshape(2, 3), "C5": torch.arange(8.0).reshape(2, 4)}
SCHEMA = schema_of(ROWS, {"fingerprint": "abc", "nodes": '{"C4": "layer3", "C5": "layer4"}'})


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "scratch").mkdir()
    with closing(Index(tmp_path / "scratch")) as index:
        index.add([Source(path, path) for path in "abcdx"])
        yield index


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The rows of a and b, of c and d, and the error of x."""
    out = tmp_path / "out"
    for digit, paths, errors in (("1", "ab", []), ("2", "cd", [("x", "broken")])):
        dataset.write_dataset(
            table_of([Result(list(paths), ROWS, errors)], SCHEMA),
            out,
            schema=SCHEMA,
            basename_template=f"{digit * 32}_000000_000000-{{i}}.parquet",
            format="parquet",
            existing_data_behavior="overwrite_or_ignore",
        )
    return out


def test_rows_of_earlier_runs_are_entered_and_partial_files_removed(out: Path, index: Index) -> None:
    before = sorted(out.iterdir())
    (out / f"{'3' * 32}_000000_000000-0.parquet").write_bytes(before[0].read_bytes()[:100])
    output = Output(Folder(out), index, SCHEMA, None)
    output.look()
    assert output.files == [file.name for file in before]
    assert index.counts() == (5, 4, 1)
    assert sorted(out.iterdir()) == before


def test_files_of_others_are_left_alone(out: Path, index: Index) -> None:
    everything = parquet.read_table(out)
    others = {
        "labels.parquet": pyarrow.table({"path": list("ab"), "label": [0, 1]}),
        "0_all.parquet": everything,  # with the metadata
        f"{'0' * 32}_C5.parquet": everything.select(["path", "C5", "error"]),
        f"{'0' * 32}_other.parquet": everything.replace_schema_metadata({"fingerprint": "xyz"}),
    }
    for name, table in others.items():
        parquet.write_table(table, out / name)
    (out / "half.parquet").write_bytes(b"PAR1")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    Output(Folder(out), index, SCHEMA, None).look()
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert index.counts() == (5, 4, 1)


def test_a_late_copy_of_rows_is_removed(out: Path, index: Index) -> None:
    first, second = sorted(out.iterdir())
    whole = parquet.read_table(first)
    (out / f"{'4' * 32}_000000.parquet").write_bytes(first.read_bytes())
    parquet.write_table(pyarrow.concat_tables([whole.slice(0, 1), parquet.read_table(second)]), second)
    Output(Folder(out), index, SCHEMA, None).look()
    assert sorted(out.iterdir()) == [first, second]
    assert parquet.read_table(second).column("path").to_pylist() == ["c", "d", "x"]


def test_rows_of_errors_are_removed_to_be_computed_again(out: Path, index: Index) -> None:
    first, second = sorted(out.iterdir())
    before = first.read_bytes()
    Output(Folder(out), index, SCHEMA, None).look(keep_errors=False)
    assert index.counts() == (5, 4, 0)
    assert [source.path for block in index.pending() for source in block] == ["x"]
    assert first.read_bytes() == before
    rest = parquet.read_table(second)
    assert rest.column("path").to_pylist() == ["c", "d"]
    assert rest.schema.equals(SCHEMA, check_metadata=True)


def test_an_interrupted_removal_of_errors_loses_no_rows(
    out: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Output(Folder(out), index, SCHEMA, None).look(keep_errors=False)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_second_run_into_a_folder_on_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spec.json").touch()
    folder = Folder(tmp_path)
    refused = pytest.raises(FxError, match="another run is writing to this folder")
    with locked(folder), refused, locked(folder):
        pass
    with locked(folder):
        pass
