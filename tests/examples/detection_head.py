"""A small detection head over a feature pyramid: where in a picture is the patch?

    python tests/examples/detection_head.py [--server URL] [--model fasterrcnn_resnet50_fpn] [--level P4]

Pictures of noise with a bright patch are sent to the server, which returns a level of the model's pyramid. Two
convolutions are trained on it to predict for each position whether the patch's centre is there, and the patch's size.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss

from service.client import Client


class Head(nn.Module):
    """A head from ``[N, C, H, W]`` to logits of the centre's position and relative sizes, ``[N, H * W]`` each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(channels), nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(32, 2, 1)

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        both = self.out(self.layers(maps)).flatten(2)
        return both[:, 0], both[:, 1]


def pictures(count: int, side: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.float32]]:
    """Return pictures ``[N, side, side, 3]``, centres ``[N, 2]`` (row, column) and sizes ``[N]`` in pixels."""
    random = np.random.default_rng(0)
    images = random.integers(0, 60, (count, side, side, 3), dtype=np.uint8)
    sizes = random.integers(side // 6, side // 3, count)
    centres = np.stack([random.integers(sizes // 2, side - sizes // 2) for _ in range(2)], axis=1)
    for image, (row, column), size in zip(images, centres, sizes, strict=True):
        half = size // 2
        image[row - half : row + half, column - half : column + half] = random.integers(150, 256, 3)
    return images, centres, sizes.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="fasterrcnn_resnet50_fpn")
    parser.add_argument("--level", default="P4")
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--pictures", type=int, default=120)
    options = parser.parse_args()

    side = 256
    images, centres, sizes = pictures(options.pictures, side)
    with Client(options.server) as client:
        extractor = client.extractor(options.model, [options.level], weights=options.weights)
        maps = extractor(images, preprocess="none", as_torch=True)[options.level]
    cells = maps.shape[-1]
    row, column = (torch.from_numpy(centres * cells // side)).unbind(1)
    places, shares = row * cells + column, torch.from_numpy(sizes / side)
    train = slice(0, len(maps) * 3 // 4)
    test = slice(train.stop, None)

    torch.manual_seed(0)
    head = Head(maps.shape[1])
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(60):
        logits, said = head(maps[train])
        at_centre = said.gather(1, places[train, None])[:, 0]
        loss = cross_entropy(logits, places[train]) + smooth_l1_loss(at_centre, shares[train])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    head.eval()
    with torch.inference_mode():
        logits, said = head(maps[test])
    found = logits.argmax(1)
    distance = torch.hypot((found // cells - row[test]).float(), (found % cells - column[test]).float())
    off = (said.gather(1, found[:, None])[:, 0] - shares[test]).abs().mean() * side
    hits = (distance <= 1.5).float().mean()
    print(
        f"{hits:.2f} of {len(found)} patches found within a cell of {side // cells} pixels; "
        f"size off by {off:.0f} pixels"
    )


if __name__ == "__main__":
    main()
