"""Tracing for the tests of graph passes."""

from __future__ import annotations

from torch import fx, nn

from fxcore import trace


def traced(model: nn.Module) -> fx.GraphModule:
    """Trace ``model`` with fxcore, in eval mode."""
    return trace(model.eval())
