"""The model that every peer serves: torchvision's own extractor, eager, with the weights' own transform."""

from __future__ import annotations

import io
import sys

import PIL.Image
import safetensors.torch
import torch
import torchvision
from torch import Tensor
from torchvision.models.feature_extraction import create_feature_extractor

MEDIA_TYPE = "application/x-safetensors"

MAX_BATCH = 8
WAIT_SECONDS = 0.01


def arguments() -> tuple[str, dict[str, str], int]:
    """Return the model, the keys by node, and the port, from the command line of :func:`benchmarks.servers.peer`."""
    model, nodes, port = sys.argv[1:4]
    return model, dict(pair.split(":") for pair in nodes.split(",")), int(port)


class Features:
    """A model with random weights (seed 0)."""

    def __init__(self, model: str, nodes: dict[str, str]) -> None:
        torch.manual_seed(0)
        self._module = create_feature_extractor(torchvision.models.get_model(model, weights=None).eval(), nodes)
        self._transform = transform(model)
        self._bfloat16 = sys.argv[4] == "bfloat16"

    def decode(self, data: bytes) -> Tensor:
        return decode(self._transform, data)

    @torch.inference_mode()
    def compute(self, batch: Tensor) -> list[dict[str, Tensor]]:
        """Compute the outputs of each image of a batch ``[N, 3, H, W]``."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16):
            outputs = self._module(batch)
        return [{key: value[i : i + 1] for key, value in outputs.items()} for i in range(len(batch))]


def transform(model: str) -> torch.nn.Module:
    made: torch.nn.Module = torchvision.models.get_model_weights(model).DEFAULT.transforms()
    return made


def decode(transform: torch.nn.Module, data: bytes) -> Tensor:
    image: Tensor = transform(PIL.Image.open(io.BytesIO(data)).convert("RGB"))
    return image


def encode(outputs: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({key: value.contiguous() for key, value in outputs.items()})
