"""Trace models, or their traceable parts if torch.fx cannot trace the whole model.

Detectors loop over images and RAFT's forward branches on shapes, so their forward is untraceable. A detector's
backbone, feature pyramid and convolutional heads, and RAFT's two encoders, are traceable. A wrapper holds these parts
under their own names and runs only them, so that nodes keep their paths in the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torchvision.ops import FeaturePyramidNetwork

from fxcore.errors import NotTraceable
from fxcore.models.entry import ModelEntry
from fxcore.tracing.names import untraceable_modules
from fxcore.tracing.trace_arguments import default_leaf_modules
from fxcore.tracing.tracer import record


@dataclass(frozen=True)
class UntraceablePart:
    """The path of a module that cannot be traced, and the reason."""

    path: str
    reason: str


class DetectorParts(nn.Module):
    """A detector's backbone and dense head, from preprocessed images ``[N, 3, H, W]`` to feature maps and raw
    predictions.

    Args:
        detector: a torchvision detector.
        head: path of the dense head; None to leave it out.
    """

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
    """RAFT's two encoders, from one frame ``[N, 3, H, W]`` to both outputs."""

    def __init__(self, raft: Any) -> None:
        super().__init__()
        self.feature_encoder = raft.feature_encoder
        self.context_encoder = raft.context_encoder

    def forward(self, image1: Tensor) -> Any:
        return self.feature_encoder(image1), self.context_encoder(image1)


def trace_model(
    entry: ModelEntry, model: nn.Module, *, training: bool = False
) -> tuple[fx.Graph, nn.Module, list[UntraceablePart]]:
    """Trace ``model``, or its traceable parts if it is a detector or RAFT.

    This sets the mode of ``model``, and adds the constants of the graph to the returned module as attributes.

    Returns:
        The graph, the module that it was traced from (``model``, or a wrapper that shares its submodules), and the
        parts that could not be traced.

    Raises:
        NotTraceable: no part of the model can be traced.
    """
    model.train(training)
    if entry.task == "detection":
        return _trace_detector(model)
    if entry.task == "optical_flow":
        parts = FlowParts(model).train(training)
        traced = set(dict(parts.named_children()))
        return (*record(parts), _untraceable(model, traced))
    graph, root = record(model, leaf_modules=entry.leaf_modules(), leaf_functions=entry.leaf_functions())
    return graph, root, [UntraceablePart(path, reason) for path, reason in untraceable_modules(graph).items()]


def _trace_detector(model: nn.Module) -> tuple[fx.Graph, nn.Module, list[UntraceablePart]]:
    # torchvision's extractor treats the pyramid as a leaf, which would hide the feature maps.
    leaves = tuple(c for c in default_leaf_modules() if c is not FeaturePyramidNetwork)
    head = "rpn.head" if hasattr(model, "rpn") else "head"
    parts = DetectorParts(model, head).train(model.training)
    try:
        (graph, root), failed = record(parts, leaf_modules=leaves), []
    except NotTraceable as error:
        parts = DetectorParts(model, None).train(model.training)
        (graph, root), failed = record(parts, leaf_modules=leaves), [UntraceablePart(head, error.detail)]
        head = ""
    return graph, root, [*_untraceable(model, {"backbone", head}), *failed]


def _untraceable(model: nn.Module, traced: set[str]) -> list[UntraceablePart]:
    """Return the outermost modules that contain none of ``traced``, each with the reason why it was not traced."""
    found = []
    for path, child in _outermost(model, traced):
        try:
            record(child)
            reason = "it can only be traced apart: the code that calls it cannot"
        except NotTraceable as error:
            reason = error.problem
        found.append(UntraceablePart(path, reason))
    return found


def _outermost(model: nn.Module, traced: set[str], prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in model.named_children():
        path = prefix + name
        if path in traced:
            continue
        if any(part.startswith(path + ".") for part in traced):
            found += _outermost(child, traced, path + ".")
        else:
            found.append((path, child))
    return found
