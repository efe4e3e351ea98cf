"""JSON bodies of ``/v1`` for graphs and their profiles."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from service.choices import Precision
from service.schemas.v1.extractors import TokenGrid
from service.schemas.v1.models import ClosedPart


class GraphNode(BaseModel):
    """One node of the eval graph, and its value."""

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
    bytes: int | None = Field(
        description="Bytes of the value for one image; null if it is not a tensor.", examples=[802816]
    )
    extractable: bool = Field(description="Whether the value can be extracted.", examples=[True])
    rows_per_image: int = Field(
        description="Rows of the first dimension per image: 1 except for attention windows.", examples=[1]
    )
    tokens: TokenGrid | None = Field(
        default=None,
        description="The grid of patches, if the value is tokens or their attention weights.",
        examples=[None],
    )


class GraphTotals(BaseModel):
    params: int = Field(examples=[25557032])
    flops: int = Field(examples=[8178368512])
    nodes: int = Field(examples=[176])


class NodeMeasured(BaseModel):
    """Time and memory of one node: medians over runs on a photograph."""

    name: str = Field(examples=["layer3.0.conv1"])
    fx_name: str = Field(examples=["layer3_0_conv1"])
    op: str = Field(examples=["call_module"])
    target: str = Field(examples=["layer3.0.conv1"])
    milliseconds: float = Field(examples=[0.71])
    share: float = Field(description="Share of the total time of all nodes.", examples=[0.014])
    bytes: int = Field(description="Memory allocated for its value; 0 for a view.", examples=[802816])
    live_bytes: int = Field(description="Memory of all values that are live after it has run.", examples=[3211264])
    peak_bytes: int | None = Field(description="Peak memory allocated while it ran; GPU only.", examples=[None])


class ServingMeasured(BaseModel):
    """The backend that serves requests, measured on the same photograph."""

    backend: str = Field(examples=["openvino"])
    milliseconds: float = Field(description="Time of a full forward pass.", examples=[21.3])


class GraphMeasured(BaseModel):
    """Profile of an extractor in eager, node by node, with batches of one photograph."""

    backend: Literal["eager"] = Field(description="The profiled backend; compiled backends have no nodes.")
    precision: Precision = Field(
        description="Precision of the nodes. An int8 extractor is profiled in `int8` if eager serves it, and in "
        "`float32` if another backend does.",
        examples=["float32"],
    )
    serving: ServingMeasured
    runs: int = Field(description="Number of runs; each figure is their median.", examples=[5])
    milliseconds: float = Field(description="Time of a full forward pass, without profiling.", examples=[42.5])
    peak_bytes: int = Field(description="Maximum of `live_bytes`.", examples=[12845056])
    nodes: list[NodeMeasured]


class GraphDocument(BaseModel):
    model: str = Field(examples=["resnet50"])
    input_shape: list[int | None] = Field(examples=[[None, 3, 224, 224]])
    nodes: list[GraphNode]
    totals: GraphTotals
    closed: list[ClosedPart] = Field(default_factory=list)
    profile: GraphMeasured | None = Field(
        default=None,
        description="Time and memory of each node; only for extractors, with `profile=true`.",
        examples=[None],
    )


class LayoutBox(BaseModel):
    """A module or a node as a box, in pixels."""

    name: str = Field(description="A module's path or a node's name.", examples=["layer1"])
    node: str = Field(description="Its last node.", examples=["layer1.2.relu_2"])
    nodes: int = Field(description="Number of nodes.", examples=[32])
    kind: str = Field(
        description="The opcode of a node, `module`, or `frame` for an expanded module, which precedes its contents.",
        examples=["module"],
    )
    lines: list[str] = Field(
        description="Text, beginning with the name relative to its frame.",
        examples=[["layer1", "32 nodes", "[N, 256, 56, 56]", "stride 4, 1.36 GFLOPs"]],
    )
    mark: str | None = Field(description="Level, or the extractor's key.", examples=["C2"])
    picture: bool = Field(
        description="Whether a square at its right end is reserved for a picture of its value.", examples=[True]
    )
    x: float = Field(examples=[53.4])
    y: float = Field(examples=[548.0])
    width: float = Field(examples=[214.0])
    height: float = Field(examples=[64.0])


class LayoutEdge(BaseModel):
    """An arrow between two boxes, in pixels."""

    source: int = Field(description="Index of a box.", examples=[4])
    target: int = Field(description="Index of a box.", examples=[5])
    points: list[tuple[float, float]] = Field(
        description="A curve between two points, or straight lines through more.",
        examples=[[[160.4, 612.0], [160.4, 646.0]]],
    )


class LayoutDocument(BaseModel):
    """Positions of the boxes and arrows of a drawing, in pixels."""

    model: str = Field(examples=["resnet50"])
    width: float = Field(examples=[320.7])
    height: float = Field(examples=[1230.0])
    boxes: list[LayoutBox]
    edges: list[LayoutEdge]
