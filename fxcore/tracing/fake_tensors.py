"""Runs on tensors that have shapes, dtypes and devices, and no values.

torch's are private, and slow to import. The only file that uses them: where they are missing, nothing is found.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

_MODULE = "torch._subclasses.fake_tensor"


def fake_failure(function: Callable[..., Any], inputs: Sequence[Any]) -> Exception | None:
    """Return what ``function(*inputs)`` raises where tensors have no values; None if nothing."""
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
    """Return whether what :func:`fake_failure` found says nothing of real tensors: an operator needs values, or has no
    shape function."""
    # torch raises NotImplementedError itself for an operator without a shape function.
    return isinstance(failure, NotImplementedError) or type(failure).__module__ == _MODULE


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It logs what it raises."""
    logger = logging.getLogger(_MODULE)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
