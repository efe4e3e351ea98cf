"""Four photographs that lowered models are checked on and int8 is calibrated on.

All are in the public domain, as scikit-image ships them: ``astronaut`` and ``rocket`` by NASA and SpaceX, ``chelsea``
(a cat) by Stéfan van der Walt, ``coffee`` by Rachel Michetti.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from fxcore.graphs import TensorSpec
from fxcore.images import open_image
from fxcore.preprocessing import Preprocessing

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def photos(folder: Path | None = None) -> list[PIL.Image.Image]:
    """The photographs that are shipped, or those in ``folder``, by name."""
    files = sorted((folder or Path(__file__).parent).iterdir())
    return [open_image(file.read_bytes()) for file in files if file.suffix.lower() in _SUFFIXES]


def check_rows(
    preprocessing: Preprocessing, inputs: Sequence[TensorSpec], images: Sequence[PIL.Image.Image], size: tuple[int, int]
) -> list[tuple[Tensor, ...]]:
    """Each image as a model's inputs with one row, preprocessed as a request's would be, all of one shape.

    Args:
        size: height and width of what comes out, where the preprocessing leaves that to the image.
    """
    height, width = size
    rows = []
    for image in images:
        row = []
        for spec in inputs:
            if "T" in spec.layout:
                frames = spec.shape[spec.layout.index("T")] or 16
                pixels = torch.from_numpy(np.array(image))
                # A clip as a slow pan over the photograph.
                clip = torch.stack([pixels.roll(-2 * t, dims=1) for t in range(frames)])
                row.append(preprocessing.tensor(clip[None]))
            else:
                fitted = image if preprocessing.fixed_size else image.resize((width, height))
                row.append(preprocessing.image(fitted)[None])
        rows.append(tuple(row))
    return rows


def calibration_rows(
    preprocessing: Preprocessing,
    inputs: Sequence[TensorSpec],
    size: tuple[int, int],
    folder: Path | None = None,
    count: int = 32,
) -> list[tuple[Tensor, ...]]:
    """Photographs as :func:`check_rows` makes them, to take the ranges of activations from.

    Args:
        folder: of the photographs; without it, those that are shipped, mirrored and cropped.
        count: at most how many.

    >>> from fxcore import model_graph
    >>> graph = model_graph("squeezenet1_1")
    >>> rows = calibration_rows(graph.preprocessing, graph.inputs, graph.input_size, count=3)
    >>> len(rows), rows[0][0].shape
    (3, torch.Size([1, 3, 224, 224]))
    """
    images = photos(folder)[:count] if folder is not None else augmented(photos(), count)[:count]
    return check_rows(preprocessing, inputs, images, size)


def augmented(images: Sequence[PIL.Image.Image], count: int) -> list[PIL.Image.Image]:
    """At least ``count`` images: the given ones, then mirrored and cropped ones of them, always the same."""
    made = list(images)
    for share in (1.0, 0.75, 0.5, 0.6, 0.9):
        for corner in (0, 1):
            for image in images:
                width, height = round(image.width * share), round(image.height * share)
                left, top = (image.width - width) * corner, (image.height - height) * corner
                cropped = image.crop((left, top, left + width, top + height))
                made.append(cropped if corner else cropped.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT))
                if len(made) >= count:
                    return made
    return made
