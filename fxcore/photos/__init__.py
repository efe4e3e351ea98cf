"""Four photographs for checking lowered models and calibrating int8.

All are in the public domain, from scikit-image: ``astronaut`` and ``rocket`` by NASA and SpaceX, ``chelsea`` (a cat) by
Stéfan van der Walt, ``coffee`` by Rachel Michetti.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from fxcore.errors import FxError
from fxcore.images.files import open_image
from fxcore.images.preprocessing import Preprocessing
from fxcore.tensors import TensorSpec

log = logging.getLogger("fxcore.photos")

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class NoPhotographs(FxError):
    """The calibration ``folder``, or every photograph in it, cannot be read."""


def files() -> list[Path]:
    """Return the JPEG files of the four photographs, sorted by name.

    >>> [file.name for file in files()]
    ['astronaut.jpg', 'chelsea.jpg', 'coffee.jpg', 'rocket.jpg']
    """
    return _files(Path(__file__).parent)


def photos() -> list[PIL.Image.Image]:
    """Return the four photographs, sorted by name."""
    return [open_image(file.read_bytes()) for file in files()]


def input_rows(
    preprocessing: Preprocessing, inputs: Sequence[TensorSpec], images: Sequence[PIL.Image.Image], size: tuple[int, int]
) -> list[tuple[Tensor, ...]]:
    """Preprocess each image to a model's inputs with one row, all of the same shape.

    Args:
        size: height and width of the inputs, used if the preprocessing does not fix them.
    """
    height, width = size
    rows = []
    for image in images:
        row = []
        for spec in inputs:
            if "T" in spec.layout:
                frames = spec.shape[spec.layout.index("T")] or 16
                pixels = torch.from_numpy(np.array(image))
                # A clip that pans slowly over the photograph.
                clip = torch.stack([pixels.roll(-2 * t, dims=1) for t in range(frames)])
                row.append(preprocessing.from_array(clip[None]))
            else:
                fitted = image if preprocessing.fixed_size else image.resize((width, height))
                taking = preprocessing if preprocessing.takes_images else preprocessing.rgb
                made = taking.from_array(torch.from_numpy(np.array(fitted))[None])
                row.append(_with_channels(made, spec.shape[1] or made.shape[1]))
        rows.append(tuple(row))
    return rows


def _with_channels(images: Tensor, channels: int) -> Tensor:
    """Repeat the channels of ``images`` ``[N, C, H, W]`` up to another number of them."""
    return images.repeat(1, -(-channels // images.shape[1]), 1, 1)[:, :channels]


def calibration_rows(
    preprocessing: Preprocessing,
    inputs: Sequence[TensorSpec],
    size: tuple[int, int],
    folder: Path | None = None,
    count: int = 32,
) -> list[tuple[Tensor, ...]]:
    """Return photographs as int8 calibration inputs with one row each; see :func:`input_rows`.

    Args:
        folder: folder of photographs; by default the four photographs here, mirrored and cropped.
        count: maximum number of inputs; from a folder, the first files by name. Files that cannot be read are skipped
            and logged.

    Raises:
        NoPhotographs: there is no such folder, or no photograph in it can be read.

    >>> from fxcore import model_graph
    >>> graph = model_graph("squeezenet1_1")
    >>> rows = calibration_rows(graph.preprocessing, graph.inputs, graph.input_size, count=3)
    >>> len(rows), rows[0][0].shape
    (3, torch.Size([1, 3, 224, 224]))
    """
    if folder is None:
        return input_rows(preprocessing, inputs, augmented(photos(), count)[:count], size)
    rows: list[tuple[Tensor, ...]] = []
    try:
        found = _files(folder)
    except OSError as error:
        raise NoPhotographs(f"the folder {folder} cannot be read ({error.strerror})", folder=str(folder)) from error
    for file in found:
        if len(rows) == count:
            break
        try:  # one at a time: a folder of large photographs would take gigabytes
            rows += input_rows(preprocessing, inputs, [open_image(file.read_bytes())], size)
        except (OSError, FxError) as error:
            log.warning("%s is not used for calibration: %s", file, error)
    if not rows:
        what = f"none of its {len(found)} can be read" if found else f"it has no {', '.join(_SUFFIXES)}"
        raise NoPhotographs(f"the folder {folder} has no photographs to calibrate on: {what}", folder=str(folder))
    return rows


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)


def augmented(images: Sequence[PIL.Image.Image], count: int) -> list[PIL.Image.Image]:
    """Extend ``images`` by mirrored and cropped copies up to ``count``, as far as possible; deterministic."""
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
