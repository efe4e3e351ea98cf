"""JSON bodies of models, their weights and their nodes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.choices import Precision, ServerPreprocess
from service.schemas.v1.statistics import StatisticsSummary


class ModelSummary(BaseModel):
    """An entry of the list of models."""

    name: str = Field(examples=["resnet50"])
    task: str = Field(examples=["classification"])
    weights: list[str] = Field(examples=[["IMAGENET1K_V1", "IMAGENET1K_V2"]])
    default_weights: str | None = Field(examples=["IMAGENET1K_V2"])
    loaded: bool = Field(description="Whether weights of this model are in memory now.", examples=[False])


class OpenAIModel(BaseModel):
    """A model in OpenAI's shape."""

    id: str = Field(description="Name of the model; `POST /v1/embeddings` accepts `NAME:NODE`.", examples=["resnet50"])
    object: Literal["model"] = "model"
    created: int = Field(description="Always 0: the creation time is unknown.", examples=[0])
    owned_by: str = Field(description="Source of the model.", examples=["torchvision"])


class CountedModels(BaseModel):
    """Models that are counted instead of listed."""

    models: int = Field(description="Number of models.", examples=[1371])
    list: str = Field(description="URL of their list.", examples=["/v1/models?source=timm"])


class ModelList(BaseModel):
    """The models, also in OpenAI's shape."""

    models: list[ModelSummary]
    timm: CountedModels | None = Field(
        description="timm's models; null if timm is not installed, or filtered out by `source`."
    )
    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class WeightsSummary(BaseModel):
    """One set of trained weights."""

    num_params: int | None = Field(
        description="Number of parameters of the model; null if unpublished, for weights other than the default.",
        examples=[25557032],
    )
    url: str | None = Field(examples=["https://download.pytorch.org/models/resnet50-11ad3fa6.pth"])
    metrics: dict[str, Any] = Field(examples=[{"ImageNet-1K": {"acc@1": 80.858, "acc@5": 95.434}}])
    categories: int = Field(description="Number of classes that the weights were trained on.", examples=[1000])
    category_names: list[str] | None = Field(
        None,
        description="With `categories=true`, the class names in the order of the model's outputs; null if unknown.",
        examples=[["tench", "goldfish"]],
    )
    cached: bool = Field(description="Whether the file is in the server's cache.", examples=[True])
    revision: str | None = Field(
        None,
        description="Revision of the cached file, for weights of the Hugging Face hub.",
        examples=["0d2d6b4fdd5e7fb5cf1a2b5d5d5b0a2c5f3f6f1a"],
    )


class InputSpec(BaseModel):
    """One input tensor of a model; null in a shape is a free dimension."""

    name: str = Field(examples=["x"])
    layout: str = Field(examples=["NCHW"])
    shape: list[int | None] = Field(examples=[[None, 3, 224, 224]])


class LevelInfo(BaseModel):
    """The node of one pyramid level."""

    node: str = Field(examples=["layer3"])
    channels: int | None = Field(examples=[1024])
    stride: int | None = Field(examples=[16])


class ClosedPart(BaseModel):
    """A submodule that could not be traced, with the reason."""

    path: str = Field(examples=["rpn"])
    reason: str = Field(examples=["its forward loops over a list of images"])


class DefaultPreprocess(BaseModel):
    """The meaning of `preprocess=default` on this server."""

    way: ServerPreprocess = Field(description="Value of `FXSERVE_PREPROCESS`.", examples=["default"])
    meaning: str = Field(
        description="As a Python expression, or in words.",
        examples=['weights.transforms()(torchvision.io.decode_image(data, mode="RGB", apply_exif_orientation=True))'],
    )


class ServedPrecision(BaseModel):
    """How a model is served in one precision on this server."""

    backends: list[str] = Field(
        description="Backends that `backend=auto` chooses from. The last one serves first; an earlier one replaces it "
        "if it is faster. An empty list means that the precision is refused.",
        examples=[["openvino", "eager"]],
    )
    note: str | None = Field(description="Why it is refused, or slower than float32 here.", examples=[None])


class ModelDetail(OpenAIModel):
    name: str = Field(examples=["resnet50"])
    task: str = Field(examples=["classification"])
    default_weights: str | None = Field(examples=["IMAGENET1K_V2"])
    weights: dict[str, WeightsSummary]
    inputs: list[InputSpec]
    preprocessing: dict[str, Any] = Field(
        examples=[
            {
                "resize_size": [232],
                "crop_size": [224],
                "mean": [0.485, 0.456, 0.406],
                "std": [0.229, 0.224, 0.225],
                "interpolation": "bilinear",
                "antialias": True,
            }
        ]
    )
    default_preprocess: DefaultPreprocess
    levels: dict[str, LevelInfo]
    multiple: int = Field(
        description="With `fit=native`, each side of the input is a multiple of this: the patch size of a ViT, or the "
        "deepest stride of other models.",
        examples=[32],
    )
    precisions: dict[Precision, ServedPrecision] = Field(
        description="How this server serves each precision, with the requested weights.",
        examples=[
            {
                "bfloat16": {
                    "backends": ["openvino", "eager"],
                    "note": "this processor does not compute in bfloat16, which takes longer here than float32",
                }
            }
        ],
    )
    closed: list[ClosedPart] = Field(default_factory=list)
    statistics: StatisticsSummary | None = Field(
        default=None,
        description="Nodes for which `GET /v1/models/{model}/statistics` has top images; null if there are none.",
        examples=[{"weights": "IMAGENET1K_V2", "images": 50000, "nodes": ["layer3.5.relu_2"]}],
    )


class NodeList(BaseModel):
    """The node names of a model, as torchvision's ``get_graph_node_names`` gives them."""

    model: str = Field(examples=["resnet50"])
    train_nodes: list[str] = Field(
        description="Empty if the model cannot be traced in train mode.",
        examples=[["x", "conv1", "bn1", "relu", "maxpool", "layer1.0.conv1"]],
    )
    eval_nodes: list[str] = Field(examples=[["x", "conv1", "bn1", "relu", "maxpool", "layer1.0.conv1"]])
    levels: dict[str, LevelInfo] = Field(examples=[{"C4": {"node": "layer3", "channels": 1024, "stride": 16}}])
    leaf_modules: list[str] = Field(
        description="Classes of the modules that are traced as single nodes.",
        examples=[["BatchNorm2d", "Conv2d", "Linear"]],
    )
    fingerprint: str = Field(description="Hash of the eval graph.", examples=["b0f1c6d2a4e8"])
    closed: list[ClosedPart] = Field(
        default_factory=list, description="Submodules that could not be traced; their inner nodes cannot be extracted."
    )
