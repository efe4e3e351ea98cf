"""What compiled artifacts are told apart by."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxcore import trace
from fxcore.backends.artifacts import _key, may_be_mapped


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
