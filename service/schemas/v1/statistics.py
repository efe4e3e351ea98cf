"""Bodies of statistics."""

from __future__ import annotations

from pydantic import BaseModel, Field


class StatisticsSummary(BaseModel):
    """Of which nodes the server has top images."""

    weights: str = Field(description="The weights that the values are of.", examples=["IMAGENET1K_V2"])
    images: int = Field(description="Number of images that were ranked.", examples=[50000])
    nodes: list[str] = Field(description="Exact names of the nodes.", examples=[["layer3.5.relu_2"]])


class TopImage(BaseModel):
    """One of the images with the largest values of a channel."""

    rank: int = Field(description="From 1, the largest.", examples=[1])
    name: str = Field(description="Name of its file, without the folder.", examples=["chelsea.jpg"])
    value: float = Field(description="The largest value of the channel in this image.", examples=[7.25])
    place: list[int] = Field(
        description="Where it is: indices in the map, or of tokens the index among the patches; empty for vectors.",
        examples=[[5, 9]],
    )
    image: str = Field(
        description="Address of the image, made small, as JPEG.",
        examples=["/v1/models/resnet50/statistics/images/3f2a9c0d17b8e645"],
    )


class ChannelStatistics(StatisticsSummary):
    """The images with the largest values of a channel."""

    model: str = Field(examples=["resnet50"])
    node: str = Field(description="Exact name of the node.", examples=["layer3.5.relu_2"])
    channel: int = Field(examples=[3])
    channels: int = Field(description="Number of channels of the node.", examples=[1024])
    top: list[TopImage]
