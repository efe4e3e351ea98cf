"""Compare the rows of a batch with the values of each single image."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxcore.analysis.agreement import in_step, memory_set, same_tensors
from fxcore.analysis.draws import deterministic, is_torchs
from fxcore.analysis.samples import CLOSE, near, sampled
from fxcore.nesting import tensors_in
from fxcore.tracing.dispatch_modes import LenientMode
from fxcore.tracing.names import operation_name, public_name
from fxcore.tracing.writes import reads_shape, written

_FIVE = [1, 0, 0, 1, 1]
"""Rows of a batch of five. From the third row on they are no palindrome, so that reversing them is seen."""


@dataclass(frozen=True)
class Rows:
    """The dependence of a batch's values on its images.

    Attributes:
        apart: names of the nodes whose rows in a batch are not those of the single images, in order.
        dependent: the first node whose values for an image depend on the other images, if the model's result depends
            on them too; else None.
    """

    apart: list[str] = field(default_factory=list)
    dependent: str | None = None


def compare_rows(traced: fx.GraphModule, inputs: Sequence[Tensor]) -> Rows:
    """Compare a batch of two, and one of five, with each single image, node by node.

    In a single order, rows that are sorted by value could be in the right place by chance, so the second batch begins
    in the other order. Some models change only the third row and those after it.

    Values that are computed from a batch as a whole may be the same for these images by chance, such as the sign of a
    mean. Whatever reads them differs. Likewise, the number of rows of ``x[x > 0]`` may be the same by chance; they are
    apart.

    Args:
        traced: a graph without in-place operations.
        inputs: two rows each, all different.

    Raises:
        Exception: whatever the graph raises for five rows, for two, or for one.

    >>> from fxcore import trace
    >>> compare_rows(trace(lambda x: torch.stack([x, -x]).flatten(0, 1).abs()), (torch.randn(2, 3),))
    Rows(apart=['flatten', 'abs'], dependent=None)
    >>> compare_rows(trace(lambda x: x - x.mean(0)), (torch.randn(2, 3),))
    Rows(apart=['sub'], dependent='sub')
    """
    batches = (inputs, [x[_FIVE] for x in inputs], [x[:1] for x in inputs], [x[1:] for x in inputs])
    state: dict[fx.Node, str] = {}
    images, across = set[fx.Node](), set[fx.Node]()  # nodes with values of images; of those, of a whole batch at once
    counted = set[fx.Node]()  # nodes whose number of rows depends on values of the images
    with deterministic(), memory_set(traced), _Counting() as counting:
        for node, (batch, five, *alone) in in_step(traced, batches):
            relation, counts = "none", counting.take()
            if isinstance(batch, Tensor):
                found = _relation(batch, *alone), _relation(five, *(alone[row] for row in _FIVE))
                state[node] = relation = max(found, key=_RELATIONS.index)
            read = _values_read(node)
            if node.op != "placeholder" and images.isdisjoint(read):
                continue
            part = node.target is operator.getitem and node.args[0] not in state
            if relation == "none" and (part or not is_torchs(traced, node)) and same_tensors(*alone):
                continue  # such as positions, of which a function that is kept whole only takes the device
            images.add(node)
            if (counts and _counts(traced, node, images)) or (not counted.isdisjoint(read) and not _writes(node)):
                counted.add(node)
                if relation == "alone":
                    state[node] = relation = "mixed"
            if not across.isdisjoint(read):
                across.add(node)
                if relation != "none":
                    state[node] = "differs"
            elif relation == "none" and isinstance(batch, Tensor):
                across.add(node)
    apart = [public_name(node) for node, found in state.items() if found in ("mixed", "differs")]
    results = {state[node] for node in traced.graph.output_node().all_input_nodes if node in state}
    differing = next((public_name(node) for node, found in state.items() if found == "differs"), None)
    depends = "differs" in results or not results & {"alone", "mixed"}
    return Rows(apart, differing if depends else None)


_RELATIONS = ("none", "alone", "mixed", "differs")
"""Results of :func:`_relation`, by increasing dependence of an image's values on the others in its batch."""


def _values_read(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of ``node`` whose values it reads, rather than only their shape, dtype or device."""
    name = operation_name(node)
    if reads_shape(node) or name.endswith("_like") or name.startswith("new_"):
        return []
    return node.all_input_nodes[:1] if name in _LIKE_ANOTHER else node.all_input_nodes


_LIKE_ANOTHER = {"expand_as", "reshape_as", "to", "type_as", "view_as"}


def _counts(traced: fx.GraphModule, node: fx.Node, images: set[fx.Node]) -> bool:
    """Return whether the number of rows of ``node``, which runs an operator like ``nonzero``, depends on ``images``."""
    given = {node}
    if node.target is operator.getitem:  # x[:, mask] has as many columns as a mask that is a constant says
        given = set(node.all_input_nodes[1:])
    return node.op != "call_module" and is_torchs(traced, node) and not images.isdisjoint(given)


def _writes(node: fx.Node) -> bool:
    """Return whether the value of ``node`` has the shape of its first input, into which it writes others."""
    return node.target is written or operation_name(node).startswith(_WRITES)


_WRITES = ("index_add", "index_copy", "index_put", "masked_scatter", "scatter", "where")


class _Counting(LenientMode):
    """Note whether an operator runs whose result has a shape that depends on values."""

    seen: bool = False

    def take(self) -> bool:
        """Return whether one has run since the last call."""
        seen, self.seen = self.seen, False
        return seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_number = func is torch.ops.aten.index.Tensor and all(t.dtype is torch.int64 for t in tensors_in(args[1]))
        self.seen |= torch.Tag.dynamic_output_shape in func.tags and not by_number
        return func(*args, **(kwargs or {}))


def _relation(batch: Tensor, *alone: Any) -> str:
    """Classify the values of a batch relative to those of the single images.

    ``alone`` if the batch is the concatenation of the single values along any dimension; ``mixed`` if it has the same
    rows in a different order; ``none`` if no dimension grows with the batch; else ``differs``.
    """
    if not all(isinstance(one, Tensor) and one.ndim == batch.ndim for one in alone):
        return "differs"
    axes = [i for i in range(batch.ndim) if batch.shape[i] == sum(one.shape[i] for one in alone)]
    if not axes:
        return "none" if all(one.shape == batch.shape for one in alone) else "differs"
    parts = torch.split(batch, [one.shape[axes[0]] for one in alone], axes[0])
    if any(part.shape != one.shape for part, one in zip(parts, alone, strict=True)):
        return "differs"
    if all(near(sampled(one), sampled(part), CLOSE) for part, one in zip(parts, alone, strict=True)):
        return "alone"
    expected = torch.cat(alone, axes[0])
    if axes[0] == 0 and near(expected.flatten().sort().values, batch.flatten().sort().values, CLOSE):
        return "mixed"
    return "differs"
