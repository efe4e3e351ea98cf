"""Published weights that are not in the cache: downloads, checked, and what stops them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from fxcore import ModelEntry, get_model, load_model
from fxcore.errors import WeightsUnavailable
from fxcore.models import downloads
from tests.fxcore.models.test_weights import SMALL, drawn
from tests.processes import QuietHandler, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server on this machine: its address and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Files(QuietHandler, SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(folder))

    with serving(Files) as url:
        yield url, folder


def at(url: str) -> ModelEntry:
    """The small model, with its weights published somewhere else."""
    entry = get_model(SMALL)
    info = dataclasses.replace(entry.published["IMAGENET1K_V1"], url=url)
    return dataclasses.replace(entry, published={"IMAGENET1K_V1": info})


def test_a_download_is_checked_and_kept(served: tuple[str, Path]) -> None:
    address, folder = served
    buffer = io.BytesIO()
    state = drawn(torchvision.models.shufflenet_v2_x0_5)
    torch.save(state, buffer)
    digits = hashlib.sha256(buffer.getvalue()).hexdigest()[:8]
    file = folder / f"small-{digits}.pth"
    file.write_bytes(buffer.getvalue())
    entry = at(f"{address}/{file.name}")
    info = entry.weights_info("DEFAULT")
    assert not info.cached
    loaded = load_model(entry, "IMAGENET1K_V1").state_dict()
    assert info.cached
    assert info.file.read_bytes() == buffer.getvalue()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    file.unlink()
    load_model(entry, "IMAGENET1K_V1")  # from the cache now


def test_a_download_with_another_hash_is_refused(served: tuple[str, Path], torch_home: Path) -> None:
    address, folder = served
    torch.save(torchvision.models.get_model(SMALL, weights=None).state_dict(), folder / "small-deadbeef.pth")
    entry = at(f"{address}/small-deadbeef.pth")
    with pytest.raises(WeightsUnavailable, match="hash") as caught:
        load_model(entry, "IMAGENET1K_V1")
    assert caught.value.extra["file"] == "small-deadbeef.pth"
    assert [p for p in torch_home.rglob("*") if p.is_file()] == []
    assert not entry.weights_info("DEFAULT").cached


def test_files_of_downloads_that_were_killed_are_deleted(served: tuple[str, Path], torch_home: Path) -> None:
    checkpoints = torch_home / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    old, new = (checkpoints / f".small.pth.{name}.part" for name in ("old", "new"))
    other = checkpoints / ".another.pth.old.part"
    for file, hours in ((old, 2), (new, 0), (other, 2)):
        file.touch()
        os.utime(file, (time.time() - 3600 * hours,) * 2)
    (served[1] / "small.pth").write_bytes(b"weights")
    downloads.download(f"{served[0]}/small.pth", checkpoints / "small.pth")
    assert {file.name for file in checkpoints.iterdir()} == {"small.pth", new.name, other.name}


def test_a_download_that_is_not_there(served: tuple[str, Path], torch_home: Path) -> None:
    with pytest.raises(WeightsUnavailable, match="404"):
        load_model(at(f"{served[0]}/small-deadbeef.pth"), "IMAGENET1K_V1")
    assert [p for p in torch_home.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("host", ["127.0.0.1:9", "weights.invalid"])
def test_without_a_network_the_error_comes_at_once(host: str, torch_home: Path) -> None:
    entry = at(f"http://{host}/models/small-deadbeef.pth")
    started = time.monotonic()
    with pytest.raises(WeightsUnavailable) as caught:
        load_model(entry, "IMAGENET1K_V1")
    assert time.monotonic() - started < 60
    folder = str(torch_home / "hub" / "checkpoints")
    assert caught.value.extra == {"file": "small-deadbeef.pth", "folder": folder}
    for part in ("small-deadbeef.pth", folder, "weights=random"):
        assert part in caught.value.detail


@pytest.mark.parametrize("response", [None, b"nonsense\r\n\r\n", b""])
def test_a_server_that_makes_no_sense(response: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accepts and says nothing, one that speaks no HTTP, one that hangs up."""
    monkeypatch.setattr(downloads, "_REACH_TIMEOUT", 0.5)
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                if response is None:
                    given_up.wait(120)
                else:
                    connection.sendall(response)

        thread = threading.Thread(target=speak)
        thread.start()
        started = time.monotonic()
        with pytest.raises(WeightsUnavailable, match="could not be downloaded"):
            load_model(at(f"http://127.0.0.1:{listener.getsockname()[1]}/small-deadbeef.pth"), "IMAGENET1K_V1")
        assert time.monotonic() - started < 60
        given_up.set()
        thread.join()
