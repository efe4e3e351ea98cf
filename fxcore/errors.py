"""The errors of fxcore.

Each has a sentence for people (``detail``) and fields for programs (``extra``, for JSON). Other exceptions are bugs of
this library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self


class FxError(Exception):
    """Base class: the caller passed something invalid. ``detail`` says what, and what would be valid.

    >>> from fxcore import get_model
    >>> try:
    ...     get_model("resnet51")
    ... except FxError as error:
    ...     error.detail[:62], "resnet50" in error.extra["suggestions"]
    ("there is no model 'resnet51'; did you mean resnet50, resnet18,", True)
    """

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra

    def __copy__(self) -> Self:
        """Return a copy without traceback, which would keep frames and their variables alive."""
        other = type(self).__new__(type(self), *self.args)
        vars(other).update(vars(self))
        return other


class BadArgument(FxError, ValueError):
    """An argument has the wrong type, or is out of range.

    >>> from fxcore import get_model
    >>> try:
    ...     get_model(50)
    ... except BadArgument as error:
    ...     error.detail
    "a model's name is text such as 'resnet50', not 50"
    """


class UnknownModel(FxError):
    """There is no model of that name; ``suggestions`` has similar names."""


class Unsupported(FxError):
    """The installed libraries cannot run the model; ``field``, ``value`` and ``available``."""


class UnknownWeights(FxError):
    """The model has no weights of that name; ``available`` has those that exist, ``suggestions`` similar names."""


class WeightsUnavailable(FxError):
    """The weights cannot be loaded: ``file`` is missing from ``folder`` and cannot be downloaded, or is damaged."""


class UnknownNode(FxError):
    """There is no such node, or its value cannot be extracted; ``name`` and ``suggestions``."""


class DuplicateKey(FxError):
    """Two outputs have the same ``key``."""


class NotTraceable(FxError):
    """torch.fx cannot trace the model; ``module`` and ``source`` say where it failed, ``kind`` and ``advice`` why."""


class BadImage(FxError):
    """Data that cannot be decoded to an image."""


class BadBox(FxError):
    """A box that is invalid or outside of its image; ``box`` is its index."""


class BadPoint(FxError):
    """A point that is invalid or outside of its image; ``point`` is its index."""


class BadMask(FxError):
    """A mask that is damaged, empty, or of another size than its image; ``mask`` is its index."""


class ImageTooLarge(FxError):
    """By its header, an image has more ``pixels`` than the ``limit``."""


class BadTensor(FxError):
    """An input tensor has the wrong name, shape or dtype, or images cannot form one batch."""


def summarize(error: BaseException, limit: int = 300) -> str:
    """Return the type of an exception and the first line of its message, at most ``limit`` characters of that."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__


def finite(value: Any) -> Any:
    """Replace NaN and infinities in nested containers by None, for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    return [finite(member) for member in value] if isinstance(value, (list, tuple)) else value
