"""The error of a function that was called with something it cannot work on."""

from __future__ import annotations

from fxcore.errors import FxError


class BadArgument(FxError, ValueError):
    """An argument of the wrong kind, or out of its range.

    >>> from fxcore import get_model
    >>> try:
    ...     get_model(50)
    ... except BadArgument as error:
    ...     error.detail
    "a model's name is text such as 'resnet50', not 50"
    """
