"""A typical script without fxserve: a DataLoader over files, torchvision's extractor, and a file of pooled features.

python dataloader_script.py MODEL NODE:KEY FOLDER OUT WORKERS
"""

from __future__ import annotations

import sys
from pathlib import Path

import common
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BATCH = 32


class Photographs(Dataset[Tensor]):
    """The JPEG files of a folder, preprocessed for the model."""

    def __init__(self, folder: str, model: str) -> None:
        self._files = sorted(Path(folder).glob("*.jpg"))
        self._transform = common.transform(model)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        return common.decode(self._transform, self._files[index].read_bytes())


def main() -> None:
    model, node, folder, out, workers = sys.argv[1:6]
    features = common.Features(model, dict([node.split(":")]))
    loader = DataLoader(Photographs(folder, model), BATCH, num_workers=int(workers))
    made = []
    with torch.inference_mode():
        for batch in loader:
            made += [value.mean((2, 3)) for outputs in features.compute(batch) for value in outputs.values()]
    safetensors.torch.save_file({"features": torch.cat(made)}, out)


if __name__ == "__main__":
    main()
