"""Attributions: which values of a node a model's result came from.

The part of a model behind the node is differentiated by torch.autograd; what lies before it is only run. See
:func:`fxcore.extractor.build_extractor` for parts that begin at inner nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.graph.layout import TOKENS
from fxcore.graph.tokens.token_grid import TokenGrid
from fxcore.pooling import as_maps

Back = Callable[..., Mapping[str, Tensor]]
"""``back(*values) -> {key: tensor}``, such as the module of an extractor that begins at inner nodes."""


class BadTarget(BadTensor):
    """A result has no value of that index, is no vector an image, or has no gradient."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of chosen results.

    Attributes:
        targets: index of the result of each image, ``[n]``, int64.
        values: of the results by the values of the node, of their shape and dtype.
    """

    targets: Tensor
    values: Tensor


def gradients(back: Back, values: Sequence[Tensor], at: int, target: int | Tensor | None = None) -> Gradients:
    """Differentiate the one result of ``back``, ``[n, k]``, by one of its inputs.

    Args:
        back: differentiable; rows are independent of each other.
        values: its inputs, each ``[n, …]``.
        at: which of them.
        target: index of the result, or one for each image, int64 ``[n]``; None for the largest of each image.

    Raises:
        BadTarget: the result is not ``[n, k]``, has no value ``target``, or no gradient reaches the values, as through
            quantized layers.

    >>> found = gradients(lambda x: {"y": x @ torch.tensor([[1.0, 2.0], [3.0, 5.0]])}, [torch.ones(1, 2)], 0)
    >>> found.targets, found.values
    (tensor([1]), tensor([[2., 5.]]))
    """
    with torch.enable_grad():
        given = [value.detach() for value in values]
        given[at] = given[at].clone().requires_grad_()
        [result] = back(*given).values()
        check_result(list(result.shape[1:]), target)
        if target is None:
            targets = result.argmax(1)
        else:
            targets = torch.as_tensor(target, device=result.device).expand(len(result))
        chosen = result.gather(1, targets[:, None]).sum()
        found = None
        if chosen.requires_grad:
            [found] = torch.autograd.grad(chosen, given[at], allow_unused=True)
    if found is None:
        raise BadTarget("no gradient of the result reaches the node: something between them is not differentiable")
    return Gradients(targets.detach().clone(), found)


def check_result(shape: Sequence[int | None], target: int | Tensor | None) -> None:
    """Check that a result, whose row has this ``shape``, is a vector with a value ``target``.

    Raises:
        BadTarget: it is not.
    """
    if len(shape) != 1:
        raise BadTarget(f"a result is attributed that is one vector an image, and its shape is {[None, *shape]}")
    if isinstance(target, int) and shape[0] is not None and not 0 <= target < shape[0]:
        raise BadTarget(f"target is from 0 to {shape[0] - 1}, or max for the largest, not {target}", target=target)


def positions(values: Tensor, layout: str | None, tokens: TokenGrid | None = None) -> Tensor:
    """Return maps, or tokens on a grid, as ``[n, C, H, W]``.

    Args:
        values: ``[n, C, H, W]``, ``[n, H, W, C]`` or tokens ``[n, L, C]``.
        layout: of an :class:`~fxcore.extractor.OutputInfo`.
        tokens: the grid of tokens; those before it are left out.

    Raises:
        BadTensor: they have no positions.
    """
    check_positions(layout, tokens, values.shape)
    return as_maps(values, layout, tokens)


def check_positions(layout: str | None, tokens: TokenGrid | None, shape: Sequence[int | None]) -> None:
    """Check that values of ``shape`` have positions; see :func:`positions`.

    Raises:
        BadTensor: they have none.
    """
    if layout not in ("NCHW", "NHWC") and not (layout == TOKENS and tokens is not None):
        raise BadTensor(f"gradcam needs a feature map, or tokens on a grid; this is {layout or 'neither'} {[*shape]}")


def gradcam(maps: Tensor, found: Tensor) -> Tensor:
    """Return the positive part of the channels' sum weighted by their mean gradients, ``[n, H, W]`` (Selvaraju et al.,
    2017).

    Args:
        maps: values, ``[n, C, H, W]``.
        found: their gradients, of the same shape.

    >>> gradcam(torch.tensor([[[[1.0, -2.0]], [[3.0, 4.0]]]]), torch.tensor([[[[1.0, 1.0]], [[0.0, 2.0]]]]))
    tensor([[[4., 2.]]])
    """
    return (maps * found.mean((2, 3), keepdim=True)).sum(1).relu()


def integration_points(steps: int) -> list[tuple[float, float]]:
    """Return the share of the way from zeros, and the weight, of each step of integrated gradients: Gauss-Legendre
    quadrature, as captum's ``gausslegendre``.

    >>> integration_points(1)
    [(0.5, 1.0)]
    """
    places, weights = np.polynomial.legendre.leggauss(steps)
    return [(float(0.5 * (1 + place)), float(0.5 * weight)) for place, weight in zip(places, weights, strict=True)]
