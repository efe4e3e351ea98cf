"""JSON bodies of ``/v1``: models, nodes, extractors, errors, with the examples of the OpenAPI document."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from service.choices import Backend, Fit, Precision, ServerPreprocess
from service.schemas.image_size import ImageSize
from service.schemas.statistics import StatisticsSummary

MAX_NAME_LENGTH = 256
"""Maximum characters of the name of a node, key or weights."""

NodeName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]

# Reserved for metadata in safetensors files.
_RESERVED_KEY = "__metadata__"
# NUL ends names in npz files; other control characters break lines of logs and terminals.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def key_fault(key: str) -> str | None:
    """Return why an output cannot have this key, or None if it can."""
    if key == _RESERVED_KEY:
        return f"no output can have the key {key!r}, which is reserved; choose another"
    if _CONTROL_CHARACTER.search(key):
        return f"no output can have the key {key[:100]!r}, which contains control characters; choose another"
    return None


def _output_key(key: str) -> str:
    fault = key_fault(key)
    if fault is not None:
        raise PydanticCustomError("output_key", "{fault}", {"fault": fault})
    return key


OutputKey = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH), AfterValidator(_output_key)]
ModelName = Annotated[str, Field(min_length=1, max_length=128)]
WeightsName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]

_Scalar = bool | int | float | Annotated[str, Field(max_length=256)]
ParameterValue = _Scalar | Annotated[list[_Scalar], Field(max_length=64)]

MAX_NODES = 1024
"""Maximum nodes of an extractor."""

MAX_INPUTS = 64
"""Maximum inner nodes that an extractor begins at."""

State = Literal["building", "ready", "failed"]


class TransformStep(BaseModel):
    """A transform with its parameters, which are names of nodes and operations, and numbers; never code."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(max_length=64)] = Field(
        description="A name from `GET /v1/transforms`.", examples=["remove"]
    )
    params: Annotated[dict[Annotated[str, Field(max_length=64)], ParameterValue], Field(max_length=16)] = Field(
        default_factory=dict, description="Values of its parameters.", examples=[{"identity": False}]
    )
    optional: bool = Field(
        default=False, description="Accept a graph in which it finds nothing to change, which is an error otherwise."
    )


class ExtractorSpec(BaseModel):
    """Specification of an extractor. Equal specs are the same extractor."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "model": "resnet50",
                    "weights": "DEFAULT",
                    "return_nodes": {"layer3": "C4", "layer4": "C5"},
                    "name": "r50-c4c5",
                    "precision": "float32",
                    "backend": "auto",
                    "transforms": [],
                    "image_size": None,
                },
                {
                    "model": "resnet50",
                    "return_nodes": ["layer4"],
                    "image_size": [448, 672],
                    "fit": "pad",
                },
            ]
        },
    )

    model: ModelName = Field(description="A name from `GET /v1/models`.")
    weights: WeightsName = Field(
        default="DEFAULT",
        description="`DEFAULT`, a name from the model's list, `random` (seed 0, repeatable), "
        "or `file:NAME` for a checkpoint in the weights folder.",
    )
    return_nodes: (
        Annotated[list[NodeName], Field(min_length=1, max_length=MAX_NODES)]
        | Annotated[dict[NodeName, OutputKey], Field(min_length=1, max_length=MAX_NODES)]
    ) = Field(
        description="Nodes to return: a list, or a map node → key. A name is an exact node name, a level (`C4`) or a "
        "truncated path, which means the last node under it. In a list, `*` stands for one component of a path: "
        "`blocks.*` is each child of `blocks`. The response keeps this order.",
    )
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = Field(
        default=None,
        description="An alias for its id. An extractor keeps the last 32 names it was given.",
    )
    precision: Precision = Field(default="float32", description="The arithmetic the model runs in.")
    backend: Backend = Field(
        default="auto",
        description="What runs the model. A named backend is used or refused, never replaced; `auto` picks the fastest "
        "that agrees with eager.",
    )
    transforms: Annotated[list[Annotated[str, Field(max_length=64)] | TransformStep], Field(max_length=32)] = Field(
        default_factory=list,
        description="Graph transforms to apply, in order: names from `GET /v1/transforms`, or objects with `name`, "
        "`params` and `optional`.",
    )
    image_size: ImageSize | None = Field(
        default=None,
        description="Size of the input in pixels: the side of a square, or `[height, width]`; null for the weights' "
        "own. With `fit=native` it is one number, the length of the shorter side.",
        examples=[[448, 672]],
    )
    fit: Fit = Field(
        default="crop",
        description="How an image comes to `image_size`: `crop` is the weights' own resize and centre crop, scaled; "
        "`stretch` resizes to exactly that; `pad` resizes until it fits, centres it and fills the rest with the mean "
        "colour, and an output `valid_box` has its place; `native` makes the shorter side `image_size`, crops nothing, "
        "and rounds each side to the model's `multiple`.",
        examples=["pad"],
    )
    inputs: Annotated[list[NodeName], Field(min_length=1, max_length=MAX_INPUTS)] | None = Field(
        default=None,
        description="Nodes to begin at instead of the model's inputs, named as in `return_nodes`. Requests send "
        "tensors by these names, one row an image.",
        examples=[["layer2"]],
    )


class ModelSummary(BaseModel):
    """An entry of the list of models."""

    name: str = Field(examples=["resnet50"])
    task: str = Field(examples=["classification"])
    weights: list[str] = Field(examples=[["IMAGENET1K_V1", "IMAGENET1K_V2"]])
    default_weights: str | None = Field(examples=["IMAGENET1K_V2"])
    loaded: bool = Field(description="Whether weights of this model are in memory now.", examples=[False])


class OpenAIModel(BaseModel):
    """A model in OpenAI's shape."""

    id: str = Field(description="Its name; `NAME:NODE` is a model of `POST /v1/embeddings`.", examples=["resnet50"])
    object: Literal["model"] = "model"
    created: int = Field(description="Always 0: the time is not known.", examples=[0])
    owned_by: str = Field(description="Where it comes from.", examples=["torchvision"])


