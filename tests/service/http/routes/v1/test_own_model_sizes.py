"""Models of the operator's own that fail at some image sizes, which only running them shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.conftest import Client
from tests.service.own_models import own_models
from tests.wire import refused, sent

POSITIONS = """
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 5)
        self.places = nn.Embedding(64, 8)

    def forward(self, x):
        tokens = self.conv(x).flatten(2).transpose(1, 2)
        return self.head((tokens + self.places(torch.arange(tokens.shape[1]))).mean(1))
"""

ENTRY = """
[models.positions]
builder = "own_models:Positions"
preprocessing = { resize_size = 64, crop_size = 64 }
"""


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("features?nodes=head&image_size=96", "positions failed on an input of 3 x 96 x 96"),
        ("features?nodes=head&image_size=64&fit=native", "positions failed on an input of 3 x 64 x 96"),
        ("attributions?of=head&at=conv&image_size=96", "this part of positions failed on an input of 8 x 12 x 12"),
    ],
)
def test_a_size_at_which_the_model_fails_is_an_error_of_the_request(
    query: str,
    shown: str,
    tmp_path: Path,
    make_client: Callable[..., Client],
    photos: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the log has no traceback of it."""
    image = sent(photos["chelsea"])
    with own_models(tmp_path, POSITIONS, ENTRY):
        client = make_client(models_dir=tmp_path)
        served = client.post("/v1/models/positions/features?nodes=head&image_size=48", **image)
        failed = client.post(f"/v1/models/positions/{query}", **image)
    assert served.status_code == 200, served.text
    reason = "IndexError: index out of range in self; the usual size of positions is 64 x 64"
    refused(failed, "bad-tensor", f"{shown}: {reason}")
    assert not any(record.exc_info for record in caplog.records)
