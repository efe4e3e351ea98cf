"""What the tests of graph work trace with."""

from __future__ import annotations

from torch import fx, nn

from fxcore import trace


def traced(model: nn.Module) -> fx.GraphModule:
    """``model`` as fxcore traces it, in eval mode."""
    return trace(model.eval())
