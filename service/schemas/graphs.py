"""Graphs and what was measured of them, as :mod:`service.schemas.v1` has the rest."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from service.schemas.v1 import ClosedPart, Precision, TokenGrid

GraphFormat = Literal["json", "table", "code", "dot", "svg", "mermaid", "layout"]


class GraphNode(BaseModel):
    """One node of the eval graph, with what is known of its value."""

    name: str = Field(examples=["layer3.0.conv1"])
    fx_name: str = Field(examples=["layer3_0_conv1"])
    op: str = Field(examples=["call_module"])
    target: str = Field(examples=["layer3.0.conv1"])
    module_type: str | None = Field(examples=["torch.nn.modules.conv.Conv2d"])
    args: list[str] = Field(examples=[["layer2.3.relu_2"]])
    users: list[str] = Field(examples=[["layer3.0.bn1"]])
    shape: list[int | None] | None = Field(examples=[[None, 256, 28, 28]])
    dtype: str | None = Field(examples=["float32"])
    layout: str | None = Field(examples=["NCHW"])
    channels: int | None = Field(examples=[256])
    stride: int | None = Field(examples=[8])
    level: str | None = Field(examples=[None])
    params: int = Field(examples=[131072])
    flops: int = Field(examples=[205520896])
    bytes: int | None = Field(description="Size of the value for one image; null for no tensor.", examples=[802816])
    extractable: bool = Field(description="Whether the value can be asked for.", examples=[True])
    rows_per_image: int = Field(
        description="Rows of the first dimension that belong to one image: 1, but for attention windows.", examples=[1]
    )
    tokens: TokenGrid | None = Field(
        default=None, description="The places that tokens stand for; null where it is something else.", examples=[None]
    )


class GraphTotals(BaseModel):
    params: int = Field(examples=[25557032])
    flops: int = Field(examples=[8178368512])
    nodes: int = Field(examples=[176])


class NodeMeasured(BaseModel):
    """What one node takes, as a median over runs on a photograph."""

    name: str = Field(examples=["layer3.0.conv1"])
    fx_name: str = Field(examples=["layer3_0_conv1"])
    op: str = Field(examples=["call_module"])
    target: str = Field(examples=["layer3.0.conv1"])
    milliseconds: float = Field(examples=[0.71])
    share: float = Field(description="Of the sum over all nodes.", examples=[0.014])
    bytes: int = Field(description="Memory that its value takes anew; 0 for a view.", examples=[802816])
    live_bytes: int = Field(description="Memory of all values still needed once it has run.", examples=[3211264])
    peak_bytes: int | None = Field(description="Most allocated while it ran; on a GPU.", examples=[None])


class ServingMeasured(BaseModel):
    """What answers requests, on the same photograph."""

    backend: str = Field(examples=["openvino"])
    milliseconds: float = Field(description="Of a whole pass.", examples=[21.3])


class GraphMeasured(BaseModel):
    """An extractor in eager, node by node, one photograph at a time."""

    backend: Literal["eager"] = Field(description="What ran the nodes: compiled backends have none.")
    precision: Precision = Field(
        description="In which the nodes compute. `int8` where eager serves int8, whose graph has nodes of its own; an "
        "int8 extractor that another backend serves is measured in `float32`.",
        examples=["float32"],
    )
    serving: ServingMeasured
    runs: int = Field(description="That each figure is the median of.", examples=[5])
    milliseconds: float = Field(description="Of a whole pass, unwatched.", examples=[42.5])
    peak_bytes: int = Field(description="The largest `live_bytes`.", examples=[12845056])
    nodes: list[NodeMeasured]


class GraphDocument(BaseModel):
    model: str = Field(examples=["resnet50"])
    input_shape: list[int | None] = Field(examples=[[None, 3, 224, 224]])
    nodes: list[GraphNode]
    totals: GraphTotals
    closed: list[ClosedPart] = Field(default_factory=list)
    profile: GraphMeasured | None = Field(
        default=None, description="Of an extractor, with `profile=true`: what each node takes.", examples=[None]
    )
