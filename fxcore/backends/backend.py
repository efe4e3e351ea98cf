"""The protocol of backends: an extractor's module → a lowered module with the same outputs and call signature."""

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
    """Turn any exception in the block into a :class:`LoweringFailed` of ``backend``: compilers raise all kinds."""
    try:
        yield
    except LoweringFailed:
        raise
    except Exception as error:
        why = error.detail if isinstance(error, FxError) else summarize(error)
        raise LoweringFailed(f"{backend} could not lower the model: {why}", backend=backend) from error


@dataclass(frozen=True)
class Options:
    """Options of a lowering.

    Attributes:
        precision: ``float32``, ``bfloat16``, ``float16``; or ``int8``, for which the module itself is float32.
        threads: CPU threads that one call may use.
        cache: folder for compiled artifacts; None: they are not cached.
        calibration: inputs, one row each, for the ranges of activations in int8.
        reuse: whether an artifact in the cache may be loaded; otherwise it is compiled again.
        cancelled: once set, a long lowering ends early with :class:`LoweringFailed`.
    """

    precision: str = "float32"
    threads: int = 1
    cache: Path | None = None
    calibration: Sequence[Inputs] = ()
    reuse: bool = True
    cancelled: threading.Event = field(default_factory=threading.Event)


class Lowered(Protocol):
    """A lowered module. One thread calls it at a time."""

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Run it; returns the outputs by key, in memory that later calls do not overwrite."""
        ...

    def storages(self) -> dict[int, int]:
        """Return bytes of the storages that it holds beside those of the original module, by address: storages that two
        lowered modules share have one address. They stay the same as long as it is used."""
        ...

    @property
    def grown(self) -> int:
        """Bytes that it has come to hold since it was lowered, beside :meth:`storages`."""
        ...


class Backend(Protocol):
    """A way to run extractors."""

    @property
    def name(self) -> str: ...

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        """Return a clause that says why it cannot be used on ``device`` in ``precision``; None if it can."""
        ...

    def lower(self, module: fx.GraphModule, example: Inputs, options: Options) -> Lowered:
        """Lower ``module``, which is not changed.

        Args:
            module: out-of-place, in eval mode, returns a dict of tensors.
            example: inputs of the usual size with at least two rows; calls may have any number of rows.

        Raises:
            LoweringFailed: it cannot be lowered.
        """
        ...


def distinct_outputs(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, int]]:
    """Copy ``module`` to return a tuple of its distinct values, and map each key to an index in it.

    Compilers merge or reject outputs that are one tensor. A key whose value is an input has a negative index: -1 for
    the first input, -2 for the second. (OpenVINO would read it from the uninitialised memory of the output.)
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
    """Convert the output of a module of :func:`distinct_outputs` to the original's dict; inputs are cloned."""
    return {key: values[at] if at >= 0 else inputs[-1 - at].clone() for key, at in places.items()}


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def storages_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return bytes of the storages of ``tensors`` by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
