"""The error for invalid arguments."""

from __future__ import annotations

from fxcore.errors import FxError


class BadArgument(FxError, ValueError):
    """An argument has the wrong type, or is out of range.

    >>> from fxcore import get_model
    >>> try:
    ...     get_model(50)
    ... except BadArgument as error:
    ...     error.detail
    "a model's name is text such as 'resnet50', not 50"
    """
