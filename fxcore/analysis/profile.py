"""Profile the time and memory of a graph module, node by node."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.analysis.clock import now
from fxcore.errors import BadArgument
from fxcore.nesting import clones, tensors_in
from fxcore.tensors import strided_parts
from fxcore.tracing.failures.input_mismatch import explain_mismatch
from fxcore.tracing.interpreter import Inputs, Interpreter, positional, require_graph
from fxcore.tracing.names import public_name


@dataclass(frozen=True)
class NodeProfile:
    """Time and memory of one node.

    Attributes:
        name: torchvision's name of the node, or its fx name.
        fx_name, op, target: name, op and target in torch.fx.
        milliseconds: median time over the runs.
        share: fraction of the sum over all nodes.
        bytes: memory of the value that is not shared with an earlier value; 0 for a view.
        live_bytes: memory of all live values after the node has run, including its own and its inputs.
        peak_bytes: on a GPU, peak allocated memory during the node minus that before; None on a CPU.
    """

    name: str
    fx_name: str
    op: str
    target: str
    milliseconds: float
    share: float
    bytes: int
    live_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Profile:
    """The profile of a module and its nodes.

    Attributes:
        nodes: all nodes except the output, in execution order.
        milliseconds: median time of the whole module, without profiling overhead.
        peak_bytes: the largest ``live_bytes``.
        runs: number of measured runs.
    """

    nodes: list[NodeProfile]
    milliseconds: float
    peak_bytes: int
    runs: int

    def slowest(self, count: int = 10) -> list[NodeProfile]:
        """Return the ``count`` slowest nodes."""
        return sorted(self.nodes, key=lambda n: n.milliseconds, reverse=True)[:count]


def profile(module: fx.GraphModule, inputs: Inputs, *, runs: int = 5, warmup: int = 1) -> Profile:
    """Run ``module`` node by node on ``inputs`` and measure each.

    A node's time includes a few microseconds of Python overhead.

    Args:
        module: a module in eval mode, on the inputs' device.
        inputs: positional arguments, arguments by name, or a single tensor.
        runs: number of measured runs.
        warmup: number of runs before those, which are not measured.

    Raises:
        NotAGraph: ``module`` is not a graph module.
        BadTensor: ``module`` does not accept ``inputs``.
        BadArgument: ``runs`` is below 1, or ``warmup`` below 0.

    >>> from torch import nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())
    >>> found = profile(model, torch.ones(2, 8), runs=2)
    >>> [(n.name, n.bytes) for n in found.nodes]
    [('input_1', 0), ('_0', 64), ('_1', 64)]
    """
    if not (isinstance(runs, int) and runs >= 1 and isinstance(warmup, int) and warmup >= 0):
        raise BadArgument(f"runs must be at least 1 and warmup at least 0, not {runs!r:.100} and {warmup!r:.100}")
    profiler = Profiler(module, inputs)
    with explain_mismatch(module, positional(module, inputs)):
        for run in range(warmup + runs):
            profiler.run(counts=run >= warmup)
    return profiler.result()


class Profiler:
    """A profiler that does one run at a time, for callers that do other work in between.

    Args:
        module, inputs: see :func:`profile`.
    """

    def __init__(self, module: fx.GraphModule, inputs: Inputs) -> None:
        require_graph(module)
        self._module = module
        self._inputs = positional(module, inputs)
        self._device = next((x.device for x in self._inputs if isinstance(x, Tensor)), torch.device("cpu"))
        self._watcher = _Watcher(module, self._device)
        self._whole: list[float] = []

    def run(self, *, counts: bool = True) -> None:
        """Run the module twice: node by node, and as a whole.

        Args:
            counts: whether to record the run; False to warm up.
        """
        with torch.no_grad():
            self._watcher.counts = counts
            # Copy the inputs, since the module may write to them.
            self._watcher.run(*clones(self._inputs))
            inputs = clones(self._inputs)
            start = now(self._device)
            self._module(*inputs)
            taken = now(self._device) - start
            if counts:
                self._whole.append(1000 * taken)

    def result(self) -> Profile:
        """Return the medians over the recorded runs; there must be at least one."""
        watcher = self._watcher
        medians = {node: 1000 * statistics.median(times) for node, times in watcher.times.items()}
        total = sum(medians.values()) or 1.0
        nodes = [
            NodeProfile(
                name=public_name(node),
                fx_name=node.name,
                op=node.op,
                target=node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?"),
                milliseconds=milliseconds,
                share=milliseconds / total,
                bytes=watcher.fresh[node],
                live_bytes=watcher.live[node],
                peak_bytes=int(statistics.median(watcher.peaks[node])) if node in watcher.peaks else None,
            )
            for node, milliseconds in medians.items()
        ]
        peak = max((n.live_bytes for n in nodes), default=0)
        return Profile(nodes, statistics.median(self._whole), peak, len(self._whole))


class _Watcher(Interpreter):
    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)  # drops values after their last use, like the module itself
        self.device = device
        self.times: dict[fx.Node, list[float]] = {}
        self.peaks: dict[fx.Node, list[int]] = {}
        self.fresh: dict[fx.Node, int] = {}
        self.live: dict[fx.Node, int] = {}
        self.counts = True  # whether the run is recorded
        # Parameters are always allocated, so they are not counted.
        tensors = [part for tensor in (*module.parameters(), *module.buffers()) for part in strided_parts(tensor)]
        self._parameters = {part.untyped_storage().data_ptr() for part in tensors}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = now(self.device)
        value = super().run_node(n)
        taken = now(self.device) - start
        if self.counts:
            self.times.setdefault(n, []).append(taken)
            if cuda:
                self.peaks.setdefault(n, []).append(torch.cuda.max_memory_allocated(self.device) - before)
            self._weigh(n, value)
        return value

    def _weigh(self, node: fx.Node, value: Any) -> None:
        held = self._storages(list(self.env.values()))
        own = self._storages([value])
        self.fresh[node] = (
            0 if node.op in ("placeholder", "get_attr") else sum(s for p, s in own.items() if p not in held)
        )
        self.live[node] = sum({**held, **own}.values())

    def _storages(self, values: list[Any]) -> dict[int, int]:
        """Map the address of each storage of tensors in ``values`` to its size in bytes."""
        found = {}
        for part in (part for tensor in tensors_in(values) for part in strided_parts(tensor)):
            storage = part.untyped_storage()
            if storage.data_ptr() not in self._parameters:
                found[storage.data_ptr()] = storage.nbytes()
        return found
