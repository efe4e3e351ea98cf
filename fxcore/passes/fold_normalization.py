"""Fold the preprocessing's ``(x - mean) / std`` into the model's first convolution.

Without padding, a convolution of normalised images is a convolution of raw images with other weights. Zero padding of
normalised images corresponds to padding raw images with the mean, which costs one copy instead of the two passes of a
normalisation. If the first operation is not a convolution, or the images have other readers, they are normalised by a
node in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxcore.copies import shallow_copy
from fxcore.layer_types import ALL_CONVOLUTIONS, CONVOLUTIONS
from fxcore.passes.base import BadParameter, CannotTransform, add, hooked, transform
from fxcore.tracing.leaves import one_node
from fxcore.tracing.writes import reads_shape

#: key in ``GraphModule.meta`` of the mean and standard deviation of the normalisation folded into a module
NORMALIZED = "normalization"

# ImageNet's, for images in [0, 1].
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@one_node
def normalized(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise ``images`` per channel (dimension 1) as ``(images - mean) / std``; keep a floating-point dtype."""
    shape = (1, -1, *[1] * (images.ndim - 2))
    made = (images - mean.view(shape)) / std.view(shape)
    return made.to(images.dtype) if images.is_floating_point() else made


@one_node
def padded(images: Tensor, mean: Tensor, sides: Sequence[int]) -> Tensor:
    """Pad ``images`` with ``mean``; ``sides`` gives the padding before and after each spatial dimension."""
    spatial = images.shape[2:]
    size = [s + sides[2 * i] + sides[2 * i + 1] for i, s in enumerate(spatial)]
    made = mean.to(images.dtype).view(1, -1, *[1] * len(spatial)).expand(images.shape[0], -1, *size).contiguous()
    inner = (slice(None), slice(None), *(slice(sides[2 * i], sides[2 * i] + s) for i, s in enumerate(spatial)))
    made[inner] = images
    return made


