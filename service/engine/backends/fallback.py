"""Wrappers of lowered modules that handle unsupported inputs and failures."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, fx

from fxcore.backends import Lowered
from fxcore.errors import BadTensor, summarize
from service.engine.errors import is_out_of_memory, is_shortage

log = logging.getLogger("fxserve.backends")

_MAX_FAILING = 256
"""Maximum number of sizes that are remembered as failing."""


class Unlowered:
    """An extractor's own module, unchanged."""

    grown = 0

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self._module(*inputs)
        return outputs

    def storages(self) -> dict[int, int]:
        return {}


class OnlyBackend:
    """The only backend of an extractor. Inputs that it cannot run are refused.

    Args:
        lowered: the backend.
        row_shapes: the row shapes of the usual size.
        any_size: whether ``lowered`` agrees with eager for inputs of other sizes too. It may fail for some.
        instead: what to ask for to have other sizes computed, for errors.
    """

    def __init__(self, lowered: Lowered, row_shapes: tuple[torch.Size, ...], any_size: bool, instead: str) -> None:
        self.lowered = lowered
        self._instead = instead
        self._row_shapes = row_shapes
        self._any_size = any_size

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        row = tuple(x.shape[1:] for x in inputs)
        self.check(row)
        try:
            return self.lowered(*inputs)
        except Exception as error:
            # A lost device is not the input's fault either.
            if row == self._row_shapes or is_shortage(error) or isinstance(error, torch.AcceleratorError):
                raise
            log.warning("a backend cannot compute inputs of %s: %s", _shown(row), summarize(error))
        # Without the error, whose traceback holds the tensors of the failed forward pass.
        raise BadTensor(
            f"the backend of this extractor cannot compute inputs of {_shown(row)}; send {_shown(self._row_shapes)}, "
            f"or {self._instead}"
        )

    def check(self, row: tuple[tuple[int, ...], ...]) -> None:
        """Check the shape of one row of each input.

        Raises:
            BadTensor: the backend does not accept it.
        """
        if not self._any_size and row != self._row_shapes:
            raise BadTensor(
                f"the backend of this extractor only accepts inputs of {_shown(self._row_shapes)}, but the request "
                f"has {_shown(row)}; send that size, or {self._instead}"
            )

    def storages(self) -> dict[int, int]:
        return self.lowered.storages()

    @property
    def grown(self) -> int:
        return self.lowered.grown


class WithFallback:
    """A backend that replaced eager. Eager still runs the input sizes that the backend does not, and takes over again
    if the backend fails for the usual one.

    Args:
        lowered: the backend that replaced eager.
        eager: the module that served before.
        row_shapes: the row shapes of the usual size.
        any_size: whether ``lowered`` also runs inputs of other sizes. It may fail for some, such as a map smaller than
            the kernel of a pooling that rounds up.
        failed: called when ``lowered`` raises for inputs of the usual size; it is not run again.
    """

    def __init__(
        self,
        lowered: Lowered,
        eager: Lowered,
        row_shapes: tuple[torch.Size, ...],
        any_size: bool,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._lowered: Lowered | None = lowered
        self._eager = eager
        self._row_shapes = row_shapes
        self._any_size = any_size
        self._failed = failed
        self._failing: set[tuple[torch.Size, ...]] = set()

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        lowered, row = self._lowered, tuple(x.shape[1:] for x in inputs)
        usual = row == self._row_shapes
        if lowered is None or row in self._failing or not (self._any_size or usual):
            return self._eager(*inputs)
        try:
            return lowered(*inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # the worker halves the batch
            outputs = self._eager(*inputs)  # if eager fails too, the input is to blame
            if is_shortage(error):  # it passes
                return outputs
            if usual:
                self._lowered = None
                self._failed(error)
            else:
                log.warning("eager computes inputs of %s, which a faster backend cannot: %s", _shown(row), error)
                if len(self._failing) < _MAX_FAILING:
                    self._failing.add(row)
            return outputs

    def storages(self) -> dict[int, int]:
        return self._eager.storages() | (self._lowered.storages() if self._lowered is not None else {})

    @property
    def grown(self) -> int:
        lowered = self._lowered
        return self._eager.grown + (lowered.grown if lowered is not None else 0)


def _shown(row: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(" x ".join(map(str, shape)) for shape in row)
