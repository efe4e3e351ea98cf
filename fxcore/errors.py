"""The errors of fxcore.

Each has a sentence for people (``detail``) and fields for programs (``extra``, for JSON). Other exceptions are bugs in
this library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self


class FxError(Exception):
    """Base class of all errors: the caller passed an invalid value. ``detail`` says which, and what would be valid.

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
        """Return a copy without the traceback, which would keep frames and their variables alive."""
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
    """The installed libraries do not support the ``value`` of ``field``; ``available`` has supported values."""


class UnknownWeights(FxError):
    """The model has no weights of that name; ``available`` has those that exist, ``suggestions`` similar names."""


class WeightsUnavailable(FxError):
    """The weights cannot be loaded: ``file`` is missing from ``folder`` and cannot be downloaded, or is damaged."""


class UnknownNode(FxError):
    """There is no node ``name``, or its value cannot be extracted; ``suggestions`` has similar names."""


class DuplicateKey(FxError):
    """Two outputs have the same ``key``."""


class NotTraceable(FxError):
    """torch.fx cannot trace the model; ``module`` and ``source`` say where it failed, ``kind`` and ``advice`` why.

    Attributes:
        problem: the detail without the advice.
    """

    problem: str

    @classmethod
    def because(
        cls, problem: str, advice: str, *, kind: str, module: str, source: str = "", expression: str = ""
    ) -> Self:
        """Return an error with ``problem; advice`` as its detail.

        >>> error = NotTraceable.because("f is a str", "pass a function", kind="callable", module="f")
        >>> error.detail, error.problem
        ('f is a str; pass a function', 'f is a str')
        """
        extra = {"kind": kind, "module": module, "source": source, "expression": expression, "advice": advice}
        error = cls(f"{problem}; {advice}", **extra)
        error.problem = problem
        return error


class BadImage(FxError):
    """The data cannot be decoded to an image."""


class BadBox(FxError):
    """The box with the index ``box`` is invalid or outside its image."""


class BadPoint(FxError):
    """The point with the index ``point`` is invalid or outside its image."""


class BadMask(FxError):
    """The mask with the index ``mask`` is damaged, empty, or does not have the size of its image."""


class ImageTooLarge(FxError):
    """According to its header, an image has more ``pixels`` than the ``limit``."""


class BadTensor(FxError):
    """An input tensor has the wrong name, shape or dtype, or images cannot form one batch."""


def summarize(error: BaseException, limit: int = 300) -> str:
    """Return the type of an exception and up to ``limit`` characters of the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__


def finite(value: Any) -> Any:
    """Replace NaN and infinities in nested containers by None, for JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(member) for key, member in value.items()}
    return [finite(member) for member in value] if isinstance(value, (list, tuple)) else value
