"""``fxserve extract`` over servers: the same rows, and a run that another kind of run goes on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxcore.errors import FxError
from service.offline import extract
from tests.e2e.conftest import Server
from tests.service.offline.conftest import SETTINGS, assert_right, folder, job, png, rows  # noqa: F401


def test_a_server_does_what_this_process_would(
    server: Server,
    folder: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    reference: Callable[..., Any],
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


def test_what_a_server_refuses_is_told(server: Server, folder: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(FxError, match=f"{server.url}: squeezenet1_1 has no node 'layer9'"):
        extract(job(tmp_path / "out", folder(1), servers=(server.url,), spec={"return_nodes": ["layer9"]}), SETTINGS)
    assert not (tmp_path / "out").exists()
