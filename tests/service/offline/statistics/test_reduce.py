"""Runs that reduce images to statistics: held to NumPy over the rows of a run that writes them."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from fxcore.errors import FxError
from service.offline import extract
from service.offline.batches import Result
from service.offline.merge import merge
from service.offline.outputs.index import Index
from service.offline.runners.runner import RowLayout
from service.offline.statistics.statistics import Statistics
from tests.e2e.forked import script
from tests.service.offline.conftest import EXTRACT, SETTINGS, errors, job, png, rows

parquet = pytest.importorskip("pyarrow.parquet")

ALL = "mean,std,cov,top:3"


def top(out: Path) -> list[tuple[Any, ...]]:
    """Output, channel, rank, path, value and place of each row."""
    found = parquet.read_table(out / "top.parquet").to_pylist()
    return [tuple(row[name] for name in ("output", "channel", "rank", "path", "value", "place")) for row in found]


def assert_statistics(out: Path, right: dict[str, dict[str, NDArray[Any]]], rtol: float = 1e-9) -> None:
    """The files hold what NumPy says of ``right``: path → output → ``[channels, …positions]``."""
    found = load_file(out / "stats.safetensors")
    ranked = []
    for key in ("mid", "top"):
        stacked = np.stack([of_image[key].astype(np.float64) for of_image in right.values()])
        by_channel = stacked.reshape(*stacked.shape[:2], -1).swapaxes(0, 1).reshape(stacked.shape[1], -1)
        assert found[f"{key}.count"] == by_channel.shape[1]
        np.testing.assert_allclose(found[f"{key}.mean"], by_channel.mean(1), rtol=rtol)
        np.testing.assert_allclose(found[f"{key}.std"], by_channel.std(1, ddof=1), rtol=rtol)
        np.testing.assert_allclose(found[f"{key}.cov"], np.cov(by_channel), rtol=1e-6, atol=rtol)
        for channel in range(stacked.shape[1]):
            maxima = sorted((-of_image[key][channel].max(), path) for path, of_image in right.items())[:3]
            for rank, (value, path) in enumerate(maxima, 1):
                one = right[path][key][channel]
                place = [int(index) for index in np.unravel_index(one.argmax(), one.shape)] if one.ndim else []
                ranked.append((key, channel, rank, path, float(-value), place))
    if rtol < 1e-8:
        assert top(out) == ranked


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", ["none", "avg"])
def test_statistics_are_those_of_the_rows_of_the_same_run(
    pool: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    root, out = folder(21), tmp_path / "out"
    (root / "broken.png").write_bytes(png(0)[:500])
    extract(job(tmp_path / "rows", root, pool=pool), SETTINGS)
    made = extract(job(out, root, pool=pool, reduce=ALL), SETTINGS)
    assert (made.images, made.done, made.unreadable, made.shards) == (22, 21, 1, 0)
    assert_statistics(out, rows(tmp_path / "rows"))
    assert list(errors(out)) == [str(root / "broken.png")]
    assert sorted(file.name for file in out.iterdir()) == [
        *("errors.jsonl", "index.sqlite", "spec.json", "stats.safetensors", "top.parquet")
    ]
    with safe_open(out / "stats.safetensors", "np") as file:
        metadata = file.metadata()
    assert (metadata["model"], metadata["images"], metadata["reduce"]) == ("squeezenet1_1", "21", ALL)
    assert {row["node"] for row in parquet.read_table(out / "top.parquet").to_pylist()} == {
        *("features.5", "features.12.cat")
    }


@pytest.mark.exhaustive
def test_tokens_before_the_positions_do_not_count(folder: Callable[..., Path], tmp_path: Path) -> None:
    """As in averages: the mean over all tokens is that of the averages of the images."""
    root, out = folder(3), tmp_path / "out"
    spec = {"model": "vit_b_32", "return_nodes": {"encoder": "mid", "encoder.layers.encoder_layer_0": "top"}}
    extract(job(tmp_path / "rows", root, pool="none", spec=spec), SETTINGS)
    extract(job(out, root, pool="none", spec=spec, reduce="mean,top:1"), SETTINGS)
    found, right = load_file(out / "stats.safetensors"), rows(tmp_path / "rows")
    assert found["mid.count"] == 3 * 49
    positions = np.concatenate([of_image["mid"][1:] for of_image in right.values()]).astype(np.float64)
    np.testing.assert_allclose(found["mid.mean"], positions.mean(0), rtol=1e-9)
    for _, channel, _, path, value, place in top(out)[:768]:
        assert value == positions[:, channel].max() == right[path]["mid"][1 + place[0], channel]


@pytest.mark.exhaustive
def test_a_second_run_continues_the_first(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(4), tmp_path / "out"
    extract(job(out, root, reduce=ALL), SETTINGS)
    before = [(out / name).read_bytes() for name in ("stats.safetensors", "top.parquet")]
    made = extract(job(out, folder(4), reduce=ALL), SETTINGS)
    assert (made.images, made.done) == (4, 4)
    assert [(out / name).read_bytes() for name in ("stats.safetensors", "top.parquet")] == before
    extract(job(out, folder(11), reduce=ALL), SETTINGS)
    extract(job(tmp_path / "rows", root), SETTINGS)
    assert_statistics(out, rows(tmp_path / "rows"))
    with pytest.raises(FxError, match="--reduce mean,std,cov,top:3, not mean; use the same"):
        extract(job(out, root, reduce="mean"), SETTINGS)
    with pytest.raises(FxError, match="--reduce mean,std,cov,top:3, not None"):
        extract(job(out, root), SETTINGS)


@pytest.mark.exhaustive
def test_merged_folders_are_one_of_all_images(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(11), tmp_path / "out"
    (root / "broken.png").write_bytes(png(0)[:500])
    files = sorted(file for file in root.rglob("*.png"))
    for part, some in (("a", files[:2]), ("b", files[2:9]), ("c", files[9:])):
        extract(job(tmp_path / part, *some, reduce=ALL), SETTINGS)
    parts = [str(tmp_path / part) for part in "abc"]
    made = merge(parts, out)
    assert (made.images, made.done, made.unreadable) == (12, 11, 1)
    extract(job(tmp_path / "rows", root), SETTINGS)
    assert_statistics(out, rows(tmp_path / "rows"))
    assert list(errors(out)) == [str(root / "broken.png")]

    extract(job(out, folder(13), reduce=ALL), SETTINGS)  # it is a folder as any other
    extract(job(tmp_path / "rows", root), SETTINGS)
    assert_statistics(out, rows(tmp_path / "rows"))

    with pytest.raises(FxError, match="out is not empty"):
        merge(parts, out)
    with pytest.raises(FxError, match="rows holds features; name folders created by fxserve extract --reduce"):
        merge([parts[0], str(tmp_path / "rows")], tmp_path / "other")
    extract(job(tmp_path / "less", *files[:1], reduce="mean"), SETTINGS)
    with pytest.raises(
        FxError, match=r"less was made with --reduce mean, not mean,std,cov,top:3 as in .*a; they cannot"
    ):
        merge([parts[0], str(tmp_path / "less")], tmp_path / "other")
    assert not (tmp_path / "other").exists()


KILLED = """
import os, signal, sys
from service.cli import main
from service.offline import batches
from service.offline.statistics import reducer
from service.offline.outputs.index import Index

