"""The values of options that take one of a few: of requests, of the client and of the commands."""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["float32", "bfloat16", "float16", "int8"]
Backend = Literal["auto", "eager", "inductor", "openvino"]
VectorPooling = Literal["avg", "max", "gem", "cls"]
RegionPooling = Literal["roi", "points", "mask"]
Dtype = Literal["float32", "float16", "bfloat16"]
Normalize = Literal["l2"]
Preprocess = Literal["default", "pil", "fast", "none"]
Attribution = Literal["gradcam", "gradient", "integrated_gradients"]
Fit = Literal["crop", "stretch", "pad", "native"]
ServerPreprocess = Literal["default", "pil", "fast"]
Source = Literal["torchvision", "timm", "packaged", "own"]
GraphFormat = Literal["json", "table", "code", "dot", "svg", "mermaid", "layout"]
ExportFormat = Literal["fx", "torch_export", "onnx", "openvino"]
FileFormat = Literal["safetensors", "npz", "parquet", "zarr"]
KeyScope = Literal["read", "admin"]
LogFormat = Literal["text", "json"]

POOL_PATTERN = "^({0}|({1})(\\+({1}))*)$".format(
    "|".join(("none", *get_args(RegionPooling))), "|".join(get_args(VectorPooling))
)
"""What :func:`pooling` takes, but that no vector is named twice."""


def pooling(text: object) -> str:
    """Return the value of the option ``pool``: ``none``, of regions, or to vectors joined by ``+``.

    Raises:
        ValueError: it is none.

    >>> pooling("cls+avg")
    'cls+avg'
    """
    vectors = text.split("+") if isinstance(text, str) else []
    known = get_args(VectorPooling)
    if text in ("none", *get_args(RegionPooling)) or (set(vectors) <= {*known} and 0 < len({*vectors}) == len(vectors)):
        return str(text)
    alone = ", ".join(("none", *get_args(RegionPooling)))
    raise ValueError(f"pool is {alone}, or one or more of {', '.join(known)} joined by +, not {text!r:.100}")
