"""The backend protocol: lower an extractor's module to one with the same outputs and call signature."""

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
from fxcore.tensors import Tensors


class LoweringFailed(FxError):
    """A backend could not lower a module; ``backend`` is its name."""


@contextlib.contextmanager
def lowering(backend: str) -> Iterator[None]:
    """Convert any exception in the block to :class:`LoweringFailed`, since compilers raise all kinds."""
    try:
        yield
    except LoweringFailed:
        raise
    except Exception as error:
        why = error.detail if isinstance(error, FxError) else summarize(error)
        raise LoweringFailed(f"{backend} could not lower the model: {why}", backend=backend) from error


@dataclass(frozen=True)
class Options:
    """Options for lowering a module.

    Attributes:
        precision: ``float32``, ``bfloat16``, ``float16`` or ``int8``; for ``int8`` the module itself is float32.
        threads: CPU threads that one call may use.
        cache: folder for compiled artifacts; None to not cache them.
        calibration: int8 calibration inputs, one row each.
        reuse: whether to load an artifact from the cache; if False, compile again.
        cancelled: when set, a long lowering stops early and raises :class:`LoweringFailed`.
    """

    precision: str = "float32"
    threads: int = 1
    cache: Path | None = None
    calibration: Sequence[Tensors] = ()
    reuse: bool = True
    cancelled: threading.Event = field(default_factory=threading.Event)


class Lowered(Protocol):
    """A lowered module. Not thread-safe: only one thread may call it at a time."""

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs by key, in memory that later calls do not overwrite."""
        ...

    def storages(self) -> dict[int, int]:
        """Map the address of each storage held in addition to the original module's to its size in bytes.

        Lowered modules that share a storage report the same address. The result is constant for the module's lifetime.
        """
        ...

    @property
    def grown(self) -> int:
        """Bytes acquired since lowering, in addition to :meth:`storages`."""
        ...


class Backend(Protocol):
    """A way to run extractors."""

    @property
    def name(self) -> str: ...

    def unavailable(self, device: torch.device, precision: str) -> str | None:
        """Return a clause saying why the backend cannot run ``precision`` on ``device``; None if it can."""
        ...

    def lower(self, module: fx.GraphModule, example: Tensors, options: Options) -> Lowered:
        """Lower ``module`` without changing it.

        Args:
            module: an out-of-place module in eval mode that returns a dict of tensors.
            example: inputs of the usual size with at least two rows; later calls may have any number of rows.
                The result may raise any exception for rows of another size.

        Raises:
            LoweringFailed: the module cannot be lowered.
        """
        ...


def distinct_outputs(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, int]]:
    """Copy ``module`` so that it returns a tuple of distinct values, and map each key to its index in the tuple.

    Compilers merge or reject outputs that are the same tensor. A key whose value is an input has a negative index: -1
    for the first input, -2 for the second. (OpenVINO would return the output's uninitialised memory.)
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
    """Convert the output of a module from :func:`distinct_outputs` to the original's dict, cloning inputs."""
    return {key: values[at] if at >= 0 else inputs[-1 - at].clone() for key, at in places.items()}


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of ``module``."""
    return [*module.parameters(), *module.buffers()]


def storages_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Map the address of each storage of ``tensors`` to its size in bytes."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
