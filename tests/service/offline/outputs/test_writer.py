"""Writing that fails while a run goes on."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import torch

from fxcore.errors import FxError
from service.offline.batches import Result
from service.offline.folder import Folder
from service.offline.outputs.shards import shard_format
from service.offline.outputs.working_folder import WorkingFolder
from service.offline.outputs.writer import Writer


def test_a_shard_that_cannot_be_written_fails_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = WorkingFolder(Folder(tmp_path))
    writer = Writer(folder, shard_format("safetensors", ["C5"], [torch.float32]), {}, 1)
    (tmp_path / "shard-000000.safetensors").mkdir()  # nothing can be renamed to it

    async def run() -> None:
        for number in range(2):
            await writer.add(Result([f"{number}.png"], {"C5": torch.ones(1, 2)}, []))

    with pytest.raises(FxError, match="cannot be written: Is a directory"):
        asyncio.run(run())
    writer.close()
    folder.close()
    gc.collect()
    assert not caplog.records  # of asyncio, about an error that nothing asked for
