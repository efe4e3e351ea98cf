"""Weights that processes share by mapping a file."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from torch import nn
from torch.testing import assert_close

from service.engine.memory.shared_weights import share
from service.settings import SHARED_WEIGHTS
from tests.service.engine.running import MakeEngine, built, until


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = torchvision.models.mobilenet_v3_small().eval()
    return made


def test_values_stay_and_memory_is_that_of_the_file(model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    before = copy.deepcopy(model)
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    share(model, file)
    assert not [name for name, value in model.state_dict().items() if value.data_ptr() == places[name]]
    assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    x = torch.rand(2, 3, 64, 64)
    assert_close(model(x), before(x), rtol=0, atol=0)
    # A second process finds the file; what one writes is its own.
    other = copy.deepcopy(before)
    share(other, file)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert_close(model(x), before(x), rtol=0, atol=0)
    assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_pages_are_those_of_the_file(model: nn.Module, tmp_path: Path) -> None:
    share(model, tmp_path / "weights")
    places = {value.data_ptr() for value in model.state_dict().values() if value.dim() > 0}
    of_others = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            first, last = (int(end, 16) for end in fields[0].split("-"))
            here, path = {place for place in places if first <= place < last}, fields[-1]
        elif here and fields[0] == "Anonymous:":
            of_others.append((path, int(fields[1])))
    assert of_others == [(str(tmp_path / "weights"), 0)]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    place = first.weight.data_ptr()
    share(model, tmp_path / "weights")
    assert first.weight.data_ptr() != place
    assert second.weight is first.weight
    assert second.weight.data_ptr() == first.weight.data_ptr()


@pytest.mark.parametrize("content", [b"", b"\1" * (64 * 1024 * 1024)], ids=["short", "other values"])
def test_a_file_with_other_values_is_not_used(model: nn.Module, tmp_path: Path, content: bytes) -> None:
    """Such as that of weights in a folder of the operator, which were replaced since another process read them."""
    file = tmp_path / "weights"
    file.write_bytes(content)
    before = copy.deepcopy(model.state_dict())
    share(model, file)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert file.read_bytes() == content


def test_without_a_folder_they_are_not_shared(model: nn.Module, tmp_path: Path) -> None:
    before = copy.deepcopy(model.state_dict())
    share(model, tmp_path / "none" / "weights")
    assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_of_two_writers_the_first_wins(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes load a model at the same time, as when both preload it."""
    file = tmp_path / "weights"
    share(copy.deepcopy(model), file)
    first = file.stat().st_ino
    monkeypatch.setattr(Path, "exists", lambda self: False)
    share(model, file)
    assert file.stat().st_ino == first
    assert [one.name for one in tmp_path.iterdir()] == ["weights"]


def test_a_full_disk_is_left_alone(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=size))
    share(model, tmp_path / "weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.anyio
async def test_files_go_with_their_models(engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_WEIGHTS, str(tmp_path))
    async with engine() as running:
        record = await built(running)
        assert len(list(tmp_path.iterdir())) == 1
        running.models.forget(("alexnet", "random", "float32"))  # which another process may have
        assert len(list(tmp_path.iterdir())) == 1
        await running.extractors.delete(record.id)
        await until(lambda: not list(tmp_path.iterdir()))
