"""Options of a request for features, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from fxcore.errors import BadBox, BadMask, BadPoint, BadTensor, FxError
from fxcore.graph.head_pooling import DISTILLED
from fxcore.graph.tokens.prefix_tokens import NO_PREFIX, PrefixTokens
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
from service.engine.rows.tokens import check_tokens, chosen, chosen_shape
from service.schemas.regions import KINDS, GivenRegions
from service.schemas.v1.features import MAX_PROJECT, MAX_SEED, ROI_SIZE

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

VALID_BOX = "valid_box"
"""The output with the place of each row's image in the model's input, of extractors with ``fit=pad``."""

CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": (None, *get_args(Dtype)),
    "normalize": (None, *get_args(Normalize)),
    "preprocess": get_args(Preprocess),
}
"""The options that take one of a few values, and those values."""

NAMES = ("pool", *CHOICES, "project", "seed")
"""The options that clients give for any request; ``/v2`` takes them as parameters."""


PROBLEMS: Mapping[str, type[FxError]] = {"roi": BadBox, "points": BadPoint, "mask": BadMask}
"""The errors of regions, by the pooling that takes them."""

_POOL = {"points": pool_points, "mask": pool_masks}


@dataclass(frozen=True)
class FeatureOptions:
    """How the model's outputs become the response.

    Attributes:
        pool: ``none``, a method of :func:`fxcore.pooling.pool` or several, or ``roi``, ``points`` or ``mask``: the
            regions that come with the request.
        roi_size: positions a side of what each region becomes; see :func:`fxcore.pooling.pool_regions`.
        dtype: ``float32``, ``float16`` or ``bfloat16`` for floating outputs; None leaves them as the model gives them.
            Integers and booleans are never cast.
        project: values of each row after a random projection, which follows pooling; None for no projection.
        seed: of that projection; see :func:`fxcore.projection.projection_matrix`.
        normalize: ``l2`` divides by the length over the channels, after pooling and projection; a map is normalised at
            each place.
        preprocess: ``default``, ``pil`` or ``fast``, as :mod:`fxcore.images.decoding` has them; ``none`` only
            scales uint8 pixels to [0, 1] and puts channels first. Floating tensors are taken as they are in any case.
            What ``default`` means to a server is :attr:`service.settings.Settings.preprocess`.
        tokens: indices of the tokens that are answered, or of attention weights the queries; None is all. Only without
            pooling.
        keys: the outputs that are answered; None is all. The others are not pooled, cast or copied off the device.
            They are computed all the same: a batch is shared by requests for different outputs, and a graph for each
            subset would have to be compiled and would split batches. An extractor of fewer nodes, which shares its
            weights with this one, computes less.
        sent: whether the outputs are sent, so that the maximum size of a response holds for them.
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
        if self.pool != DISTILLED:  # which no request names
            pooling(self.pool)
        for name, least, most in (("project", 1, MAX_PROJECT), ("seed", 0, MAX_SEED)):
            value = getattr(self, name)
            if not (name == "project" and value is None) and not (type(value) is int and least <= value <= most):
                raise ValueError(f"{name} is a whole number from {least} to {most}, not {value!r}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {allowed}, not {getattr(self, name)!r}")

    def named(self) -> dict[str, str | int | None]:
        """Return the options that clients give, by name."""
        names = ["pool", *CHOICES]
        names += ["roi_size"] if self.pool == "roi" else []
        names += ["project", "seed"] if self.project is not None else []
        return {name: getattr(self, name) for name in names}

    @property
    def one_shape(self) -> bool:
        """Whether rows of any input size become rows of one shape."""
        return self.pool != "none" or self.project is not None

    def wants(self, key: str) -> bool:
        """Return whether the output ``key`` is answered."""
        return self.keys is None or key in self.keys

    def check_regions(self, given: GivenRegions | None) -> None:
        """Check that regions are ``given`` where they are to be pooled, and only there.

        Raises:
            BadBox, BadPoint, BadMask: they are not.
        """
        found = "none" if given is None else given.pool
        if found != (self.pool if self.pool in KINDS else "none"):
            pool = self.pool if self.pool in KINDS else found
            field = KINDS[pool].field
            raise PROBLEMS[pool](
                f"pool={pool} and {field} go together: a JSON body of POST …/features with images has {field}, a list "
                "for each"
            )

    def check(
        self,
        key: str,
        shape: list[int],
        dtype: torch.dtype,
        layout: str | None,
        prefix: PrefixTokens = NO_PREFIX,
        grid: MapGrid | None = None,
        queries: bool = False,
    ) -> None:
        """Raise what :meth:`finish` would for a tensor of ``shape`` and ``dtype``.

        Raises:
            BadTensor: this output has no such tokens, or cannot be pooled or normalised so.
        """
        try:
            if self.tokens is not None:
                if self.pool != "none":
                    raise BadTensor(f"tokens and pool={self.pool} do not go together: leave one of them out")
                check_tokens(shape, layout, queries, self.tokens)
            if self.pool in KINDS and grid is None:
                shown = " x ".join(map(str, shape[1:]))
                raise BadTensor(
                    f"pool={self.pool} needs a feature map ([N, C, H, W], [N, H, W, C] or tokens of a grid) and this "
                    f"node gives {shown} an image; ask for a node before the pooling, such as a level"
                )
            if self.pool != "none":
                check_poolable(layout, len(shape), dtype.is_floating_point, self.pool, prefix)
        except BadTensor as error:
            raise BadTensor(f"output {key!r}: {error.detail}", **error.extra, key=key) from None
        for name in ("normalize", "project"):
            if getattr(self, name) is not None and not dtype.is_floating_point:
                asked = f"{name}={getattr(self, name)}"
                raise BadTensor(f"output {key!r}: {asked} needs floating values and this node gives {dtype}", key=key)

    def pooled(self, shape: list[int], layout: str | None) -> list[int]:
        """Return the shape of a tensor of ``shape`` after tokens are chosen and pooled."""
        if self.tokens is not None:
            return chosen_shape(shape, self.tokens)
        if self.pool in KINDS:
            return pooled_regions_shape(shape, layout, self.roi_size if self.pool == "roi" else 1)
        return shape if self.pool == "none" else pooled_shape(shape, layout, self.pool)

    def finished(self, shape: list[int], dtype: torch.dtype, layout: str | None) -> tuple[list[int], torch.dtype]:
        """Return shape and dtype that :meth:`finish` gives for a tensor of ``shape`` and ``dtype``."""
        shape = self.pooled(shape, layout)
        if self.project is not None:
            shape = [shape[0], self.project]
        if self.dtype is not None and dtype.is_floating_point:
            dtype = DTYPES[self.dtype]
        return shape, dtype

    def finish(
        self,
        tensor: Tensor,
        layout: str | None,
        prefix: PrefixTokens = NO_PREFIX,
        regions: Sequence[Tensor] = (),
        grid: MapGrid | None = None,
        matrices: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Choose tokens, pool, project, normalise and cast, on the device the tensor is on. Each row's result depends
        on that row alone.

        Args:
            tensor: a row for each image.
            layout, prefix: of ``tensor``.
            regions, grid: of :func:`fxcore.pooling.pool_regions`, :func:`~fxcore.pooling.pool_points` or
                :func:`~fxcore.pooling.pool_masks`, where the rows of the result are regions.
            matrices: what rows are projected by, by their number of values.

        Returns:
            The result, and which of its rows have finite values that its dtype cannot hold, bool ``[rows]``; None if
            none has.
        """
        given = tensor.dtype
        if self.tokens is not None:
            tensor = chosen(tensor, self.tokens)
        elif self.pool in KINDS:
            assert grid is not None  # see check
            if self.pool == "roi":
                tensor = pool_regions(tensor, layout, grid, regions, self.roi_size)
            else:
                tensor = _POOL[self.pool](tensor, layout, grid, regions)
            layout = "NCHW"
        elif self.pool != "none":
            tensor = pool(tensor, layout, self.pool, prefix)
        if self.project is not None:
            assert matrices is not None
            tensor, layout = project(tensor, matrices[tensor.shape[1:].numel()]), "NC"
        if self.normalize == "l2":
            rows = tensor if tensor.ndim > 1 else tensor[:, None]  # of single values
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

    def ways_to_shrink(self, images: int, outputs: int, choosable: bool = False) -> list[str]:
        """Options and habits, not in use already, that would make the response smaller.

        Args:
            images, outputs: how many the response has.
            choosable: whether each output has tokens, or queries, to choose.
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
            ways.append("fewer images a request")
        if outputs > 1:
            ways.append("fewer nodes")
        return ways or ["smaller images"]


@dataclass
class FeatureResult:
    """The response to one request.

    Attributes:
        outputs: key → tensor on the CPU, contiguous, in memory of its own, first dimension the images in the order
            sent; keys in the order asked for, and :data:`VALID_BOX` after them.
        timings: milliseconds of the stages ``decode``, ``queue`` and ``compute``.
        images: how many images (or rows of tensors) there were.
        region_image: where rows are regions, the index of each one's image.
    """

    outputs: dict[str, Tensor]
    timings: dict[str, float] = field(default_factory=dict)
    images: int = 0
    region_image: Tensor | None = None
