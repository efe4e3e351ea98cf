"""Options and result of a feature request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fxcore.errors import BadBox, BadMask, BadPoint, BadTensor, FxError
from fxcore.extractor import OutputInfo
from fxcore.graph.head_pooling import DISTILLED
from fxcore.graph.tokens.prefix_tokens import PrefixTokens
from fxcore.pooling import (
    MapGrid,
    channel_dim,
    check_poolable,
    pool,
    pool_masks,
    pool_points,
    pool_regions,
    pooled_regions_shape,
    pooled_shape,
)
from fxcore.projection import project
from service.choices import Dtype, Normalize, Preprocess, pooling
from service.engine.rows.shapes import RowShape, row_layout
from service.engine.rows.tokens import chosen, chosen_shape
from service.schemas.regions import KINDS, GivenRegions
from service.schemas.v1.features import MAX_PROJECT, MAX_SEED, ROI_SIZE

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

VALID_BOX = "valid_box"
"""Key of the output that extractors with ``fit=pad`` add: the position of each row's image in the model's input."""

CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": (None, *get_args(Dtype)),
    "normalize": (None, *get_args(Normalize)),
    "preprocess": get_args(Preprocess),
}
"""The options with a fixed set of values, and those values."""

NAMES = ("pool", *CHOICES, "project", "seed")
"""The options that clients may set on any request; ``/v2`` accepts them as parameters."""


PROBLEMS: Mapping[str, type[FxError]] = {"roi": BadBox, "points": BadPoint, "mask": BadMask}
"""Errors for invalid regions, by pooling."""

_POOL = {"points": pool_points, "mask": pool_masks}


@dataclass(frozen=True)
class FeatureOptions:
    """How the model's outputs are turned into the response.

    Attributes:
        pool: ``none``, a method of :func:`fxcore.pooling.pool` or several, or ``roi``, ``points`` or ``mask`` for the
            regions in the request.
        roi_size: positions per side of each pooled region; see :func:`fxcore.pooling.pool_regions`.
        dtype: ``float32``, ``float16`` or ``bfloat16`` for floating outputs; None keeps the model's own. Integers and
            booleans are never cast.
        project: number of values per row after a random projection, applied after pooling; None for no projection.
        seed: seed of that projection; see :func:`fxcore.projection.projection_matrix`.
        normalize: ``l2`` divides by the norm over the channels, after pooling and projection; a map is normalised at
            each position.
        preprocess: ``default``, ``pil`` or ``fast``, see :mod:`fxcore.images.decoding`; ``none`` only scales uint8
            pixels to [0, 1] and puts channels first. Floating tensors are never preprocessed.
            :attr:`service.settings.Settings.preprocess` sets the meaning of ``default``.
        tokens: indices of the tokens to return, or of the queries for attention weights; None for all. Not allowed with
            pooling.
        keys: the outputs to return; None for all. The others are not pooled, cast or copied off the device, but they
            are still computed: requests for different outputs share a batch, and a separate graph for each subset would
            have to be compiled and would split batches. To compute less, use an extractor with fewer nodes; it shares
            its weights with this one.
        sent: whether the outputs are sent, so that the maximum response size applies.
    """

    pool: str = "none"
    dtype: str | None = None
    normalize: str | None = None
    preprocess: str = "default"
    keys: frozenset[str] | None = None
    roi_size: int = ROI_SIZE
    project: int | None = None
    seed: int = 0
    tokens: tuple[int, ...] | None = None
    sent: bool = True

    def __post_init__(self) -> None:
        if self.pool != DISTILLED:  # used by embeddings; no request can name it
            pooling(self.pool)
        for name, least, most in (("project", 1, MAX_PROJECT), ("seed", 0, MAX_SEED)):
            value = getattr(self, name)
            if not (name == "project" and value is None) and not (type(value) is int and least <= value <= most):
                raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(value for value in allowed if value is not None)
                raise ValueError(f"{name} must be one of {known}, not {getattr(self, name)!r}")

    def named(self) -> dict[str, str | int | None]:
        """Return the client options by name."""
        names = ["pool", *CHOICES]
        names += ["roi_size"] if self.pool == "roi" else []
        names += ["project", "seed"] if self.project is not None else []
        return {name: getattr(self, name) for name in names}

    @property
    def one_shape(self) -> bool:
        """Whether output rows have the same shape whatever the input size."""
        return self.pool != "none" or self.project is not None

    def wants(self, key: str) -> bool:
        """Return whether the output ``key`` is returned."""
        return self.keys is None or key in self.keys

    def check_regions(self, given: GivenRegions | None) -> None:
        """Check that regions are ``given`` if, and only if, the pooling needs them.

        Raises:
            BadBox, BadPoint, BadMask: they are not.
        """
        found = "none" if given is None else given.pool
        if found != (self.pool if self.pool in KINDS else "none"):
            pool = self.pool if self.pool in KINDS else found
            field = KINDS[pool].field
            raise PROBLEMS[pool](
                f"pool={pool} and {field} must be given together: POST …/features takes {field} in a JSON body with "
                "images, one list per image"
            )

    def finished_row(
        self, info: OutputInfo, shape: list[int], dtype: torch.dtype, grid: MapGrid | None
    ) -> tuple[list[int], torch.dtype, int]:
        """Return shape and dtype of the result of :meth:`finish`, and the number of values of a row that it projects.

        Args:
            info: the output.
            shape, dtype: those of its tensor, with one row per image.
            grid: the grid of its map, if it is one.

        Raises:
            BadTensor: this output has no such tokens, or cannot be pooled or normalised so.
        """
        floating, layout = dtype.is_floating_point, row_layout(info.layout, info.rows_per_image)
        try:
            if self.pool in KINDS and grid is None:
                shown = " x ".join(map(str, shape[1:]))
                raise BadTensor(
                    f"pool={self.pool} needs a feature map ([N, C, H, W], [N, H, W, C] or tokens of a grid), but this "
                    f"node gives {shown} per image; ask for a node before the pooling, such as a level"
                )
            if self.tokens is not None:
                if self.pool != "none":
                    raise BadTensor(f"tokens and pool={self.pool} cannot be combined; leave one of them out")
                shape = chosen_shape(shape, layout, info.queries, self.tokens)
            elif self.pool != "none":
                check_poolable(layout, len(shape), floating, self.pool, info.prefix)
                if self.pool in KINDS:
                    shape = pooled_regions_shape(shape, layout, self.roi_size if self.pool == "roi" else 1)
                else:
                    shape = pooled_shape(shape, layout, self.pool)
            for name in ("normalize", "project"):
                if getattr(self, name) is not None and not floating:
                    raise BadTensor(
                        f"{name}={getattr(self, name)} needs floating-point values, but this node gives {dtype}"
                    )
            length = math.prod(shape[1:])
            if self.project is not None and length == 0:
                raise BadTensor(f"project={self.project} needs rows with values, but this node gives {shape}")
        except BadTensor as error:
            raise BadTensor(f"output {info.key!r}: {error.detail}", **error.extra, key=info.key) from None
        if self.project is not None:
            shape = [shape[0], self.project]
        return shape, DTYPES[self.dtype] if self.dtype is not None and floating else dtype, length

    def finish(
        self,
        tensor: Tensor,
        layout: str | None,
        prefix: PrefixTokens,
        regions: Sequence[Tensor],
        grid: MapGrid | None,
        matrices: Mapping[int, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Select tokens, pool, project, normalise and cast, on the tensor's device.

        Each row's result depends on that row only.

        Args:
            tensor: one row per image.
            layout, prefix: layout and prefix tokens of ``tensor``.
            regions, grid: if the rows of the result are regions, the arguments of :func:`fxcore.pooling.pool_regions`,
                :func:`~fxcore.pooling.pool_points` or :func:`~fxcore.pooling.pool_masks`.
            matrices: projection matrices by number of values per row.

        Returns:
            The result, and a bool mask ``[rows]`` of the rows with finite values that overflow the dtype; None if there
            are none.
        """
        given = tensor.dtype
        if self.tokens is not None:
            tensor = chosen(tensor, self.tokens)
        elif self.pool in KINDS:
            assert grid is not None, "finished_row refused it"
            if self.pool == "roi":
                tensor = pool_regions(tensor, layout, grid, regions, self.roi_size)
            else:
                tensor = _POOL[self.pool](tensor, layout, grid, regions)
            layout = "NCHW"
        elif self.pool != "none":
            tensor = pool(tensor, layout, self.pool, prefix)
        if self.project is not None:
            tensor, layout = project(tensor, matrices[tensor.shape[1:].numel()]), "NC"
        if self.normalize == "l2":
            rows = tensor if tensor.ndim > 1 else tensor[:, None]  # a row may be a single value
            dim = channel_dim(layout, rows.ndim) if rows.ndim > 2 else 1
            wide = rows.to(torch.promote_types(tensor.dtype, torch.float32))
            tensor = torch.nn.functional.normalize(wide, dim=dim).to(tensor.dtype).reshape(tensor.shape)
        wanted = DTYPES[self.dtype] if self.dtype is not None and given.is_floating_point else given
        if tensor.dtype == wanted:
            return tensor, None
        cast = tensor.to(wanted)
        if wanted != torch.float16 or not (infinite := cast.isinf()).any():
            return cast, None
        over = (infinite & tensor.isfinite()).reshape(len(cast), -1).any(dim=1)
        return cast, over if over.any() else None

    def ways_to_shrink(self, images: int, outputs: int, choosable: bool) -> list[str]:
        """Return suggestions, not already applied, that would make the response smaller.

        Args:
            images, outputs: number of images and outputs in the response.
            choosable: whether each output has tokens, or queries, to select from.
        """
        ways = []
        if not self.one_shape:
            ways += ["tokens=0"] if choosable and self.tokens is None else []
            ways += ["pool=avg"] if self.tokens is None else []
            ways += ["project=4096"]
        if self.tokens is not None and len(self.tokens) > 1:
            ways.append("fewer tokens")
        if self.pool == "roi":
            ways.append("roi_size=1")
        if self.pool in KINDS:
            ways.append(f"fewer {KINDS[self.pool].field}")
        if self.dtype not in ("float16", "bfloat16"):
            ways.append("dtype=float16")
        if images > 1:
            ways.append("fewer images per request")
        if outputs > 1:
            ways.append("fewer nodes")
        return ways or ["smaller images"]


@dataclass
class FeatureResult:
    """The response to one request.

    Attributes:
        outputs: key → contiguous CPU tensor with its own memory. The first dimension is the images in the order sent.
            Keys are in the order requested, followed by :data:`VALID_BOX`.
        timings: milliseconds spent in the stages ``decode``, ``queue`` and ``compute``.
        images: number of images (or rows of tensors) in the request.
        shapes: shapes of the rows of the model's inputs.
        region_image: if rows are regions, the index of each region's image.
    """

    outputs: dict[str, Tensor]
    timings: dict[str, float]
    images: int
    shapes: frozenset[RowShape]
    region_image: Tensor | None
