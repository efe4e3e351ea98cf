"""What ``fxserve serve`` tries before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxcore.errors import FxError
from service.cli.commands import serving
from service.engine.extractors.store import Store
from service.settings import Settings
from tests.small_disk import small_disk


def test_a_full_disk_ends_the_start_only_where_there_is_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk.path / "store")
        Store(url).check()
        disk.fill()
        serving._check_dependencies(Settings(extractors=url))
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "No space left on device; existing extractors are served, but none can be added or deleted" in said
        with pytest.raises(FxError, match=r"cannot be written: OSError: \[Errno 28\] No space left"):
            serving._check_dependencies(Settings(extractors=str(disk.path / "other")))
        disk.free()
        serving._check_dependencies(Settings(extractors=url))
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("host", ["no such host", "a..b"])
def test_a_host_that_cannot_be_resolved_is_refused(host: str) -> None:
    with pytest.raises(FxError, match=rf"^host: '{host}' cannot be resolved; use an address of this machine"):
        serving._check_dependencies(Settings(host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::"])
def test_addresses_of_this_machine(host: str) -> None:
    serving._check_dependencies(Settings(host=host))


def test_extractors_to_preload_must_be_readable() -> None:
    serving._check_dependencies(Settings(preload=("resnet18@random:C4,C5", "resnet18@file:mine.pth", "resnet18")))
    with pytest.raises(FxError, match=r"^FXSERVE_PRELOAD: 'resnet18:' is not MODEL:NODE,NODE, such as resnet50:C4,C5"):
        serving._check_dependencies(Settings(preload=("resnet18@random:C4", "resnet18:")))
    with pytest.raises(FxError, match=r"^FXSERVE_PRELOAD: 'x{100}': String should have at most [0-9]+ characters$"):
        serving._check_dependencies(Settings(preload=(600 * "x" + ":C4",)))


def test_a_missing_folder_of_weights_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serving._check_dependencies(Settings(weights_dir=tmp_path))
    assert capsys.readouterr().err == ""
    serving._check_dependencies(Settings(weights_dir=tmp_path / "gone"))  # it may be mounted later
    assert f"FXSERVE_WEIGHTS_DIR: there is no folder {tmp_path / 'gone'}; " in capsys.readouterr().err
