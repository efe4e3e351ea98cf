"""``fxserve extract`` over servers: the same rows, and a run that another kind of run goes on with."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from fxcore.errors import FxError
from service.client import tensors
from service.offline import extract
from service.offline.runners import remote
from tests.conftest import Reference
from tests.e2e.conftest import Server
from tests.hostile_images import saved
from tests.service.offline.conftest import SETTINGS, assert_right, csv, folder, job, png, regions, regions_in, rows
from tests.service.offline.inputs.test_boxes import BOXES
from tests.service.offline.inputs.test_boxes import assert_right as boxes_right
from tests.service.offline.inputs.test_points_and_masks import mask_png
from tests.wire import b64

__all__ = ["folder"]


@pytest.mark.exhaustive
def test_a_server_does_what_this_process_would(
    server: Server, folder: Callable[..., Path], tmp_path: Path, reference: Reference
) -> None:
    root, out = folder(10), tmp_path / "out"
    (root / "broken.png").write_bytes(b"junk")
    made = extract(job(out, root, servers=(server.url, server.url + "/")), SETTINGS)
    assert (made.images, made.done, made.unreadable, made.shards) == (11, 10, 1, 3)
    assert '"error":"these 4 bytes are not an image' in (out / "errors.jsonl").read_text()
    (root / "011.png").write_bytes(png(11))
    assert extract(job(out, root), SETTINGS).done == 11
    assert_right(rows(out), {str(file): int(file.stem) for file in root.rglob("[0-9]*.png")}, reference)
    with pytest.raises(FxError, match="made with pool avg, not max"):
        extract(job(out, root, servers=(server.url,), pool="max"), SETTINGS)


@pytest.mark.exhaustive
def test_boxes_of_a_server_and_of_this_process(
    server: Server, folder: Callable[..., Path], tmp_path: Path, reference: Reference
) -> None:
    root, out = folder(4), tmp_path / "out"
    wanted = {f"{number:03d}.png": BOXES[: 1 + number % 3] for number in (1, 2)}
    file = csv(root / "boxes.csv", {**wanted, "deep/er/003.png": [[0, 0, 81.5, 64]]})
    made = extract(regions(out, file, root, servers=(server.url,), roi_size=3), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (3, 2, 1)
    assert '"error":"box 0, [0, 0, 81.5, 64], reaches out of its image' in (out / "errors.jsonl").read_text()
    wanted["deep/er/003.png"] = BOXES
    assert extract(regions(out, csv(file, wanted), root, roi_size=3), SETTINGS).done == 3
    boxes_right(regions_in(out), {str(root / path): boxes for path, boxes in wanted.items()}, reference, size=3)


@pytest.mark.exhaustive
def test_masks_of_a_server(server: Server, folder: Callable[..., Path], tmp_path: Path, reference: Reference) -> None:
    """A mask of everything is the mean, in all three forms."""
    root, out = folder(3), tmp_path / "out"
    text = b64(mask_png())
    everything = [text, f"data:image/png;base64,{text}", {"size": [64, 80], "counts": [0, 5120]}]
    rows_of = {"001.png": everything, "002.png": [b64(b"junk")]}
    file = csv(root / "masks.csv", rows_of, "masks")
    made = extract(regions(out, file, root, pool="mask", servers=(server.url,)), SETTINGS)
    assert (made.done, made.unreadable) == (1, 1)
    assert "mask 0" in (out / "errors.jsonl").read_text()
    ((path, masked),) = regions_in(out, "mask").items()
    assert (path, [place for place, _ in masked]) == (str(root / "001.png"), [0, 1, 2])
    right = reference("resnet18", "layer3.1.relu_1", [png(1)]).mean((2, 3))[0].numpy()
    for _, values in masked:
        np.testing.assert_allclose(values["C4"], right, rtol=1e-3, atol=1e-4 * np.abs(right).max())


def noise(side: int) -> bytes:
    """A PNG that is as large as its pixels, about ``3 * side**2`` bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return saved(PIL.Image.fromarray(pixels), "PNG")


