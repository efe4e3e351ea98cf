"""Runs: killed and taken up again, over damaged images, on servers, and into folders of others."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torchvision.models import squeezenet1_1

from fxcore.errors import FxError
from fxcore.images.decoding import Decoder
from service.offline import extract
from service.offline.outputs.index import Index
from tests.e2e.forked import Forked, script
from tests.service.cli.running import fxserve
from tests.service.offline.conftest import (
    EXTRACT,
    SETTINGS,
    archive,
    assert_right,
    errors,
    job,
    numbered,
    places,
    png,
    rows,
    shards,
)


def begin(root: Path | str, out: Path, **environment: str) -> Forked:
    """A run in a process of its own, which writes to the files ``stdout`` and ``stderr`` beside ``out``."""
    command = f"fxserve extract {root} {EXTRACT} --out {out} --shard-rows 4"
    variables = {**os.environ, "FXSERVE_COMPUTE_THREADS": "1", **environment}
    return Forked(command.split(), variables, out.parent / "stdout", out.parent / "stderr")


@pytest.mark.exhaustive
def test_limits_and_stores_of_a_server_are_not_those_of_a_run(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Each of three images is computed by itself after the batch fails, over what a server of two would take."""
    root, out, store = folder(3), tmp_path / "out", tmp_path / "store"
    (root / "broken.png").write_bytes(png(0)[:500])
    run = begin(
        root,
        out,
        FXSERVE_EXTRACTORS=str(store),
        FXSERVE_MAX_STORED_EXTRACTORS="1",
        FXSERVE_MAX_INFLIGHT="2",
        FXSERVE_MAX_INFLIGHT_BYTES="1",
        FXSERVE_MAX_RESPONSE_BYTES="1",
        FXSERVE_REQUEST_TIMEOUT="0.001",
        FXSERVE_MODELS="resnet18",
        FXSERVE_PRELOAD="resnet18:layer4",
        FXSERVE_API_KEYS_FILE=str(tmp_path / "keys"),
    )
    assert (run.wait(600), (tmp_path / "stderr").read_text()) == (0, "")
    assert f"{out}: 3 of 4 images in 1 shard, 1 could not be read" in (tmp_path / "stdout").read_text()
    assert not store.exists()


