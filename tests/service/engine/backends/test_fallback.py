"""A backend that took over, and eager behind it."""

from __future__ import annotations

import pytest
import torch

from fxcore.errors import BadTensor
from service.engine.backends.fallback import OnlyBackend, WithFallback
from tests.service.engine.running import OUT_OF_MEMORY

USUAL = (torch.Size([3]),)


class Doubling:
    """Stands where a backend stands; fails as long as it has an error to fail of."""

    error: Exception | None = None
    grown = 0

    def __call__(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.error is not None:
            raise self.error
        return {"y": 2 * inputs[0]}

    def storages(self) -> dict[int, int]:
        return {1: 8}


class Negating(Doubling):
    def __call__(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": -inputs[0]}


class Both:
    """A doubling backend with negating eager behind it, and what was told of its end."""

    def __init__(self) -> None:
        self.backend, self.told = Doubling(), list[BaseException]()
        self.swapped = WithFallback(self.backend, Negating(), USUAL, True, self.told.append)

    def factor(self, width: int) -> float:
        """By what an input of this size is multiplied: 2 by the backend, -1 by eager."""
        [factor] = self.swapped(torch.ones(1, width))["y"].unique().tolist()
        return factor


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, MemoryError()])
def test_too_little_memory_retires_no_backend(error: Exception) -> None:
    """It passes, and who asked goes on with half of the batch."""
    both = Both()
    both.backend.error = error
    with pytest.raises(type(error)):
        both.factor(3)
    both.backend.error = None
    assert both.factor(3) == 2
    assert both.told == []


def test_any_other_error_does() -> None:
    both = Both()
    both.backend.error = error = RuntimeError("lost its mind")
    assert both.factor(3) == -1
    both.backend.error = None
    assert both.factor(3) == -1
    assert both.told == [error]


def test_an_error_for_another_size_retires_no_backend() -> None:
    """Eager answers that request; one image of such a size must not slow down all others."""
    both = Both()
    both.backend.error = RuntimeError("the kernel is larger than the map")
    assert both.factor(2) == -1
    both.backend.error = None
    assert [both.factor(width) for width in (3, 4, 2)] == [2, 2, -1]  # the size that failed is not tried again
    assert both.told == []


def test_a_shortage_retires_no_backend() -> None:
    both = Both()
    both.backend.error = RuntimeError("Resource temporarily unavailable")
    assert [both.factor(width) for width in (3, 2)] == [-1, -1]
    both.backend.error = None
    assert [both.factor(width) for width in (3, 2)] == [2, 2]
    assert both.told == []


def test_a_named_backend_refuses_the_sizes_that_it_cannot_compute() -> None:
    """No other runs them, and the failure is not the service's."""
    backend = Doubling()
    named = OnlyBackend(backend, USUAL, any_size=True, instead="ask for backend=auto")
    assert torch.equal(named(torch.ones(1, 2))["y"], torch.full((1, 2), 2.0))
    backend.error = RuntimeError("the kernel is larger than the map")
    with pytest.raises(BadTensor, match="cannot compute inputs of 2; send 3, or ask for backend=auto") as caught:
        named(torch.ones(1, 2))
    assert caught.value.__context__ is None  # its traceback would hold the tensors of the pass
    with pytest.raises(RuntimeError, match="the kernel"):
        named(torch.ones(1, 3))
    for other in (MemoryError(), torch.AcceleratorError("CUDA error: an illegal memory access was encountered")):
        backend.error = other
        with pytest.raises(type(other)):
            named(torch.ones(1, 2))
