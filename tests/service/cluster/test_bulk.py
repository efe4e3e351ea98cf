"""Bulk extraction on a Ray of this machine, beside the same run without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fxcore.errors import FxError
from service.offline import extract
from service.offline.folder import Folder
from tests.service.offline.conftest import SETTINGS, csv, job, png, regions, regions_in, rows
from tests.service.offline.inputs.test_boxes import BOXES
from tests.service.offline.statistics.test_reduce import ALL, assert_statistics

pytest.importorskip("ray.data")

from service.cluster import bulk
from service.cluster.actors import EngineConfig, describe, given_settings

parquet = pytest.importorskip("pyarrow.parquet")


def begin(root: Path | str, out: Path | str, *more: str) -> subprocess.Popen[str]:
    command = f"extract {root} --model squeezenet1_1 --nodes features.5:mid,features.12:top --weights random --pool avg"
    command += f" --out {out} --ray local --device cpu --backend eager"
    return subprocess.Popen(
        [sys.executable, "-c", "from service.cli import main; main()", *command.split(), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    )


def ended(run: subprocess.Popen[str]) -> str:
    said, complaint = run.communicate(timeout=600)
    assert run.returncode == 0, complaint[-3000:]
    return said


def found_in(out: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Path → features, and path → error, of all files; each path once."""
    features: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for file in out.glob("*.parquet"):
        for row in parquet.read_table(file).to_pylist():
            path, error = row.pop("path"), row.pop("error")
            assert path not in features
            assert path not in errors
            if error is None:
                features[path] = row
            else:
                assert set(row.values()) == {None}
                errors[path] = error
    return features, errors


@pytest.mark.exhaustive
def test_every_row_is_the_one_of_a_run_without_ray(folder: Callable[..., Path], tmp_path: Path) -> None:
    root = folder(30)
    (root / "broken.png").write_bytes(png(0)[:500])
    (root / "lost.png").symlink_to("/nowhere/at/all.png")
    with tarfile.open(root / "more.tar", "w") as archive:
        archive.add(root / "001.png", "in/001.png")
    local = extract(job(tmp_path / "local", root, spec={"backend": "eager"}), SETTINGS)
    said = ended(begin(root, tmp_path / "ray", "--shard-rows", "8"))
    assert "31 of 33 images" in said
    assert "2 could not be read" in said
    features, errors = found_in(tmp_path / "ray")
    right = rows(tmp_path / "local")
    assert (local.done, local.unreadable) == (31, 2)
    assert sorted(features) == sorted(right)
    for path, row in features.items():
        for key, values in row.items():
            np.testing.assert_allclose(values, right[path][key], rtol=1e-5, atol=1e-6, err_msg=path)
    assert sorted(Path(path).name for path in errors) == ["broken.png", "lost.png"]
    assert "No such file" in errors[str(root / "lost.png")]

    before = {file.name: file.read_bytes() for file in (tmp_path / "ray").iterdir()}
    (tmp_path / "ray" / f"{'0' * 32}_000000.parquet").write_bytes(next(iter(before.values()))[:100])
    (root / "new.png").write_bytes(png(77))
    (root / "lost.png").unlink()
    (root / "lost.png").write_bytes(png(78))
    assert "33 of 34 images" in ended(begin(root, tmp_path / "ray"))
    after, again = found_in(tmp_path / "ray")
    assert after.keys() == {*features, str(root / "new.png"), str(root / "lost.png")}
    assert {path: after[path] for path in features} == features
    assert [Path(path).name for path in again] == ["broken.png"]