@pytest.mark.exhaustive
def test_an_image_that_a_server_finds_too_large_costs_no_other_its_place(
    start: Callable[..., Server], folder: Callable[..., Path], tmp_path: Path, reference: Reference
) -> None:
    root, out = folder(10), tmp_path / "out"
    (root / "large.png").write_bytes(noise(400))
    server = start(max_body_bytes=300_000)
    made = extract(job(out, root, servers=(server.url,)), SETTINGS)
    assert (made.images, made.done, made.unreadable) == (11, 10, 1)
    [listed] = map(json.loads, (out / "errors.jsonl").read_text().splitlines())
    assert listed["path"] == str(root / "large.png")
    assert "300,000" in listed["error"] or "300000" in listed["error"]
    assert_right(rows(out), {str(file): int(file.stem) for file in root.rglob("[0-9]*.png")}, reference)


@pytest.mark.exhaustive
def test_a_server_may_restart_and_another_one_end_for_good(
    start: Callable[..., Server],
    folder: Callable[..., Path],
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_MAX_RETRY_DELAY", 1.0)
    root, out = folder(120), tmp_path / "out"
    restarted, ended = start(), start()
    told: list[int] = []

    def report(images: int, done: int, unreadable: int) -> None:
        told.append(done)
        if len(told) == 3:
            for server in (restarted, ended):
                server.process.kill()
                server.process.wait(60)
            restarted.begin()

    made = extract(job(out, root, servers=(restarted.url, ended.url)), SETTINGS, report)
    assert (made.images, made.done, made.unreadable) == (120, 120, 0)
    assert told[2] < 120
    assert_right(rows(out), {str(file): int(file.stem) for file in root.rglob("*.png")}, reference)


def test_servers_that_prepare_images_differently_are_refused(
    server: Server, start: Callable[..., Server], folder: Callable[..., Path], tmp_path: Path
) -> None:
    other = start(preprocess="pil")
    with pytest.raises(
        FxError, match=rf"{other.url} preprocesses images by .*PIL image\), but {server.url} by .*decode_image"
    ):
        extract(job(tmp_path / "out", folder(1), servers=(server.url, other.url)), SETTINGS)
    assert not (tmp_path / "out").exists()
    made = extract(job(tmp_path / "out", folder(1), servers=(server.url, other.url), preprocess="pil"), SETTINGS)
    assert made.done == 1


def test_what_a_server_refuses_is_reported(server: Server, folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(FxError, match=f"{server.url}: squeezenet1_1 has no node 'layer9'"):
        extract(job(tmp_path / "out", folder(1), servers=(server.url,), spec={"return_nodes": ["layer9"]}), SETTINGS)
    assert not (tmp_path / "out").exists()


def test_an_answer_that_cannot_be_read_is_no_error_of_an_image(
    server: Server, folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = folder(3), tmp_path / "out"

    def report(images: int, done: int, unreadable: int) -> None:
        monkeypatch.delitem(tensors._DTYPES, "F32", raising=False)  # as if the server were newer than the client

    with pytest.raises(FxError, match=f"{server.url}: the features in the response cannot be read: .*F32"):
        extract(job(out, root, servers=(server.url,)), SETTINGS, report)
    assert (out / "errors.jsonl").read_bytes() == b""
    monkeypatch.undo()
    assert extract(job(out, root, servers=(server.url,)), SETTINGS).done == 3


@pytest.mark.exhaustive
def test_a_server_that_does_not_answer_any_more_does_not_end_the_run(
    start: Callable[..., Server], folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ATTEMPT_TIMEOUT", 2.0)
    root, out = folder(150), tmp_path / "out"
    healthy, stopped = start(), start()
    told: list[int] = []

    def report(images: int, done: int, unreadable: int) -> None:
        told.append(done)
        if len(told) == 3:
            stopped.process.send_signal(signal.SIGSTOP)

    try:
        made = extract(job(out, root, servers=(healthy.url, stopped.url)), SETTINGS, report)
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    assert (made.images, made.done, made.unreadable) == (150, 150, 0)
    assert told[2] < 150
