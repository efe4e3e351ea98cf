"""Random weights as the service's, which are those of seed 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxcore.models.weightless import BUILD_LOCK


def seeded(build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return ``build(*args, **options)`` in eval mode, built with seed 0.

    The threads of a service in this process use the same random generator meanwhile, under the lock.
    """
    with BUILD_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args, **options).eval()
