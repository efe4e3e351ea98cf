"""A typical script without fxserve: a DataLoader over files, timm's model at one size, and a file of class tokens.

python timm_script.py ARCHITECTURE HEIGHTxWIDTH FOLDER OUT WORKERS
"""

from __future__ import annotations

import sys
from pathlib import Path

import safetensors.torch
import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.io import decode_image
from torchvision.transforms.v2 import functional as F

BATCH = 16


class Photographs(Dataset[Tensor]):
    """The JPEG files of a folder, resized to one size and normalised for the model's weights."""

    def __init__(self, folder: str, architecture: str, size: list[int]) -> None:
        self._files = sorted(Path(folder).glob("*.jpg"))
        self._size = size
        self._config = timm.data.resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(architecture).to_dict())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        pixels = decode_image(str(self._files[index]), mode="RGB")
        mode = F.InterpolationMode(self._config["interpolation"])
        resized = F.resize(pixels, self._size, mode, antialias=True)
        result: Tensor = F.normalize(resized / 255, self._config["mean"], self._config["std"])
        return result


def main() -> None:
    architecture, text, folder, out, workers = sys.argv[1:6]
    size = [int(side) for side in text.split("x")]
    torch.manual_seed(0)
    model = timm.create_model(architecture, img_size=size, global_pool="token").eval()
    loader = DataLoader(Photographs(folder, architecture, size), BATCH, num_workers=int(workers))
    made = []
    with torch.inference_mode():
        made += [model.forward_features(batch)[:, 0] for batch in loader]
    safetensors.torch.save_file({"features": torch.cat(made)}, out)


if __name__ == "__main__":
    main()
