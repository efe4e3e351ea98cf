"""Planning of tensors: uint8 images are preprocessed, others are converted to float32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from fxcore.errors import BadTensor, ImageTooLarge
from fxcore.images.preprocessing import Preprocessing
from fxcore.tensors import TensorSpec, dtype_name
from service.engine.description import Description
from service.engine.requests.plan.plan import FLOAT_BYTES, Part, Plan, spread
from service.engine.rows.shapes import RowShape

MAX_ROWS = 2**20
"""Maximum rows of a request of tensors."""

_PARTS = 16
"""Maximum parts that a request's images are split into: enough to share among threads, few enough for little overhead.
"""


def plan_tensors(description: Description, tensors: Mapping[str, Tensor], preprocess: str, max_pixels: int) -> Plan:
    """Plan a request of tensors, by model input name, without preprocessing them.

    Args:
        description: the extractor's description.
        tensors: the request's tensors.
        preprocess: mode for uint8 images: ``default``, ``pil``, ``fast`` or ``none``.
        max_pixels: maximum pixels per image.

    Raises:
        BadTensor: a wrong name, shape or dtype.
        ImageTooLarge: uint8 images have too many pixels.
    """
    specs = description.inputs
    if set(tensors) != {spec.name for spec in specs}:
        raise BadTensor(
            f"{description.of} takes tensors named {', '.join(s.name for s in specs)}; the request has "
            f"{', '.join(sorted(tensors)) or 'none'}"
        )
    counts = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise BadTensor(f"all tensors must have the same first dimension, at least 1; the request has {counts}")
    rows = next(iter(counts.values()))
    if rows > MAX_ROWS:
        raise BadTensor(f"the request has {rows} rows; send at most {MAX_ROWS} at a time")
    ordered = [tensors[spec.name] for spec in specs]
    shapes = []
    boxes = None
    sent = {}
    for spec, tensor in zip(specs, ordered, strict=True):
        if spec.node is not None:
            _check_value(spec, tensor)
            shapes.append(tuple(tensor.shape[1:]))
            continue
        _check_tensor(spec, tensor)
        if tensor.dtype == torch.uint8:
            _check_pixels(tensor.shape[-3], tensor.shape[-2], max_pixels)
            if preprocess != "none":
                _check_preprocessed(spec, tensor, description.preprocessing)
                sent[tensor.shape[-3], tensor.shape[-2]] = 0
                box = description.preprocessing.valid_box(tensor.shape[-3], tensor.shape[-2])
                boxes = None if box is None else torch.tensor([box], dtype=torch.float32).expand(rows, 4)
        shapes.append(_row_shape(description.preprocessing, tensor, preprocess))
    row_shape: RowShape = tuple(shapes)
    decoded = sum(rows * FLOAT_BYTES * torch.Size(shape).numel() for shape in shapes)
    cost = 0  # for one image or frame at a time, and all frames of a clip together
    for tensor in ordered:
        if tensor.dtype == torch.uint8 and preprocess != "none":
            frames = tensor.shape[1] if tensor.ndim == 5 else 1
            cost += frames * description.decoder.held(tensor.shape[-3], tensor.shape[-2], preprocess)

    def prepare(indices: range) -> tuple[Tensor, ...]:
        whole = len(indices) == rows  # for a small tensor, slicing would dominate
        parts = ordered if whole else [tensor[indices.start : indices.stop] for tensor in ordered]
        return tuple(_prepared(description, part, preprocess) for part in parts)

    # Images are split among threads; tensors are only converted.
    step = -(-rows // _PARTS) if any(tensor.dtype == torch.uint8 for tensor in ordered) else rows
    parts = [Part(indices, row_shape, partial(prepare, indices)) for indices in spread(rows, step)]
    # Stacking single rows into a part needs a second copy of them.
    costs = [cost and cost + decoded * len(part.rows) // rows for part in parts]
    return Plan(parts, decoded, costs, sent=sent, valid_boxes=boxes)


def _check_value(spec: TensorSpec, tensor: Tensor) -> None:
    """Check a request's tensor for the inner node of ``spec``.

    Raises:
        BadTensor: its dtype or shape is wrong.
    """
    wanted = spec.shape[1:]
    fits = tensor.ndim == len(spec.shape) and all(w in (None, d) for w, d in zip(wanted, tensor.shape[1:], strict=True))
    if tensor.dtype.is_floating_point and fits and 0 not in tensor.shape:
        return
    sizes = ", ".join(["N", *(str(size) if size is not None else "any" for size in wanted)])
    raise BadTensor(
        f"tensor {spec.name!r} is {dtype_name(tensor.dtype)} {list(tensor.shape)}; values of {spec.node} must be "
        f"float32 [{sizes}]"
    )


def _check_tensor(spec: TensorSpec, tensor: Tensor) -> None:
    """Check a request's tensor for the input ``spec``.

    Raises:
        BadTensor: its dtype or shape is wrong.
    """
    images = tensor.dtype == torch.uint8
    if not images and not tensor.dtype.is_floating_point:
        raise BadTensor(
            f"tensor {spec.name!r} is {dtype_name(tensor.dtype)}; send preprocessed float32 values, or uint8 images"
        )
    given = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    channels = spec.shape[spec.layout.index("C")]
    if tensor.ndim != len(spec.layout) or tensor.shape[-1 if images else spec.layout.index("C")] != channels:
        wanted = f"uint8 {spec.layout.replace('C', '')}C" if images else f"float32 {spec.layout}"
        raise BadTensor(f"tensor {spec.name!r} is {given}; this model takes {wanted} with {channels} channels")
    if 0 in tensor.shape:
        raise BadTensor(f"tensor {spec.name!r} is {given}; each of its sizes must be at least 1")


def _check_preprocessed(spec: TensorSpec, tensor: Tensor, preprocessing: Preprocessing) -> None:
    """Check that ``preprocessing`` accepts these uint8 images.

    Raises:
        BadTensor: their number of channels is not that of an image.
    """
    if preprocessing.layout == "NCHW" and not preprocessing.takes_images:
        channels = tensor.shape[-1]
        raise BadTensor(
            f"tensor {spec.name!r} is uint8 with {channels} channels, which are not preprocessed here; send float32 "
            f"[N, {channels}, H, W], or preprocess=none to have them scaled to [0, 1]"
        )


def _row_shape(preprocessing: Preprocessing, tensor: Tensor, preprocess: str) -> tuple[int, ...]:
    if tensor.dtype != torch.uint8:
        return tuple(tensor.shape[1:])
    *outer, height, width, channels = tensor.shape[1:]
    size = (height, width) if preprocess == "none" else preprocessing.output_size(height, width)
    return (channels, *outer, *size)


def _prepared(description: Description, tensor: Tensor, preprocess: str) -> Tensor:
    if tensor.dtype == torch.float32:
        return tensor.contiguous()  # avoid .to(), which releases the GIL even if it changes nothing
    if tensor.dtype != torch.uint8:
        return tensor.to(torch.float32).contiguous()
    if preprocess == "none":
        return tensor.movedim(-1, 1) / 255
    if description.preprocessing.layout != "NCHW":
        return description.preprocessing.from_array(tensor)
    rows = tensor.expand(*tensor.shape[:-1], 3) if tensor.shape[-1] == 1 else tensor  # grey
    return torch.stack([description.decoder.pixels(pixels, preprocess) for pixels in rows])


def _check_pixels(height: int, width: int, max_pixels: int) -> None:
    """Check the images of an array against the limit for images in files.

    Raises:
        ImageTooLarge: they have more than ``max_pixels``.
    """
    pixels = height * width
    if pixels > max_pixels:
        raise ImageTooLarge(
            f"the images have {width} x {height} = {pixels} pixels; at most {max_pixels} are allowed",
            pixels=pixels,
            limit=max_pixels,
        )