batches._BATCH, reducer._SECONDS, reducer._MAX_SHARE, left = 2, 0, 1e9, int(sys.argv.pop(1))
commit = Index.commit

def limited(self, *arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self, *arguments)
    if left == -5:
        os.kill(os.getpid(), signal.SIGKILL)

Index.commit = limited
main()
"""


@pytest.mark.exhaustive
def test_a_run_that_is_killed_counts_every_image_once(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(40), tmp_path / "out"
    extract(job(tmp_path / "rows", root, spec={"backend": "eager"}), SETTINGS)
    command = f"extract {root} {EXTRACT} --out {out} --reduce {ALL} --backend eager"

    def run(commits: str) -> tuple[int, str]:
        code = script(KILLED, tmp_path, commits, *command.split()).wait(600)
        return code, (tmp_path / "stderr").read_text()

    for commits in ("4", "-1"):  # before a transaction, and after one
        code, said = run(commits)
        assert code == -signal.SIGKILL, said
        assert not list(out.glob("stats*"))
    with closing(Index(out)) as index:
        assert index.counts()[1] == 2 * 3 + 2 * 4
    code, said = run("9999")
    assert code == 0, said
    assert_statistics(out, rows(tmp_path / "rows"), rtol=1e-5)  # rounding differs with the batches
    assert load_file(out / "stats.safetensors")["mid.count"] == 40


def test_an_image_with_a_value_that_is_not_finite_is_listed_and_does_not_count() -> None:
    layouts = {"mid": RowLayout("NCHW")}
    values = torch.arange(3 * 2 * 4.0).reshape(3, 2, 2, 2)
    values[1, 0, 1, 1] = torch.nan
    made = Statistics.empty(ALL, layouts, {"mid": values})
    some = Result(["a", "b", "c"], {"mid": values}, [])
    assert made.add(some) == (["a", "c"], [("b", "mid has values that are not finite")])
    moments, largest = made.outputs["mid"].moments, made.outputs["mid"].largest
    assert moments is not None
    assert largest is not None
    assert moments.mean.tolist() == values[[0, 2]].mean((0, 2, 3)).tolist()
    assert [entry.path for entry in largest] == ["c", "a"] * 2
    narrow = Result(["d"], {"mid": values[:1, :1]}, [])
    assert made.add(narrow) == ([], [("d", "mid has 1 channels, not 2 as for other images")])


def test_what_takes_too_much_memory_is_refused() -> None:
    layouts = {"one": RowLayout(), "two": RowLayout()}
    wide = {"one": torch.zeros(1, 8000), "two": torch.zeros(1, 3000)}
    with pytest.raises(FxError, match=r"cov of one needs 488 MiB of 557 MiB in all, for 8,000 channels; 512 MiB are"):
        Statistics.empty("cov", layouts, wide)
    with pytest.raises(FxError, match=r"top:100 of 11,000 channels keeps too many entries; the maximum is top:47"):
        Statistics.empty("mean,top:100", layouts, wide)
    Statistics.empty("mean,std,top:47", layouts, wide)


def test_top_is_refused_where_rows_have_no_channels_of_the_node(folder: Callable[..., Path], tmp_path: Path) -> None:
    for pool, told in (("roi", "several rows"), ("avg+max", "own channels")):
        with pytest.raises(FxError, match=told):
            extract(job(tmp_path / "out", folder(1), pool=pool, reduce="top:1"), SETTINGS)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged_leaves_nothing(folder: Callable[..., Path], tmp_path: Path) -> None:
    files = sorted(folder(4).rglob("*.png"))
    for part, some in (("a", files[:2]), ("b", files[1:])):
        extract(job(tmp_path / part, *some, reduce="mean"), SETTINGS)
    with pytest.raises(FxError, match=r"\.png is in several of the folders"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with sqlite3.connect(tmp_path / "b/index.sqlite") as index:  # as an interrupted run leaves it
        index.execute("UPDATE images SET shard = NULL WHERE path = ?", (str(files[1]),))
    index.close()
    with pytest.raises(FxError, match=r"1 of 3 images of .*b are not done yet"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_maps_of_other_dimensions_have_no_places_among_these() -> None:
    layouts = {"mid": RowLayout("NCHW")}
    found = Statistics.empty("top:1", layouts, {"mid": torch.zeros(1, 2, 3, 3)})
    assert found.add(Result(["a"], {"mid": torch.ones(1, 2, 3, 3)}, [])) == (["a"], [])
    added, [(path, reason)] = found.add(Result(["b"], {"mid": torch.ones(1, 2, 4, 3, 3)}, []))
    assert (added, path, "dimensions" in reason) == ([], "b", True)
