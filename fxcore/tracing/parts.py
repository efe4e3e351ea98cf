"""Models that torch.fx cannot trace as they stand, opened as far as they can be.

Detectors loop over images and RAFT's forward branches on shapes, so their whole forward stays closed; the backbone,
the feature pyramid and the convolutional heads of a detector, and RAFT's two encoders, are ordinary graphs. A wrapper
with the parts under their own names runs those alone, so nodes keep their true paths in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torchvision.ops import FeaturePyramidNetwork

from fxcore.errors import NotTraceable
from fxcore.models.entry import ModelEntry
from fxcore.tracing.trace_arguments import default_leaf_modules
from fxcore.tracing.tracer import closed_modules, record


@dataclass(frozen=True)
class UntraceablePart:
    """A module whose inside cannot be asked for, and why."""

    path: str
    reason: str


class DetectorParts(nn.Module):
    """Preprocessed images ``[N, 3, H, W]`` → the backbone's feature maps and the dense head's raw predictions."""

    def __init__(self, detector: Any, head: str | None) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self._head = head
        if head == "rpn.head":
            self.rpn = nn.Module()
            self.rpn.head = detector.rpn.head
        elif head == "head":
            self.head = detector.head

    def forward(self, images: Tensor) -> Any:
        features = self.backbone(images)
        maps = list(features.values())
        predictions = self.get_submodule(self._head)(maps) if self._head else None
        return features, predictions


class FlowParts(nn.Module):
    """One frame ``[N, 3, H, W]`` → what RAFT's two encoders make of it."""

    def __init__(self, raft: Any) -> None:
        super().__init__()
        self.feature_encoder = raft.feature_encoder
        self.context_encoder = raft.context_encoder

    def forward(self, image1: Tensor) -> Any:
        return self.feature_encoder(image1), self.context_encoder(image1)


def trace_model(
    entry: ModelEntry, model: nn.Module, *, training: bool = False
) -> tuple[fx.Graph, nn.Module, list[UntraceablePart]]:
    """Trace ``model``, or of a detector or RAFT the parts that can be traced.

    ``model`` is left in the mode asked for, with the tensors that tracing computes as attributes of its root.

    Returns:
        The graph, the module that it was traced from (``model``, or a wrapper that shares its submodules), and what
        stayed closed.

    Raises:
        NotTraceable: nothing of the model could be traced.
    """
    model.train(training)
    if entry.task == "detection":
        return _trace_detector(model)
    if entry.task == "optical_flow":
        parts = FlowParts(model).train(training)
        opened = set(dict(parts.named_children()))
        return (*record(parts), _closed(model, opened))
    graph, root = record(model, leaf_modules=entry.leaf_modules(), leaf_functions=entry.leaf_functions())
    return graph, root, [UntraceablePart(path, reason) for path, reason in closed_modules(graph).items()]


def _trace_detector(model: nn.Module) -> tuple[fx.Graph, nn.Module, list[UntraceablePart]]:
    # torchvision keeps the pyramid whole by default, which would hide the maps that people want most.
    leaves = tuple(c for c in default_leaf_modules() if c is not FeaturePyramidNetwork)
    head = "rpn.head" if hasattr(model, "rpn") else "head"
    parts = DetectorParts(model, head).train(model.training)
    try:
        (graph, root), closed_head = record(parts, leaf_modules=leaves), []
    except NotTraceable as error:
        parts = DetectorParts(model, None).train(model.training)
        (graph, root), closed_head = record(parts, leaf_modules=leaves), [UntraceablePart(head, error.detail)]
        head = ""
    return graph, root, [*_closed(model, {"backbone", head}), *closed_head]


def _closed(model: nn.Module, opened: set[str]) -> list[UntraceablePart]:
    """Every outermost module that is not among ``opened``, with the reason that tracing it gives."""
    closed = []
    for path, child in _outermost(model, opened):
        try:
            record(child)
            reason = "it can only be traced apart: the code that calls it cannot"
        except NotTraceable as error:
            reason = error.detail.split("; ")[0]
        closed.append(UntraceablePart(path, reason))
    return closed


def _outermost(model: nn.Module, opened: set[str], prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in model.named_children():
        path = prefix + name
        if path in opened:
            continue
        if any(o.startswith(path + ".") for o in opened):
            found += _outermost(child, opened, path + ".")
        else:
            found.append((path, child))
    return found
