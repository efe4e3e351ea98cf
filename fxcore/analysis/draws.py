"""Find the values of a graph that depend on random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxcore.models.weightless import BUILD_LOCK
from fxcore.nesting import clones
from fxcore.passes.effects import is_random, is_uninitialized
from fxcore.tracing.constants import FROZEN
from fxcore.tracing.interpreter import Watcher


def draws(traced: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether ``traced`` computes with random numbers when it runs on ``inputs``.

    >>> from fxcore import trace
    >>> draws(trace(lambda x: x + torch.rand_like(x)), [torch.ones(2)]), draws(trace(lambda x: x + 1), [torch.ones(2)])
    (True, False)
    """
    with deterministic():
        found = Draws(traced)
        Watcher(traced, lambda node, _: found.note(node)).run(*clones(inputs))
    return bool(found.nodes)


_KNOWN = ("torch", "torchvision", "_operator", "builtins", "math")


class Draws:
    """The nodes that have run whose values depend on random numbers.

    Functions and modules of others that are kept whole are recognised by the generators that they draw from.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        self.nodes: set[fx.Node] = set()
        self._traced = traced
        self._unknown = {node for node in traced.graph.nodes if not is_torchs(traced, node)}
        self._generators = self._states()

    def note(self, node: fx.Node) -> None:
        """Add ``node``, which was the last to run, if its values depend on random numbers."""
        before, self._generators = self._generators, self._states()
        drawn = FROZEN in node.meta and node.meta[FROZEN].random
        drawn |= node in self._unknown and self._generators != before
        drawn |= is_random(self._traced, node) and not is_uninitialized(node)
        if drawn or not self.nodes.isdisjoint(node.all_input_nodes):
            self.nodes.add(node)

    def _states(self) -> list[bytes]:
        generators = (torch.default_generator, *torch.cuda.default_generators) if self._unknown else ()
        return [generator.get_state().numpy().tobytes() for generator in generators]


def is_torchs(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether ``node`` calls nothing but what torch or Python defines, of which it is known what draws."""
    if node.op == "call_module":
        parts = traced.get_submodule(str(node.target)).modules()
        return all(type(part).__module__.startswith("torch.nn.") for part in parts)
    origin = getattr(node.target, "__module__", None) or "torch"  # some of torch's functions have none
    return node.op != "call_function" or origin.partition(".")[0] in _KNOWN


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within the block, random numbers are the same each time, and those of other threads are left alone."""
    with torch.no_grad(), BUILD_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield
