"""JSON bodies of extractors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.choices import Precision

State = Literal["building", "ready", "failed"]


class TokenGrid(BaseModel):
    """The grid of patches, in row-major order, behind tokens `[N, L, C]` or attention weights `[N, heads, L, L]`."""

    node: str = Field(description="The map that was flattened.", examples=["conv_proj"])
    height: int = Field(examples=[14])
    width: int = Field(examples=[14])
    prefix: int = Field(description="Number of tokens before the patches: a class token, registers.", examples=[1])
    class_token: bool = Field(description="Whether the first of them is a class token.", examples=[True])


class PrefixTokens(BaseModel):
    """The tokens before those of the patches: a class token, registers."""

    count: int = Field(examples=[1])
    class_token: bool = Field(description="Whether the first is a class token, which `pool=cls` returns.")


class AttentionGrid(BaseModel):
    """The map whose positions attend to each other, for weights `[N, heads, L, L]` or `[N, windows, heads, L, L]`."""

    height: int = Field(examples=[56])
    width: int = Field(examples=[56])
    prefix: int = Field(description="Number of tokens before the positions, which also attend.", examples=[0])
    window: tuple[int, int] | None = Field(
        description="Height and width of the windows that the map is split into, in row-major order, after padding at "
        "the bottom and right; null if every position attends to all.",
        examples=[[7, 7]],
    )
    shift: tuple[int, int] = Field(
        description="Rows and columns that the map is rolled by, up and to the left, before splitting.",
        examples=[[3, 3]],
    )


class OutputDetail(BaseModel):
    """One output of an extractor; null in a shape is the number of images, or a size that depends on the input."""

    key: str = Field(examples=["C4"])
    node: str = Field(examples=["layer3"])
    shape: list[int | None] | None = Field(examples=[[None, 1024, 14, 14]])
    dtype: str | None = Field(examples=["float32"])
    layout: str | None = Field(examples=["NCHW"])
    stride: int | None = Field(examples=[16])
    bytes_per_image: int | None = Field(examples=[802816])
    rows_per_image: int = Field(examples=[1])
    tokens: TokenGrid | None = Field(
        default=None,
        description="The grid of patches, if the output is tokens or their attention weights.",
        examples=[None],
    )
    prefix: PrefixTokens | None = Field(
        default=None, description="The tokens that stand for no patch, which pooling leaves out.", examples=[None]
    )
    attention: AttentionGrid | None = Field(
        default=None, description="The positions that attend, if the output is attention weights.", examples=[None]
    )


class InputDetail(BaseModel):
    """An input of an extractor."""

    name: str = Field(examples=["x"])
    node: str | None = Field(
        description="The inner node it stands for; null for an input of the model.", examples=[None]
    )
    layout: str | None = Field(examples=["NCHW"])
    shape: list[int | None] | None = Field(
        description="Sizes, null where any is taken.", examples=[[None, 3, 224, 224]]
    )


class InputSize(BaseModel):
    """An input size that an extractor with `fit=native` is in memory for, of a model that is built for one size."""

    height: int = Field(examples=[518])
    width: int = Field(examples=[784])
    backend: str = Field(description="What computes images of that size.", examples=["eager"])
    images: int = Field(description="Images of that size that were answered.", examples=[3])


class EditedNodes(BaseModel):
    """Nodes that requests to an extractor edit, which a graph of its own computes."""

    nodes: list[str] = Field(examples=[["layer2.3.relu_2"]])
    backend: str = Field(
        description="What computes requests that edit these nodes, whatever backend computes the others; boxes and "
        "tokens are edited on eager.",
        examples=["eager"],
    )
    images: int = Field(description="Images of such requests that were answered.", examples=[3])


class ExtractorDetail(BaseModel):
    """An extractor and its state."""

    id: str = Field(examples=["3f9a1c5be07d"])
    name: str | None = Field(examples=["r50-c4c5"])
    state: State = Field(examples=["ready"])
    model: str = Field(examples=["resnet50"])
    weights: str = Field(examples=["IMAGENET1K_V2"])
    device: str | None = Field(examples=["cpu"])
    backend: str | None = Field(examples=["eager"])
    precision: Precision = Field(examples=["float32"])
    inputs: list[InputDetail] = Field(description="What its requests hold as tensors.")
    outputs: list[OutputDetail]
    preprocessing: dict[str, Any] | None = Field(examples=[{"resize_size": [232], "crop_size": [224]}])
    fingerprint: str | None = Field(examples=["b0f1c6d2a4e8"])
    sizes: list[InputSize] = Field(
        default_factory=list, description="Input sizes beside the usual one that it is in memory for.", examples=[[]]
    )
    edits: list[EditedNodes] = Field(
        default_factory=list, description="Nodes whose edits it is in memory for.", examples=[[]]
    )
    checks: dict[str, Any] | None = Field(
        description="Errors of the backend's values relative to the unmodified model in eager PyTorch, on photographs; "
        "null until measured.",
        examples=[{"reference": "eager float32", "max_abs_error": 1.9e-06, "max_rel_error": 3.2e-07}],
    )
    note: str | None = Field(
        default=None, description="Why its precision is slower than float32 on this machine.", examples=[None]
    )
    problem: dict[str, Any] | None = Field(
        default=None, description="Why the build failed, if the state is `failed`.", examples=[None]
    )


class ExtractorList(BaseModel):
    extractors: list[ExtractorDetail]
