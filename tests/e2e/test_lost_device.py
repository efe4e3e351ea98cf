"""A process whose device is lost: its requests are answered, it ends with a status of its own, and another begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from service.http.server.lost_device import DEVICE_LOST
from tests.e2e.conftest import Server, until
from tests.wire import refused, sent

LOSES = 1001.0

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

MODEL = f"""
import torch
from torch import Tensor, nn

@torch.fx.wrap
def lose(x: Tensor) -> Tensor:
    if not x.is_meta and {LOSES} in x[:, 0, 0, 0].tolist():
        if x.is_cuda:
            x.new_zeros(1)[x.new_full((1,), 10**9, dtype=torch.long)]  # a kernel that fails: the device is lost
            torch.cuda.synchronize()
        # CUDA answers every later call with this too; here torch.cuda.synchronize fails as it does then.
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return x

class Losing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(lose(x))
"""

FEATURES = "/v1/models/losing/features?nodes=conv&weights=random&preprocess=none&pool=avg"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "losing_for_tests.py").write_text(MODEL)
    (folder / "models.toml").write_text('[models.losing]\nbuilder = "losing_for_tests:Losing"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield folder


def features(server: Server, mark: float) -> httpx.Response:
    """Features of a row whose first value is ``mark``, over a connection of its own."""
    return server.ask("POST", FEATURES, **sent(np.full((1, 3, 32, 32), mark, np.float32)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_lost_device_ends_the_process(device: str, start: Callable[..., Server], models: Path) -> None:
    server = start(models_dir=models, max_batch=1, device=device)
    assert features(server, 1).status_code == 200
    with ThreadPoolExecutor(9) as pool:
        lost = pool.submit(features, server, LOSES)
        others = [pool.submit(features, server, float(i)) for i in range(8)]
    said = "illegal memory access" if device == "cpu" else "device-side assert"
    refused(lost.result(), "not-ready", said, status=503)
    assert {response.result().status_code for response in others} <= {200, 503}
    assert server.process.wait(60) == DEVICE_LOST
    assert "the process ends with status" in server.log.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_process_that_lost_its_device_is_replaced(device: str, start: Callable[..., Server], models: Path) -> None:
    server = start(models_dir=models, device=device, workers=2)
    until(lambda: server.ready() == 2)
    first = server.children()
    assert features(server, LOSES).status_code == 503
    until(lambda: len(server.children() - first) == 1 and server.ready() == 2)
    assert len(server.children() & first) == 1
    assert {features(server, float(i)).status_code for i in range(20)} == {200}
