"""JSON bodies of statistics."""

from __future__ import annotations

from pydantic import BaseModel, Field


class StatisticsSummary(BaseModel):
    """The nodes for which the server has top images."""

    weights: str = Field(description="The weights that the values were computed with.", examples=["IMAGENET1K_V2"])
    images: int = Field(description="Number of ranked images.", examples=[50000])
    nodes: list[str] = Field(description="Exact names of the nodes.", examples=[["layer3.5.relu_2"]])


class TopImage(BaseModel):
    """One of the images with the largest values of a channel."""

    rank: int = Field(description="Rank of the image; 1 has the largest value.", examples=[1])
    name: str = Field(description="Name of its file, without the folder.", examples=["chelsea.jpg"])
    value: float = Field(description="The largest value of the channel in this image.", examples=[7.25])
    place: list[int] = Field(
        description="Position of the value: its indices in the map, or for tokens the index of the patch; empty for "
        "vectors.",
        examples=[[5, 9]],
    )
    image: str = Field(
        description="URL of a JPEG thumbnail of the image.",
        examples=["/v1/models/resnet50/statistics/images/3f2a9c0d17b8e645"],
    )


class ChannelStatistics(StatisticsSummary):
    """The images with the largest values of a channel."""

    model: str = Field(examples=["resnet50"])
    node: str = Field(description="Exact name of the node.", examples=["layer3.5.relu_2"])
    channel: int = Field(examples=[3])
    channels: int = Field(description="Number of channels of the node.", examples=[1024])
    top: list[TopImage]
