"""What every backend is: an extractor's module → something that computes the same, called the same way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, fx

from fxcore.errors import FxError, summarize

Inputs = tuple[Tensor, ...]


class LoweringFailed(FxError):
    """A backend could not lower a module; ``backend`` says which."""


@contextlib.contextmanager
def lowering(backend: str) -> Iterator[None]:
    """Whatever goes wrong in here, and compilers fail in many ways, is a :class:`LoweringFailed` of ``backend``."""
    try:
        yield
    except LoweringFailed:
        raise
    except Exception as error:
        why = error.detail if isinstance(error, FxError) else summarize(error)
        raise LoweringFailed(f"{backend} could not lower the model: {why}", backend=backend) from error


@dataclass(frozen=True)
class Options:
    """What a lowering is to be made for.

    Attributes:
        device: where it will run.
        precision: ``float32``, ``bfloat16``, ``float16``; or ``int8``, for which the module itself is float32.
        threads: CPU threads that one call may use.
        cache: folder in which compiled artifacts stay between starts; None keeps none.
        calibration: inputs, one row each, from which int8 takes the ranges of activations.
        reuse: whether a compiled artifact that is kept in the cache may be loaded; else it is made again.
        cancelled: once set, a lowering that takes long ends early with :class:`LoweringFailed`.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: str = "float32"
    threads: int = 1
    cache: Path | None = None
    calibration: Sequence[Inputs] = ()
    reuse: bool = True
    cancelled: threading.Event = field(default_factory=threading.Event)


class Lowered(Protocol):
    """A lowered module. One thread calls it at a time."""

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Outputs by key, in memory that later calls leave alone."""
        ...

    def storages(self) -> dict[int, int]:
        """Bytes of what it holds in memory beside the module it was made from, by the address of each storage; what two
        lowered modules share has one address."""
        ...


class Backend(Protocol):
    """One way to run extractors."""

    @property
    def name(self) -> str: ...

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        """Why it cannot be used here for that, in a clause; None if it can."""
        ...

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> Lowered:
        """Lower ``module``, which is left as it is.

        Args:
            module: out-of-place, in eval mode, returns a dict of tensors.
            example: inputs of the usual size with at least two rows; every number of rows will be served.
            options: what for.

        Raises:
            LoweringFailed: it cannot be done; the module is still good for another backend.
        """
        ...


def distinct_outputs(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, int]]:
    """``module`` returning each different value once, as a tuple, and the place of each key's value in it.

    Compilers merge or refuse outputs that are one tensor. A key whose value is an input has a place below zero: -1 is
    the first input, -2 the second. OpenVINO reads such an input from the memory given for the output, before it is
    written.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(module.graph, copies)
    places: dict[fx.Node, int] = {}
    assert isinstance(returned, dict), "an extractor returns a dict"
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    index = {
        str(key): -1 - inputs.index(node) if node in inputs else places.setdefault(node, len(places))
        for key, node in returned.items()
    }
    graph.output(tuple(places))
    return fx.GraphModule(module, graph).eval(), index


def by_key(places: dict[str, int], values: Sequence[Tensor], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a module of :func:`distinct_outputs` returned, as the original would; inputs are copied."""
    return {key: values[at] if at >= 0 else inputs[-1 - at].clone() for key, at in places.items()}


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def storages_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes of the storages of ``tensors`` by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
