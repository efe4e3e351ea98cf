"""Run functions on fake tensors, which have a shape, dtype and device but no values.

torch's fake tensors are private. Only this file uses them; without them, no failure is found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

_MODULE = "torch._subclasses.fake_tensor"


def fake_failure(function: Callable[..., Any], inputs: Sequence[Any]) -> Exception | None:
    """Return the exception that ``function(*inputs)`` raises on fake tensors; None if it succeeds."""
    try:
        from torch._subclasses import fake_tensor
    except ImportError:
        return None
    try:
        with _quiet(), fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(*[mode.from_tensor(value) if isinstance(value, Tensor) else value for value in inputs])
        return None
    except Exception as error:
        return error


def needs_values(failure: Exception) -> bool:
    """Return whether a failure of :func:`fake_failure` is specific to fake tensors: an operator needs values or has no
    shape function."""
    # torch raises NotImplementedError itself for an operator without a shape function.
    return isinstance(failure, NotImplementedError) or type(failure).__module__ == _MODULE


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence fake tensors' logger, which logs each exception that they raise."""
    logger = logging.getLogger(_MODULE)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