@pytest.mark.exhaustive
def test_boxes_are_those_of_a_run_without_ray(folder: Callable[..., Path], tmp_path: Path) -> None:
    root = folder(12)
    wanted: dict[str, Any] = {f"{number:03d}.png": BOXES * (1 + number % 4) for number in (1, 2, 4, 5, 7, 8)}
    file = csv(root / "boxes.csv", {**wanted, "gone.png": BOXES, "010.png": [[0, 0, 90, 64]]})
    local = extract(regions(tmp_path / "local", file, root), SETTINGS)
    assert (local.done, local.unreadable) == (6, 2)
    options = ["--model", "resnet18", "--nodes", "C4,C5", "--pool", "roi", "--boxes", str(file), "--shard-rows", "4"]
    said = ended(begin(root, tmp_path / "ray", *options))
    assert "6 of 8 images" in said
    right = regions_in(tmp_path / "local")
    features: dict[str, list[Any]] = {}
    errors = {}
    for written in (tmp_path / "ray").glob("*.parquet"):
        for row in parquet.read_table(written).to_pylist():
            path, error = row.pop("path"), row.pop("error")
            if error is None:
                features.setdefault(path, []).append((row.pop("box"), row))
            else:
                errors[Path(path).name] = error
    assert sorted(features) == sorted(right)
    for path, rows_of_image in features.items():
        assert [box for box, _ in rows_of_image] == [box for box, _ in right[path]]
        for (_, row), (_, expected) in zip(rows_of_image, right[path], strict=True):
            for key in ("C4", "C5"):
                values = np.reshape(row[key], expected[key].shape)
                np.testing.assert_allclose(values, expected[key], rtol=1e-4, atol=1e-5, err_msg=path)
    assert errors["gone.png"] == "it has boxes but is not among the images"
    assert "reaches out of its image" in errors["010.png"]

    csv(file, {**wanted, "001.png": BOXES[:1]})
    run = begin(root, tmp_path / "ray", *options)
    _, complaint = run.communicate(timeout=600)
    assert run.returncode == 1
    assert "001.png was extracted with different boxes; use a new folder" in complaint


@pytest.mark.exhaustive
def test_killed_actors_and_a_killed_driver_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """``FXSERVE_TEST_IMAGES`` says how many images; an actor is killed twice, then the driver."""
    count = int(os.environ.get("FXSERVE_TEST_IMAGES", "1500"))
    root, out = tmp_path / "photos", tmp_path / "out"
    root.mkdir()
    for number in range(count):
        (root / f"{number:05d}.png").write_bytes(png(number % 400))
    rows_of_a_file = max(8, count // 100)

    run = begin(root, out, "--shard-rows", str(rows_of_a_file))

    def files() -> int:
        return len(list(out.glob("*.parquet")))

    def actors() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(run.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                found += [child] if "MapWorker" in " ".join(child.cmdline()) else []
        return found

    killed: list[int] = []
    for stop_at in (5, 20):
        while run.poll() is None and (files() < stop_at or not [one for one in actors() if one.pid not in killed]):
            time.sleep(0.02)
        assert run.poll() is None, run.communicate()
        victim = next(one for one in actors() if one.pid not in killed)
        killed.append(victim.pid)
        victim.kill()
    while run.poll() is None and files() < 40:
        time.sleep(0.02)
    family = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    for agent in psutil.wait_procs(family, timeout=20)[1]:  # Ray's outlive it by minutes, and hold its output
        agent.kill()
    run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert 40 <= files() < 100

    assert f"{count} of {count} images" in ended(begin(root, out, "--shard-rows", str(rows_of_a_file)))
    features, errors = found_in(out)
    assert sorted(features) == sorted(str(file) for file in root.iterdir())
    assert not errors


@pytest.mark.exhaustive
def test_statistics_are_merged_from_all_actors(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(12), tmp_path / "out"
    (root / "broken.png").write_bytes(png(0)[:500])
    said = ended(begin(root, out, "--reduce", ALL))
    assert f"12 of 13 images in statistics ({ALL}), 1 could not be read" in said
    extract(job(tmp_path / "rows", root, spec={"backend": "eager"}), SETTINGS)
    assert_statistics(out, rows(tmp_path / "rows"), rtol=1e-5)
    extract(job(out, folder(14), spec={"backend": "eager"}, reduce=ALL), SETTINGS)  # without Ray
    extract(job(tmp_path / "rows", root, spec={"backend": "eager"}), SETTINGS)
    assert_statistics(out, rows(tmp_path / "rows"), rtol=1e-5)


def test_the_index_of_another_folder_is_refused(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any actor is started."""
    jobs = [job(tmp_path / name, folder(1), spec={"backend": "eager"}, reduce="mean") for name in ("one", "two")]
    for each in jobs:
        extract(each, SETTINGS)
    (tmp_path / "one/index.sqlite").write_bytes((tmp_path / "two/index.sqlite").read_bytes())
    engine = EngineConfig(given_settings(SETTINGS, 1), jobs[0].spec, jobs[0].options, None, 1)
    monkeypatch.setattr(bulk, "_started", lambda *arguments: (None, *describe(engine)))
    with pytest.raises(FxError, match=r"one/index.sqlite is of another folder"):
        bulk._reduce(jobs[0], SETTINGS, Folder(tmp_path / "one"))
