"""A model that is slow by the clock, and so on every machine.

``start(models_dir=slow_models(folder, slow="image = 0.1"))`` starts a server with it; a file ``SWITCH`` in ``folder``
then makes it slow, until the file is deleted.
"""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor, fx, nn

SWITCH = "slow"
"""The models are slow only while this file is there, since a server builds and runs them at its start."""


def _wait(switch: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while Path(switch).exists() and time.monotonic() < end:
        time.sleep(0.01)


@fx.wrap
def _slowly(images: Tensor, switch: str, seconds: float) -> Tensor:
    if not images.is_meta:
        _wait(switch, seconds * len(images))
    return images


class Slow(nn.Module):
    """A convolution ``stem`` that takes ``build`` seconds to be built, and ``image`` seconds for each image."""

    def __init__(self, switch: str, build: float = 0.0, image: float = 0.0) -> None:
        super().__init__()
        self.switch, self.seconds = switch, image
        self.stem = nn.Conv2d(3, 4, 3, 2)
        if not self.stem.weight.is_meta:
            _wait(switch, build)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.stem(_slowly(images, self.switch, self.seconds))
        return out


def slow_models(folder: Path, **models: str) -> Path:
    """Describe models in ``folder``, each with its arguments in TOML, as in ``slow="image = 0.1"``."""
    folder.mkdir(exist_ok=True)
    described = [
        f'[models.{name}]\nbuilder = "{__name__}:Slow"\narguments = {{ switch = "{folder / SWITCH}", {times} }}\n'
        for name, times in models.items()
    ]
    (folder / "models.toml").write_text("".join(described))
    return folder
