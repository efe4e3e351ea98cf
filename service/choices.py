"""The allowed values of options of requests, the client and the commands."""

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
LogLevel = Literal["critical", "error", "warning", "info", "debug"]

Reduction = Literal["mean", "std", "cov", "top"]

MAX_TOP = 1000
"""Maximum images that ``top`` keeps for each channel."""

POOL_PATTERN = "^({0}|({1})(\\+({1}))*)$".format(
    "|".join(("none", *get_args(RegionPooling))), "|".join(get_args(VectorPooling))
)
"""Pattern of the values accepted by :func:`pooling`, which also rejects repeated names."""


def pooling(text: object) -> str:
    """Validate the option ``pool``: ``none``, a region pooling, or one or more vector poolings joined by ``+``.

    Raises:
        ValueError: it is invalid.

    >>> pooling("cls+avg")
    'cls+avg'
    """
    vectors = text.split("+") if isinstance(text, str) else []
    known = get_args(VectorPooling)
    if text in ("none", *get_args(RegionPooling)) or (set(vectors) <= {*known} and 0 < len({*vectors}) == len(vectors)):
        return str(text)
    alone = ", ".join(("none", *get_args(RegionPooling)))
    raise ValueError(f"pool must be {alone}, or one or more of {', '.join(known)} joined by +, not {text!r:.100}")


def reductions(text: object) -> str:
    """Normalise the option ``reduce``: ``mean``, ``std``, ``cov`` and ``top:N``, joined by commas, in this order.

    Raises:
        ValueError: it is invalid.

    >>> reductions("top:9,mean")
    'mean,top:9'
    """
    given = text.replace(" ", "").split(",") if isinstance(text, str) else []
    found: dict[str, str] = {}
    for one in given:
        name, _, count = one.partition(":")
        is_top = name == "top" and count.isascii() and count.isdigit() and 1 <= int(f"0{count[:9]}") <= MAX_TOP
        if name in found or not (is_top or one in ("mean", "std", "cov")):
            found = {}
            break
        found[name] = f"top:{int(count)}" if is_top else one
    if not found:
        raise ValueError(
            f"reduce must be one or more of mean, std, cov and top:N (N up to {MAX_TOP}), separated by commas, each "
            f"at most once, not {text!r:.100}"
        )
    return ",".join(found[name] for name in get_args(Reduction) if name in found)