class CountedModels(BaseModel):
    """Models that are counted instead of listed."""

    models: int = Field(description="How many there are.", examples=[1371])
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
        description="Parameters of the model; null if not published, for weights other than the default.",
        examples=[25557032],
    )
    url: str | None = Field(examples=["https://download.pytorch.org/models/resnet50-11ad3fa6.pth"])
    metrics: dict[str, Any] = Field(examples=[{"ImageNet-1K": {"acc@1": 80.858, "acc@5": 95.434}}])
    categories: int = Field(description="Number of classes that the weights were trained on.", examples=[1000])
    category_names: list[str] | None = Field(
        None,
        description="With `categories=true`, their names in the order of the model's outputs; null where not known.",
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
    """A submodule that could not be traced, and why."""

    path: str = Field(examples=["rpn"])
    reason: str = Field(examples=["its forward loops over a list of images"])


class DefaultPreprocess(BaseModel):
    """What `preprocess=default` means on this server."""

    way: ServerPreprocess = Field(description="`FXSERVE_PREPROCESS`.", examples=["default"])
    meaning: str = Field(
        description="As a Python expression, or in words.",
        examples=['weights.transforms()(torchvision.io.decode_image(data, mode="RGB", apply_exif_orientation=True))'],
    )


class ModelDetail(BaseModel):
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
        description="With `fit=native`, each side of the input is a multiple of this: the side of a ViT's patches, the "
        "deepest stride of other models.",
        examples=[32],
    )
    closed: list[ClosedPart] = Field(default_factory=list)
    statistics: StatisticsSummary | None = Field(
        default=None,
        description="Of which nodes `GET /v1/models/{model}/statistics` has top images; null for none.",
        examples=[{"weights": "IMAGENET1K_V2", "images": 50000, "nodes": ["layer3.5.relu_2"]}],
    )


class NodeList(BaseModel):
    """The node names of a model, as torchvision's ``get_graph_node_names`` gives them."""

    model: str = Field(examples=["resnet50"])
    train_nodes: list[str] = Field(examples=[["x", "conv1", "bn1", "relu", "maxpool", "layer1.0.conv1"]])
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
    problem: dict[str, Any] | None = Field(
        default=None, description="Why the build failed, if the state is `failed`.", examples=[None]
    )


class TransformDetail(BaseModel):
    """A graph transform."""

    name: str = Field(examples=["remove"])
    description: str = Field(examples=["Take out operations that do nothing in eval mode."])
    parameters: dict[str, dict[str, Any]] = Field(
        description="JSON Schema of each parameter; those without a `default` are required.",
        examples=[{"dropout": {"type": "boolean", "default": True}}],
    )
    exact: bool = Field(description="Whether it preserves the values, up to rounding.", examples=[True])
    changes_input: bool = Field(
        description="Whether it changes the model's input, and with it the extractor's preprocessing.", examples=[False]
    )
    adds_nodes: bool = Field(
        description="Whether it adds nodes that `return_nodes` may name; such transforms run first.", examples=[False]
    )


class TransformList(BaseModel):
    transforms: list[TransformDetail]


class ExtractorList(BaseModel):
    extractors: list[ExtractorDetail]


class Problem(BaseModel):
    """An error (RFC 9457); each type may add fields of its own."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["/problems/unknown-node"])
    title: str = Field(examples=["Unknown node"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["'layer5' is no node, level or path of resnet50; did you mean 'layer4'?"])


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    ready: bool = Field(examples=[True])
    reason: str = Field(examples=["ready"])