@pytest.mark.exhaustive
def test_a_run_that_is_killed_twice_loses_and_repeats_nothing(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(60), tmp_path / "out"
    (root / "broken.png").write_bytes(png(0)[:500])
    for stop_at in (2, 6):
        run = begin(root, out)
        while run.poll() is None and len(list(out.glob("shard-*.safetensors"))) < stop_at:
            time.sleep(0.01)
        run.kill()
        assert run.wait(60) == -signal.SIGKILL, (tmp_path / "stderr").read_text()
    Index(out).close()  # takes back what a transaction had not finished
    counted = {shard for shard, _ in places(out).values()}
    before = {name: (out / name).read_bytes() for name in counted}
    assert 4 <= len(places(out)) < 60

    run = begin(root, out)
    assert (run.wait(600), (tmp_path / "stderr").read_text()) == (0, "")
    said = (tmp_path / "stdout").read_text()
    assert f"{out}: 60 of 61 images in 15 shards, 1 could not be read: see {out}/errors.jsonl" in said
    assert_right(rows(out), numbered(root), reference)
    assert list(errors(out)) == [str(root / "broken.png")]
    assert {name: (out / name).read_bytes() for name in counted} == before  # what counted was not touched again
    others = sorted(file.name for file in out.iterdir() if not file.name.startswith("shard-"))
    assert others == ["errors.jsonl", "index.sqlite", "spec.json"]


TERMINATED = """
import os, signal, sys
from pathlib import Path
from service.offline import extract
from tests.service.offline.conftest import SETTINGS, job

reports = []

def report(images, done, unreadable):
    reports.append(done)
    if len(reports) == 2:
        os.kill(os.getpid(), signal.SIGTERM)

root, out, reduce = sys.argv[1:]
try:
    extract(job(Path(out), Path(root), shard_rows=100, reduce=reduce or None), SETTINGS, report)
finally:
    print(reports[-1])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduce", [None, "mean"])
def test_a_run_that_is_terminated_keeps_its_finished_work(
    reduce: str | None, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The first shard is not full, and statistics are committed once a minute."""
    root, out = folder(20), tmp_path / "out"
    assert script(TERMINATED, tmp_path, str(root), str(out), reduce or "").wait(300) == 143, (
        tmp_path / "stderr"
    ).read_text()
    with closing(Index(out)) as index:
        assert index.counts() == (20, int((tmp_path / "stdout").read_text()), 0)
    assert extract(job(out, root, shard_rows=100, reduce=reduce), SETTINGS).done == 20


@pytest.mark.exhaustive
def test_sigterm_ends_a_run_that_still_looks_for_its_first_image(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        run = begin(f"http://127.0.0.1:{silent.getsockname()[1]}/photos/*", tmp_path / "out")
        connection, _ = silent.accept()
        with connection:
            run.send_signal(signal.SIGTERM)
            assert run.wait(20) == 143


@pytest.mark.exhaustive
def test_what_a_kill_may_leave_behind_is_put_right(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(10), tmp_path / "out"
    extract(job(out, root), SETTINGS)
    first = {shard for shard, _ in places(out).values()}
    assert first == {f"shard-00000{n}.safetensors" for n in range(3)}
    (out / "shard-000000.safetensors").unlink()  # its rows are done again
    damaged = out / "shard-000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (out / "shard-000003.safetensors").write_bytes(b"in place, and not in the index yet")
    (out / "shard-000004.safetensors.part").write_bytes(b"half")
    (out / "errors.jsonl").write_bytes(b'{"path": "half a li')
    made = extract(job(out, root), SETTINGS)
    assert (made.images, made.done, made.unreadable, made.shards) == (10, 10, 0, 3)
    assert_right(rows(out), numbered(root), reference)
    assert errors(out) == {}
    assert not list(out.glob("*.part"))


# Too few for spec.json, the index or the shard.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kilobytes", [0, 4, 8, 40])
def test_a_folder_that_cannot_be_written_is_named_and_gone_on_with_later(
    kilobytes: int, folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(20), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, hard))
    try:
        done = fxserve("extract", root, *EXTRACT.split(), "--out", out, "--shard-rows", 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.exit_code == 1
    assert done.stderr.startswith(f"fxserve: {out} cannot be written: ")
    assert done.stderr.count("\n") == 1
    if not kilobytes:
        (out / "spec.json.part").write_text("{")  # what a kill at that moment leaves
    extract(job(out, root, shard_rows=20), SETTINGS)
    assert_right(rows(out), numbered(root), reference)
    assert not list(out.glob("*.part"))


def test_images_that_cannot_be_read_are_listed_and_tried_again(
    folder: Callable[..., Path], tmp_path: Path, reference: Callable[..., Any]
) -> None:
    root, out = folder(9), tmp_path / "out"
    for name, data in (("003.png", png(3)[:700]), ("004.png", b""), ("005.png", b"junk")):
        next(root.rglob(name)).write_bytes(data)
    (root / "shut.png").symlink_to(root / "nowhere")
    made = extract(job(out, root), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (10, 6, 4)
    listed = {Path(path).name: reason for path, reason in errors(out).items()}
    assert "truncated" in listed.pop("003.png")
    assert listed == {
        "004.png": "the image is empty (0 bytes)",
        "005.png": "these 4 bytes are not an image; send one of JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF",
        "shut.png": "No such file or directory",
    }
    for number in (3, 4, 5):
        next(root.rglob(f"{number:03d}.png")).write_bytes(png(number))
    (root / "shut.png").unlink()
    (root / "010.png").write_bytes(png(10))  # new since
    made = extract(job(out, root), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (10, 10, 0)
    assert_right(rows(out), numbered(root), reference)
    assert errors(out) == {}


def test_an_image_that_fails_in_an_unknown_way_is_listed(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = folder(6), tmp_path / "out"
    whole = Decoder.image

    def failing(self: Decoder, data: bytes, *options: Any) -> torch.Tensor:
        if data == png(4):
            raise ZeroDivisionError("of a decoder")
        return whole(self, data, *options)

    monkeypatch.setattr(Decoder, "image", failing)
    made = extract(job(out, root), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (6, 5, 1)
    assert errors(out) == {str(root / "004.png"): "ZeroDivisionError: of a decoder"}


def test_archives_and_folders_together(tmp_path: Path, reference: Callable[..., Any]) -> None:
    numbers = {f"{tmp_path}/1.png": 1}
    (tmp_path / "1.png").write_bytes(png(1))
    for name, mode in (("a.tar", "w"), ("b.tar.gz", "w:gz")):
        archive(tmp_path / name, {f"{number}.png": png(number) for number in (5, 2, 7)}, mode)
        numbers |= {f"{tmp_path}/{name}/{number}.png": number for number in (5, 2, 7)}
    extract(job(tmp_path / "out", tmp_path / "*.tar", tmp_path / "*.tar.gz", tmp_path / "1.png"), SETTINGS)
    assert_right(rows(tmp_path / "out"), numbers, reference)


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two images, and the folder of their features; a third image that came later."""
    root, out = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("made") / "out"
    for number in (0, 1):
        (root / f"{number:03d}.png").write_bytes(png(number))
    extract(job(out, root), SETTINGS)
    (root / "009.png").write_bytes(png(9))
    return root, out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"spec": {"return_nodes": {"features.12": "top", "features.5": "mid"}}}, "made with return_nodes"),
        ({"spec": {"image_size": 64}}, "made with image_size None, not 64"),
        ({"spec": {"model": "squeezenet1_0"}}, "made with model squeezenet1_1, not squeezenet1_0"),
        ({"pool": "max"}, "made with pool avg, not max"),
        (
            {"preprocess": "pil"},
            r"made with preprocess default, not pil; images preprocessed by .*decode_image.*PIL image",
        ),
        ({"format": "npz"}, "made with format safetensors, not npz"),
    ],
    ids=str,
)
def test_a_folder_of_something_else_is_refused_and_left_alone(
    changed: dict[str, Any], said: str, extracted: tuple[Path, Path]
) -> None:
    root, out = extracted
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(FxError, match=said):
        extract(job(out, root, **changed), SETTINGS)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_the_index_of_another_folder_is_refused(tmp_path: Path, reference: Callable[..., Any]) -> None:
    """Its images would get the rows of others: their shards have the same names and sizes."""
    roots, outs = (tmp_path / "one", tmp_path / "two"), (tmp_path / "out1", tmp_path / "out2")
    for number, (root, out) in enumerate(zip(roots, outs, strict=True)):
        root.mkdir()
        (root / f"{number}.png").write_bytes(png(number))
        extract(job(out, root), SETTINGS)
    index, other = (out / "index.sqlite" for out in outs)
    before = index.read_bytes()
    index.write_bytes(other.read_bytes())
    with pytest.raises(FxError, match=r"out1/index.sqlite is of another folder; put back its own, or remove it"):
        extract(job(outs[0], *roots), SETTINGS)
    index.write_bytes(before)
    extract(job(outs[0], *roots), SETTINGS)
    assert_right(rows(outs[0]), numbered(tmp_path), reference)
    index.unlink()
    extract(job(outs[0], *roots), SETTINGS)
    assert_right(rows(outs[0]), numbered(tmp_path), reference)


def test_a_folder_whose_default_preprocessing_was_another_is_refused(extracted: tuple[Path, Path]) -> None:
    root, out = extracted
    before = (out / "spec.json").read_bytes()
    with pytest.raises(FxError, match=r"images preprocessed by weights.*decode_image.*, not weights.*PIL image"):
        extract(job(out, root), SETTINGS.model_copy(update={"preprocess": "pil"}))
    assert (out / "spec.json").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("images", None, "made with images preprocessed by an older fxserve, not weights"),
        ("fingerprint", "0" * 32, r"made with fingerprint 0+ \(of another version of the model, fxserve"),
    ],
)
def test_a_folder_of_another_version_is_refused(
    key: str, value: str | None, said: str, extracted: tuple[Path, Path], tmp_path: Path
) -> None:
    root, out = extracted[0], shutil.copytree(extracted[1], tmp_path / "out")
    written = json.loads((out / "spec.json").read_text())
    assert written.pop(key)
    (out / "spec.json").write_text(json.dumps(written if value is None else {**written, key: value}))
    with pytest.raises(FxError, match=said):
        extract(job(out, root), SETTINGS)


def test_weights_of_the_same_name_that_were_trained_further_are_noticed(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    root, out = folder(2), tmp_path / "out"
    settings = SETTINGS.model_copy(update={"weights_dir": tmp_path})
    torch.manual_seed(0)
    model = squeezenet1_1()
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    mine = {"spec": {"weights": "file:mine.pth"}}
    assert [extract(job(out, root, **mine), settings).done for _ in range(2)] == [2, 2]
    with torch.no_grad():
        for values in model.parameters():
            values.mul_(1 + 0.003 * torch.randn_like(values))
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    with pytest.raises(FxError, match="weights of the same name that give different values"):
        extract(job(out, root, **mine), settings)


def test_shards_are_not_overwritten_after_a_million(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(3), tmp_path / "out"
    extract(job(out, root, shard_rows=1), SETTINGS)
    names = [f"shard-{number}.safetensors" for number in (999999, 1000000, 1000001)]
    with sqlite3.connect(out / "index.sqlite") as database:
        for number, name in enumerate(names):
            (out / f"shard-{number:06d}.safetensors").rename(out / name)
            database.execute("UPDATE images SET shard = ? WHERE shard LIKE ?", (name, f"shard-{number:06d}%"))
    database.close()
    before = shards(out)
    extract(job(out, folder(6), shard_rows=1), SETTINGS)
    assert before.items() <= shards(out).items()
    assert len(set(places(out).values())) == 6


def test_a_folder_may_be_a_url(folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    extract(job(out.as_uri(), folder(5).as_uri()), SETTINGS)
    first = rows(out)
    assert len(first) == 5
    files = {file.name: file.stat().st_mtime_ns for file in out.glob("shard-*")}
    assert extract(job(out.as_uri(), folder(5).as_uri()), SETTINGS).done == 5
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("shard-*")} == files
    with pytest.raises(FxError, match="made with"):
        extract(job(out.as_uri(), folder(5), pool="max"), SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_places_of_padded_images_are_a_column(folder: Callable[..., Path], tmp_path: Path) -> None:
    """The images have 80 x 64 pixels, which become 60 x 48 in the middle of 64 x 48."""
    root, out = folder(2), tmp_path / "out"
    assert extract(job(out, root, spec={"image_size": (48, 64), "fit": "pad"}), SETTINGS).done == 2
    assert [row["valid_box"].tolist() for row in rows(out).values()] == [[2, 0, 62, 48]] * 2
    with pytest.raises(FxError, match="made with fit pad, not stretch"):
        extract(job(out, root, spec={"image_size": (48, 64), "fit": "stretch"}), SETTINGS)


@pytest.mark.exhaustive
def test_maps_of_different_sizes_go_into_shards_of_their_own(folder: Callable[..., Path], tmp_path: Path) -> None:
    root, out = folder(6), tmp_path / "out"
    for number in (1, 2):
        file = root / f"{number:03d}.png"
        PIL.Image.open(io.BytesIO(png(number))).rotate(90, expand=True).save(file)
    spec = {"model": "lraspp_mobilenet_v3_large", "return_nodes": {"backbone.4": "top"}}
    made = extract(job(out, root, spec=spec, pool="none"), SETTINGS)
    assert made.outputs[0]["shape"] is None
    shapes = {Path(path).name: values["top"].shape for path, values in rows(out).items()}
    wide, tall = (40, 65, 82), (40, 82, 65)
    assert shapes == {f"{n:03d}.png": tall if n in (1, 2) else wide for n in range(6)}
