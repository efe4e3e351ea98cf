"""What compiled artifacts are told apart by, and the child processes that make them."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxcore import trace
from fxcore.backends import process
from fxcore.backends.artifacts import _key, may_be_mapped
from tests.processes import running


@dataclass
class Config:
    slope: float = 0.5


class Configured(nn.Sequential):
    """Keeps whatever it is given, and is kept whole."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Attends(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


def encoder(**config: Any) -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **config))


def kept(**attributes: Any) -> nn.Module:
    return nn.Sequential(Configured(**attributes))


def key_of(model: nn.Module) -> str:
    """Of ``model`` with the same weights in every process."""
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    module = trace(model, leaf_modules=[Configured])
    return _key(module, {"backend": "openvino"}, [torch.zeros(2, 4, 8)], [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: Attends(2), lambda: Attends(4)),
        (encoder, lambda: encoder(norm_first=True)),
        (encoder, lambda: encoder(activation="gelu")),
        (lambda: nn.Sequential(nn.BatchNorm1d(4)), lambda: nn.Sequential(nn.BatchNorm1d(4, eps=0.1))),
        (lambda: kept(f=F.relu), lambda: kept(f=F.gelu)),
        (lambda: kept(f=functools.partial(F.elu, alpha=1)), lambda: kept(f=functools.partial(F.elu, alpha=2))),
        (lambda: kept(sizes=[1, (2, 3)]), lambda: kept(sizes=[1, (2, 4)])),
        (lambda: kept(by={"a": 1}), lambda: kept(by={"a": True})),
        (lambda: kept(config=Config()), lambda: kept(config=Config(0.25))),
        (lambda: kept(dtype=torch.float32), lambda: kept(dtype=torch.float64)),
        (lambda: kept(scale=torch.tensor(2.0)), lambda: kept(scale=torch.tensor(3.0))),
    ],
)
def test_layers_that_are_configured_otherwise(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    assert key_of(one()) == key_of(one())
    assert key_of(one()) != key_of(other())


def everything() -> nn.Module:
    names = {f"name{i}" for i in range(20)}
    functions = {"a": functools.partial(F.elu, alpha=1), "b": lambda x: x, "c": key_of}
    return nn.Sequential(encoder(), kept(names=names, functions=functions, config=Config(), other=object()))


@pytest.mark.exhaustive
def test_other_processes_tell_them_apart_in_the_same_way() -> None:
    here = Path(__file__).parents[3]
    program = f"from {__name__} import everything, key_of; print(key_of(everything()))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.check_output([sys.executable, "-c", program], cwd=here, env=environment, text=True).strip()
    assert other == key_of(everything())


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
store:/exports {folder}/cache\\040of\\040all nfs4 rw,vers=4.2 0 0
tmpfs {folder}/cache\\040of\\040all/memory tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "allowed"),
    [("cache", True), ("cache of all/openvino-1", False), ("cache of all/memory/openvino-1", True)],
)
def test_artifacts_on_network_file_systems_are_not_mapped(tmp_path: Path, place: str, allowed: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(folder=tmp_path.resolve()))
    assert may_be_mapped(tmp_path / place, mounts) == allowed
    assert not may_be_mapped(tmp_path / place, tmp_path / "no such file")


ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, subprocess, time
from fxcore.backends import process

def work(folder):
    compiler = subprocess.Popen(["sleep", "1000"])  # as inductor runs a C++ compiler
    (folder / "begun").write_text(f"{os.getpid()} {compiler.pid}")
    (folder / "begun").rename(folder / "running")
    time.sleep(1000)

if __name__ == "__main__":
    process.main(work)
"""

PARENT = """
from pathlib import Path
from fxcore.backends import process

process.run("program", Path("making"), {})
"""


KILLED = """
import os, signal, tempfile
from fxcore.backends import process

def work(folder):
    (folder / "temporary").write_text(tempfile.mkdtemp())
    print("Applying Fast Bias correction 100% 49/49", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    process.main(work)
"""


@pytest.mark.exhaustive
def test_a_child_that_is_killed_says_so_and_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.syspath_prepend(tmp_path)
    making = tmp_path / "making"
    making.mkdir()
    with pytest.raises(process.ProcessFailed, match=r"was killed by SIGKILL, probably for lack of memory; last: App"):
        process.run("killed", making, {})
    temporary = Path((making / "temporary").read_text())
    assert temporary.is_relative_to(making)
    assert sorted(file.name for file in making.iterdir()) == ["log", "temporary"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSEGV, "was killed by SIGSEGV, a crash in a native library"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (40, "was killed by signal 40"),
    ],
)
def test_only_a_crash_is_called_one(number: int, said: str) -> None:
    assert process._killed(number) == said


@pytest.mark.exhaustive
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    making = tmp_path / "making"
    making.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    while not (making / "running").exists():
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.05)
    processes = [int(text) for text in (making / "running").read_text().split()]
    try:
        assert all(map(running, processes))
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while any(map(running, processes)) or making.exists():
            assert time.monotonic() < deadline, "it goes on without its parent"
            time.sleep(0.05)
    finally:
        for number in filter(running, processes):
            os.kill(number, signal.SIGKILL)
