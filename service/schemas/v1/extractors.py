"""JSON bodies of extractors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.choices import Precision

State = Literal["building", "ready", "failed"]


class TokenGrid(BaseModel):
    """The grid of patches, in row-major order, behind tokens `[N, L, C]` or attention weights `[N, heads, L, L]`."""

    node: str = Field(description="Node of the feature map that was flattened into tokens.", examples=["conv_proj"])
    height: int = Field(examples=[14])
    width: int = Field(examples=[14])
    prefix: int = Field(
        description="Number of tokens before the patches, such as a class token or registers.", examples=[1]
    )
    class_token: bool = Field(description="Whether the first of these is a class token.", examples=[True])


class PrefixTokens(BaseModel):
    """The tokens before the patch tokens, such as a class token or registers."""

    count: int = Field(examples=[1])
    class_token: bool = Field(
        description="Whether the first is a class token, which `pool=cls` returns.", examples=[True]
    )


class AttentionGrid(BaseModel):
    """The map whose positions attend to each other, for weights `[N, heads, L, L]` or `[N, windows, heads, L, L]`."""

    height: int = Field(examples=[56])
    width: int = Field(examples=[56])
    prefix: int = Field(
        description="Number of tokens before the positions; they also take part in attention.", examples=[0]
    )
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
    """One output of an extractor. Null in a shape is the number of images, or a size that depends on the input."""

    key: str = Field(examples=["C4"])
    node: str = Field(examples=["layer3"])
    shape: list[int | None] | None = Field(examples=[[None, 1024, 14, 14]])
    dtype: str | None = Field(examples=["float32"])
    layout: str | None = Field(
        description="The axes, `?` for one that is unknown; null if they are unknown.", examples=["NCHW"]
    )
    stride: int | None = Field(examples=[16])
    bytes_per_image: int | None = Field(examples=[802816])
    rows_per_image: int = Field(examples=[1])
    tokens: TokenGrid | None = Field(
        default=None,
        description="The grid of patches, if the output is tokens or their attention weights.",
        examples=[None],
    )
    prefix: PrefixTokens | None = Field(
        default=None, description="The tokens that do not represent a patch; pooling excludes them.", examples=[None]
    )
    attention: AttentionGrid | None = Field(
        default=None,
        description="The grid of attending positions, if the output is attention weights.",
        examples=[None],
    )


class InputDetail(BaseModel):
    """An input of an extractor."""

    name: str = Field(examples=["x"])
    node: str | None = Field(
        description="The inner node that this input replaces; null for an input of the model.", examples=[None]
    )
    layout: str | None = Field(examples=["NCHW"])
    shape: list[int | None] | None = Field(
        description="Sizes; null where any size is accepted.", examples=[[None, 3, 224, 224]]
    )


class InputSize(BaseModel):
    """An input size for which an extractor with `fit=native` is in memory, if its model is built for one size."""

    height: int = Field(examples=[518])
    width: int = Field(examples=[784])
    backend: str = Field(description="Backend that computes images of this size.", examples=["eager"])
    images: int = Field(description="Number of images of this size processed so far.", examples=[3])


class EditedNodes(BaseModel):
    """Nodes that requests to an extractor edit. Such requests run on a separate graph."""

    nodes: list[str] = Field(examples=[["layer2.3.relu_2"]])
    backend: str = Field(
        description="Backend that computes requests that edit these nodes; it may differ from the extractor's. Edits "
        "of boxes and tokens run on eager.",
        examples=["eager"],
    )
    images: int = Field(description="Number of images in such requests so far.", examples=[3])


class Checks(BaseModel):
    """Errors of the backend's values on photographs; null until measured."""

    reference: str = Field(description="What the values are compared with.", examples=["eager float32"])
    max_abs_error: float | None = Field(examples=[1.9e-06])
    max_rel_error: float | None = Field(
        description="Norm of the differences, divided by that of the reference.", examples=[3.2e-07]
    )
    candidates: list[dict[str, Any]] = Field(
        description="The backends that were tried, with their errors, their milliseconds by number of rows, and why "
        "each was refused.",
        examples=[
            [
                {
                    "backend": "openvino",
                    "state": "serving",
                    "max_abs_error": 1.9e-06,
                    "max_rel_error": 3.2e-07,
                    "min_cosine": 1.0,
                    "ms": {"1": 4.1},
                    "reason": None,
                }
            ]
        ],
    )
    layers: list[dict[str, Any]] | None = Field(
        default=None,
        description="The accuracy that each layer loses in int8, the largest loss first.",
        examples=[
            [{"name": "features.0.0", "sqnr": 12.0, "relative": 0.25, "cosine": 0.97, "accumulated": 0.25}],
        ],
    )
    transforms: dict[str, Any] | None = Field(
        default=None,
        description="The applied transforms, and the errors that they cause.",
        examples=[
            {
                "reference": "eager, not transformed",
                "applied": [{"name": "fold_normalization", "changes": 1}],
                "allclose": True,
                "speedup": 1.02,
                "first_divergence": None,
                "outputs": {"C5": {"max_abs": 0.0, "relative": 0.0, "cosine": 1.0, "allclose": True}},
            }
        ],
    )


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
    inputs: list[InputDetail] = Field(description="Tensors that requests may send.")
    outputs: list[OutputDetail]
    preprocessing: dict[str, Any] | None = Field(examples=[{"resize_size": [232], "crop_size": [224]}])
    fingerprint: str | None = Field(examples=["b0f1c6d2a4e8"])
    sizes: list[InputSize] = Field(
        default_factory=list, description="Additional input sizes that the extractor is in memory for.", examples=[[]]
    )
    edits: list[EditedNodes] = Field(
        default_factory=list, description="Edited nodes that the extractor is in memory for.", examples=[[]]
    )
    checks: Checks | None = Field(description="Null until the extractor is built.")
    note: str | None = Field(
        default=None, description="Why its precision is slower than float32 on this machine.", examples=[None]
    )
    problem: dict[str, Any] | None = Field(
        default=None, description="Why the build failed, if the state is `failed`.", examples=[None]
    )


class ExtractorList(BaseModel):
    extractors: list[ExtractorDetail]
