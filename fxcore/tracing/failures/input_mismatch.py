"""Explain why a module does not accept its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx, nn

from fxcore.errors import BadTensor, FxError, summarize
from fxcore.layer_types import ALL_CONVOLUTIONS, BATCH_NORMS, INSTANCE_NORMS
from fxcore.tensors import dtype_name
from fxcore.tracing.failures.fake_tensors import fake_failure, needs_values
from fxcore.tracing.interpreter import Interpreter
from fxcore.tracing.names import public_name

_RAISED = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""Exceptions that torch raises for mismatched shapes or dtypes, among other reasons."""

_SPATIAL = {1: "length", 2: "height, width", 3: "depth, height, width"}


@contextlib.contextmanager
def explain_mismatch(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[None]:
    """Convert errors caused only by shapes or dtypes to :class:`BadTensor` in a block that calls ``function``.

    For a graph module, the error names the first node that does not accept its arguments, and what that node expects.
    Other errors, such as out of memory, pass through unchanged.

    Raises:
        BadTensor: ``function`` is a module and does not accept ``inputs``; has ``given``, ``node`` and ``expected``.

    >>> import torch
    >>> module = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    >>> image = torch.ones(1, 224, 224, 3)
    >>> try:
    ...     with explain_mismatch(module, (image,)):
    ...         module(image)
    ... except BadTensor as error:
    ...     error.extra["node"], error.extra["expected"]
    ('_0', 'float32 [N, 3, height, width]')
    """
    try:
        yield
    except FxError:
        raise
    except _RAISED as error:
        mismatch = _mismatch(function, inputs, error) if isinstance(function, nn.Module) else None
        if mismatch is None:
            raise
        raise mismatch from error


def _mismatch(module: nn.Module, inputs: tuple[Any, ...], error: Exception) -> BadTensor | None:
    """Run ``module`` on fake tensors; return None unless it fails there too, because of shapes or dtypes alone."""
    locator = _Locator(module) if isinstance(module, fx.GraphModule) else None
    failure = fake_failure(module if locator is None else locator.run, inputs)
    if failure is None or needs_values(failure):
        return None
    if not isinstance(failure, _RAISED):
        raise failure
    given = [_shown(value) for value in inputs]
    node = public_name(locator.node) if locator is not None else None
    expected = None if locator is None else _takes(locator.called)
    reached = "" if locator is None else ", ".join(map(_shown, locator.reached))
    if expected is not None:
        why = f"{node} expects {expected}, but got {reached}"
    elif node is not None:
        why = f"at {node}, which got {reached or 'nothing'}: {summarize(error)}"
    else:
        why = summarize(error)
    name = type(module).__name__
    return BadTensor(f"{name} does not take {', '.join(given)}: {why}", given=given, node=node, expected=expected)


class _Locator(Interpreter):
    """An interpreter that records the current node, the module that it calls, and its arguments."""

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        self.called = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        args, kwargs = self.fetch_args_kwargs_from_env(n) if n.op != "placeholder" else ((), {})
        self.reached = (*args, *kwargs.values())
        return super().run_node(n)


def _takes(layer: nn.Module | None) -> str | None:
    """Return the dtype and shape that a torch layer accepts; None for layers whose parameters do not determine them."""
    if isinstance(layer, nn.Embedding):
        return f"integers from 0 to {layer.num_embeddings - 1}"
    if isinstance(layer, nn.Linear):
        sizes = f"…, {layer.in_features}"
    elif isinstance(layer, ALL_CONVOLUTIONS):
        sizes = f"N, {layer.in_channels}, {_SPATIAL[len(layer.kernel_size)]}"
    elif isinstance(layer, (*BATCH_NORMS, *INSTANCE_NORMS)):
        sizes = f"N, {layer.num_features}, …"
    elif isinstance(layer, nn.GroupNorm):
        sizes = f"N, {layer.num_channels}, …"
    elif isinstance(layer, nn.LayerNorm):
        sizes = f"…, {', '.join(map(str, layer.normalized_shape))}"
    else:
        return None
    weight = next(layer.parameters(), None)
    return f"[{sizes}]" if weight is None else f"{dtype_name(weight.dtype)} [{sizes}]"


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r:.100}"
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{dtype_name(value.dtype)} {list(value.shape)}{device}"