@transform
def fold_normalization(
    module: fx.GraphModule,
    *,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> int:
    """Make a module that expects images normalised with ``mean`` and ``std`` accept images in [0, 1] instead.

    Exact up to rounding, and free if the first convolution does not pad. A convolution that pads gets images padded
    with ``mean``. If the images are also read elsewhere or returned, they are normalised in the graph, and all readers
    get the same values as before.

    Args:
        mean, std: values per input channel, for images in [0, 1]; by default ImageNet's.

    Raises:
        BadParameter: ``mean`` and ``std`` differ in length, or an element of ``std`` is not positive.
        CannotTransform: the graph has no input, or a normalisation is already folded in.

    >>> import torch
    >>> from torch import fx, nn
    >>> model = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 2, stride=2)).eval())
    >>> image = torch.rand(1, 3, 4, 4)
    >>> folded = fold_normalization(model, mean=[0.5, 0.5, 0.5], std=[0.2, 0.2, 0.2])
    >>> torch.allclose(folded(image), model((image - 0.5) / 0.2), atol=1e-5)
    True
    """
    if not _finite(mean) or not _finite(std) or len(mean) != len(std) or min(std) <= 0:
        raise BadParameter(
            "mean and std must have a finite number for each channel, and each std must be positive",
            parameter="std" if _finite(mean) else "mean",
        )
    if NORMALIZED in module.meta:
        raise CannotTransform("the normalisation of this module is folded in already")
    images = next((n for n in module.graph.nodes if n.op == "placeholder"), None)
    if images is None:
        raise CannotTransform("the graph has no input")
    readers = [n for n in images.users if not reads_shape(n)]
    chains = [_first_convolution(module, reader) for reader in readers]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    mean_at, std_at = (torch.tensor(v, device=device) for v in (mean, std))
    if readers and all(chain is not None and chain[-1].in_channels == len(mean) for chain in chains):
        for reader, chain in zip(readers, chains, strict=True):
            assert chain is not None
            _fold(module, images, reader, chain, mean_at, std_at)
    else:
        _normalize_in_graph(module, images, readers, mean_at, std_at)
    module.meta[NORMALIZED] = {"mean": list(mean), "std": list(std)}
    return len(readers)


def _finite(values: Any) -> bool:
    """Return whether ``values`` is a non-empty sequence of finite numbers."""
    numbers = isinstance(values, Sequence) and all(isinstance(v, Real) and math.isfinite(v) for v in values)
    return numbers and len(values) > 0


def _first_convolution(module: fx.GraphModule, reader: fx.Node) -> list[nn.Module] | None:
    """Return the modules from the one that ``reader`` calls down to the convolution in it that runs first; None if its
    first operation is not a convolution."""
    if reader.op != "call_module" or len(reader.all_input_nodes) != 1:
        return None
    found = [module.get_submodule(str(reader.target))]
    while isinstance(found[-1], nn.Sequential) and type(found[-1]).forward is nn.Sequential.forward and len(found[-1]):
        found.append(found[-1][0])
    last = found[-1]
    plain = type(last) in CONVOLUTIONS and last.padding_mode in ("zeros", "circular", "reflect", "replicate")
    return found if plain and not any(map(hooked, found)) else None


def _fold(
    module: fx.GraphModule, images: fx.Node, reader: fx.Node, chain: list[nn.Module], mean: Tensor, std: Tensor
) -> None:
    convolution = chain[-1]
    assert isinstance(convolution, ALL_CONVOLUTIONS)
    made = shallow_copy(convolution)
    assert isinstance(made, ALL_CONVOLUTIONS)
    weight = convolution.weight.double()
    groups, per_group = convolution.groups, weight.shape[1]
    # Each output channel reads the input channels of its own group.
    group = torch.arange(weight.shape[0], device=weight.device) // (weight.shape[0] // groups)
    channels = group[:, None] * per_group + torch.arange(per_group, device=weight.device)
    shape = (*channels.shape, *[1] * (weight.ndim - 2))
    new_weight = weight / std.double()[channels].view(shape)
    shift = -(new_weight * mean.double()[channels].view(shape)).flatten(1).sum(1)
    bias = shift if convolution.bias is None else convolution.bias.double() + shift
    made.weight = nn.Parameter(torch.empty_like(convolution.weight).copy_(new_weight), requires_grad=False)
    made.bias = nn.Parameter(bias.to(convolution.weight.dtype), requires_grad=False)
    # Padding with the images' own values commutes with normalisation; zero padding does not.
    sides = _sides(convolution) if convolution.padding_mode == "zeros" else [0]
    if any(sides):
        made.padding = (0,) * len(convolution.kernel_size)
        made._reversed_padding_repeated_twice = [0] * len(made._reversed_padding_repeated_twice)
        with module.graph.inserting_before(reader):
            around = module.graph.get_attr(add(module, "input_mean", mean))
            wider = module.graph.call_function(padded, (images, around, sides))
        reader.replace_input_with(images, wider)
    inner: nn.Module = made
    for container in reversed(chain[:-1]):
        copy = shallow_copy(container)
        copy.__dict__["_modules"][next(iter(copy._modules))] = inner
        inner = copy
    reader.target = add(module, str(reader.target), inner)


def _sides(convolution: Any) -> list[int]:
    """Return the convolution's padding before and after each spatial dimension."""
    reversed_sides = list(convolution._reversed_padding_repeated_twice)  # last dimension first, as in F.pad
    return [p for i in range(len(reversed_sides) - 2, -1, -2) for p in reversed_sides[i : i + 2]]


def _normalize_in_graph(
    module: fx.GraphModule, images: fx.Node, readers: list[fx.Node], mean: Tensor, std: Tensor
) -> None:
    with module.graph.inserting_before(images.next):
        means = module.graph.get_attr(add(module, "input_mean", mean))
        deviations = module.graph.get_attr(add(module, "input_std", std))
        made = module.graph.call_function(normalized, (images, means, deviations))
    for reader in readers:
        reader.replace_input_with(images, made)
