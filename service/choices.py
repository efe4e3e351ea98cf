"""The values of options that take one of a few: of requests, of the client and of the commands."""

from __future__ import annotations

from typing import Literal

Precision = Literal["float32", "bfloat16", "float16", "int8"]
Backend = Literal["auto", "eager", "inductor", "openvino"]
Pool = Literal["none", "avg", "max", "gem", "cls", "roi"]
Dtype = Literal["float32", "float16", "bfloat16"]
Normalize = Literal["l2"]
Preprocess = Literal["default", "pil", "fast", "none"]
ServerPreprocess = Literal["default", "pil", "fast"]
Source = Literal["torchvision", "timm", "packaged", "own"]
GraphFormat = Literal["json", "table", "code", "dot", "svg", "mermaid", "layout"]
ExportFormat = Literal["fx", "torch_export", "onnx", "openvino"]
FileFormat = Literal["safetensors", "npz", "parquet", "zarr"]
KeyScope = Literal["read", "admin"]
LogFormat = Literal["text", "json"]
