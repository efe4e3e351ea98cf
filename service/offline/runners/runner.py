"""What runners of an extractor have in common: how they are called, and how they describe the extractor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxcore.errors import BadBox, BadImage, BadMask, BadPoint, BadTensor, FxError, ImageTooLarge
from fxcore.images.decoding import PREPROCESS_MODES
from service.client import exceptions
from service.engine import FeatureOptions
from service.engine.rows.shapes import row_layout
from service.offline.inputs.sources import Regions
from service.schemas.regions import KINDS
from service.schemas.specs import ExtractorSpec

Rows = dict[str, Tensor]

# Errors that a single image can cause, in the engine and on a server.
SERVER_IMAGE_ERRORS = (
    exceptions.ImageProblem,
    exceptions.BadTensor,  # of a size that the model does not accept
    exceptions.TooLarge,
    exceptions.OutOfMemory,
    exceptions.ComputeFailed,
    exceptions.DeadlineExceeded,
)
_IMAGE_ERRORS = (*SERVER_IMAGE_ERRORS, BadImage, BadBox, BadPoint, BadMask, BadTensor, ImageTooLarge)


@dataclass(frozen=True)
class RowLayout:
    """The meaning of the dimensions of an output's rows.

    Attributes:
        layout: layout of the rows; None if it is unknown, or if rows are pooled and have their channels in dimension 1.
        prefix: number of tokens before those of the positions.
    """

    layout: str | None = None
    prefix: int = 0


@dataclass(frozen=True)
class ExtractorInfo:
    """Description of an extractor, for ``spec.json``.

    Attributes:
        spec: everything that determines its values, with node names and weights resolved.
        outputs: key, node, layout and stride of each output.
        fingerprint: hash of the model's graph.
        backend: the backend in this process; None if servers choose.
        one_size: whether outputs have the same shape for all images.
        images: description of how images are preprocessed.
        layouts: key → layout of each output's rows.
    """

    spec: dict[str, Any]
    outputs: list[dict[str, Any]]
    fingerprint: str
    backend: str | None
    one_size: bool
    images: str
    layouts: dict[str, RowLayout]


class Runner(Protocol):
    """Runs one extractor on several batches concurrently.

    Attributes:
        info: describes the extractor.
        concurrency: number of images in flight that keeps it busy.
    """

    info: ExtractorInfo
    concurrency: int

    async def start(self, spec: ExtractorSpec) -> None:
        """Build the extractor.

        Raises:
            FxError: it cannot be built.
        """

    async def features(self, images: Sequence[bytes], regions: Sequence[Regions] | None = None) -> Rows:
        """Compute key → ``[len(images), ...]``.

        With ``regions``, a list for each image, the first dimension is the regions. The key ``box`` or ``point`` has
        their coordinates, float64 ``[regions, 4]`` or ``[regions, 2]``; the key ``mask`` has their indices in the
        lists, int64.

        Raises:
            Exception: an image may be the cause: see :func:`image_error`.
        """

    async def close(self) -> None:
        """Stop the engine, or close the connections."""


def add_regions(rows: Rows, regions: Sequence[Regions] | None, pool: str) -> Rows:
    """Add the coordinates of the regions, or the indices of masks, to the outputs."""
    if regions is None:
        return rows
    kind = KINDS[pool]
    if kind.one in rows:
        raise FxError(f"an output cannot be named {kind.one!r}, which is the column of {kind.field}")
    if pool == "mask":
        places = [place for of_image in regions for place in range(len(of_image))]
        return {**rows, kind.one: torch.tensor(places, dtype=torch.int64)}
    return {**rows, kind.one: torch.tensor([one for of_image in regions for one in of_image], dtype=torch.float64)}


def image_error(error: Exception) -> str | None:
    """Return the reason of a failure that an image may have caused; None for any other."""
    return error.detail.removeprefix("image 0: ") if isinstance(error, _IMAGE_ERRORS) else None


def describe(
    spec: ExtractorSpec,
    options: FeatureOptions,
    found: Mapping[str, Any],
    *,
    backend: str | None,
    fixed_size: bool,
    default_preprocess: str,
) -> ExtractorInfo:
    """Describe the extractor of ``spec``, which has the ``weights``, ``fingerprint`` and ``outputs`` of ``found``.

    These are as in the API; ``default_preprocess`` is the mode that ``preprocess=default`` stands for.
    """
    outputs = found["outputs"]
    # The default fit is omitted, as in folders older than this field.
    fields = spec.model_dump(mode="json", exclude={"name", *(["fit"] if spec.fit == "crop" else [])})
    preprocess = default_preprocess if options.preprocess == "default" else options.preprocess
    layouts = {}
    for output in outputs:
        prefix = (output.get("prefix") or {}).get("count", 0)
        known = RowLayout(row_layout(output["layout"], output["rows_per_image"]), prefix)
        layouts[output["key"]] = RowLayout() if options.one_shape else known  # pooled or projected
    return ExtractorInfo(
        spec={
            **fields,
            "weights": found["weights"],
            "return_nodes": {output["key"]: output["node"] for output in outputs},
        },
        outputs=[{name: output[name] for name in ("key", "node", "layout", "stride")} for output in outputs],
        fingerprint=found["fingerprint"],
        backend=backend,
        one_size=fixed_size and options.preprocess != "none",
        images=PREPROCESS_MODES.get(preprocess, "pixels as they are, in [0, 1]"),
        layouts=layouts,
    )
