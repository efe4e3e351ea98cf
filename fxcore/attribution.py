"""Attribute a model's result to the values of a node.

The part of a model after the node is differentiated by torch.autograd; the part before it only runs. See
:func:`fxcore.extractor.build_extractor` for parts that start at inner nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fxcore.errors import BadTensor
from fxcore.graph.axes.layout import TOKENS
from fxcore.graph.tokens.token_grid import TokenGrid
from fxcore.pooling import as_maps

Back = Callable[..., Mapping[str, Tensor]]
"""``back(*values) -> {key: tensor}``, such as the module of an extractor that starts at inner nodes."""


class BadTarget(BadTensor):
    """The result has no value with that index, is not one vector per image, or has no gradient."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of chosen results.

    Attributes:
        targets: index of the result for each image, int64 ``[n]``.
        values: gradients of the results with respect to the values of the node, with their shape and dtype.
    """

    targets: Tensor
    values: Tensor


def gradients(back: Back, values: Sequence[Tensor], at: int, target: int | Tensor | None = None) -> Gradients:
    """Differentiate the single result of ``back``, ``[n, k]``, with respect to one of its inputs.

    Args:
        back: a differentiable function whose rows are independent of each other.
        values: its inputs, each ``[n, …]``.
        at: index of the input to differentiate by.
        target: index of the result, or one for each image, integers ``[n]``; None for the largest of each image.

    Raises:
        BadTarget: the result is not ``[n, k]``, has no value ``target``, the values have no gradients, as integers, or
            no gradient reaches them, e.g. because of quantized layers.
        BadTensor: parameters or buffers of ``back`` were made in inference mode.

    >>> found = gradients(lambda x: {"y": x @ torch.tensor([[1.0, 2.0], [3.0, 5.0]])}, [torch.ones(1, 2)], 0)
    >>> found.targets, found.values
    (tensor([1]), tensor([[2., 5.]]))
    """
    if not values[at].is_floating_point() and not values[at].is_complex():
        raise BadTarget(
            f"values of dtype {values[at].dtype} have no gradients; choose a node with floating-point values"
        )
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd cannot keep values that were computed in inference mode.
        given = [value.clone() if value.is_inference() else value.detach() for value in values]
        given[at] = given[at].clone().requires_grad_()
        try:
            [result] = back(*given).values()
        except RuntimeError as error:
            if "Inference tensors" not in str(error):
                raise
            raise BadTensor(
                "parameters or buffers were made in inference mode, and nothing can be differentiated through them; "
                "build the model outside torch.inference_mode(), or copy it there"
            ) from error
        check_result(list(result.shape[1:]), target)
        targets = result.argmax(1) if target is None else torch.as_tensor(target, device=result.device)
        if targets.numel() not in (1, len(result)):
            raise BadTarget(f"target must be one index, or {len(result)}, not {targets.numel()}", target=target)
        targets = targets.flatten().long().expand(len(result))
        chosen = result.gather(1, targets[:, None]).sum()
        found = None
        if chosen.requires_grad:
            [found] = torch.autograd.grad(chosen, given[at], allow_unused=True)
    if found is None:
        raise BadTarget("no gradient of the result reaches the node: something between them is not differentiable")
    return Gradients(targets.detach().clone(), found)


def check_result(shape: Sequence[int | None], target: int | Tensor | None) -> None:
    """Check that a result whose row has this ``shape`` is a vector with a value ``target``.

    Raises:
        BadTarget: the result is not such a vector.
    """
    if len(shape) != 1:
        raise BadTarget(f"the result to attribute must be one vector per image, but its shape is {[None, *shape]}")
    if target is None or shape[0] is None:
        return
    if isinstance(target, int):
        valid = 0 <= target < shape[0]  # of any size, unlike a tensor's values
    else:
        indices = torch.as_tensor(target)
        valid = not indices.is_floating_point() and bool(((indices >= 0) & (indices < shape[0])).all())
    if not valid:
        raise BadTarget(f"target must be from 0 to {shape[0] - 1}, or max for the largest, not {target}", target=target)


def positions(values: Tensor, layout: str | None, tokens: TokenGrid | None = None) -> Tensor:
    """Return maps, or tokens on a grid, as ``[n, C, H, W]``.

    Args:
        values: ``[n, C, H, W]``, ``[n, H, W, C]`` or tokens ``[n, L, C]``.
        layout: layout as in :class:`~fxcore.extractor.OutputInfo`.
        tokens: the grid of tokens; tokens before it are left out.

    Raises:
        BadTensor: the values have no positions.
    """
    check_positions(layout, tokens, values.shape)
    return as_maps(values, layout, tokens)


def check_positions(layout: str | None, tokens: TokenGrid | None, shape: Sequence[int | None]) -> None:
    """Check that values of ``shape`` have positions; see :func:`positions`.

    Raises:
        BadTensor: the values have no positions.
    """
    dims = {"NCHW": 4, "NHWC": 4, TOKENS: None if tokens is None else 3}.get(layout or "")
    if dims != len(shape):
        raise BadTensor(f"gradcam needs a feature map, or tokens on a grid; this is {layout or 'neither'} {[*shape]}")


def gradcam(maps: Tensor, found: Tensor) -> Tensor:
    """Return the positive part of the sum of channels weighted by their mean gradients, ``[n, H, W]`` (Selvaraju et
    al., 2017).

    Args:
        maps: values, ``[n, C, H, W]``.
        found: their gradients, of the same shape.

    >>> gradcam(torch.tensor([[[[1.0, -2.0]], [[3.0, 4.0]]]]), torch.tensor([[[[1.0, 1.0]], [[0.0, 2.0]]]]))
    tensor([[[4., 2.]]])
    """
    return (maps * found.mean((2, 3), keepdim=True)).sum(1).relu()


def integration_points(steps: int) -> list[tuple[float, float]]:
    """Return the interpolation factor and the weight of each step of integrated gradients with a baseline of zeros.

    The steps are those of Gauss-Legendre quadrature, like captum's ``gausslegendre``.

    >>> integration_points(1)
    [(0.5, 1.0)]
    """
    places, weights = np.polynomial.legendre.leggauss(steps)
    return [(float(0.5 * (1 + place)), float(0.5 * weight)) for place, weight in zip(places, weights, strict=True)]
