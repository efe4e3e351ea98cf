"""What fxcore raises when a caller asked for something that cannot be had.

Each error is one sentence for people (``detail``) and a few fields for programs (``extra``, JSON-able). An error that
is not an :class:`FxError` is a defect of this library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self


class FxError(Exception):
    """Base of all errors that say what was wrong with a request and what would be right.

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
        """The same error, not raised yet: one that was keeps the frames that it came through, and their variables."""
        other = type(self).__new__(type(self), *self.args)
        vars(other).update(vars(self))
        return other


class UnknownModel(FxError):
    """No model of that name; ``suggestions`` holds the nearest names."""


class Unsupported(FxError):
    """A model that the libraries here cannot run any more; ``field``, ``value`` and ``available``."""


class UnknownWeights(FxError):
    """The model has no weights of that name; ``available`` lists those it has, ``suggestions`` the nearest."""


class WeightsUnavailable(FxError):
    """The weights exist but cannot be had now; ``file`` is the missing file and ``folder`` where it is looked for."""


class UnknownNode(FxError):
    """A node name that matches nothing, or whose value is not a tensor; ``name`` and ``suggestions``."""


class DuplicateKey(FxError):
    """Two outputs were asked for under one ``key``."""


class NotTraceable(FxError):
    """torch.fx cannot record the model; ``module`` and ``source`` say where it broke."""


class BadImage(FxError):
    """Bytes that do not decode to an image."""


class BadBox(FxError):
    """A region that is no part of its image; ``box`` is its place in the list."""


class ImageTooLarge(FxError):
    """An image with more ``pixels`` than the ``limit``, judged by its header before decoding."""


class BadTensor(FxError):
    """An input tensor with the wrong name, shape or dtype, or images that cannot form one batch."""


def summarize(error: BaseException, limit: int = 300) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__


def finite(value: Any) -> Any:
    """``value`` with None for the numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    return [finite(member) for member in value] if isinstance(value, (list, tuple)) else value
