"""Specs of extractors, as JSON and as one line of text, and the names of models, weights, nodes and keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from service.choices import Backend, Fit, Precision
from service.schemas.image_size import ImageSize
from service.schemas.strict import Strict
from service.schemas.unions import either

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

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LIKE_AN_ID = re.compile(r"[0-9a-f]{12}")

STORED = {"stored": True}
"""Context for validating specs that were accepted before; their names are not checked for looking like ids."""


def _extractor_name(name: str, info: ValidationInfo) -> str:
    if _NAME.fullmatch(name) is None:
        raise PydanticCustomError(
            "extractor_name",
            "Input should be 1 to 128 letters, digits, dots, hyphens or underscores, the first a letter or a digit",
        )
    # Otherwise a request for a deleted extractor could reach another one.
    if _LIKE_AN_ID.fullmatch(name) and info.context != STORED:
        raise PydanticCustomError(
            "extractor_name",
            "an extractor cannot have the name {name}, which looks like an id; choose one that is not 12 hex digits",
            {"name": repr(name)},
        )
    return name


_ExtractorName = Annotated[
    str,
    AfterValidator(_extractor_name),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"}),
]

_SCALAR = "Input should be true, false, a number or a text of at most 256 characters"
_Scalar = Annotated[bool | int | float | Annotated[str, Field(max_length=256)], either(_SCALAR)]
ParameterValue = Annotated[
    _Scalar | Annotated[list[_Scalar], Field(max_length=64)], either(f"{_SCALAR}, or a list of at most 64 of those")
]

MAX_NODES = 1024
"""Maximum number of nodes of an extractor."""

MAX_INPUTS = 64
"""Maximum number of inner nodes at which an extractor begins."""


class TransformStep(Strict):
    """A transform with its parameters: names of nodes or operations, and numbers, but never code."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(max_length=64)] = Field(
        description="A name from `GET /v1/transforms`.", examples=["remove"]
    )
    params: Annotated[dict[Annotated[str, Field(max_length=64)], ParameterValue], Field(max_length=16)] = Field(
        default_factory=dict, description="Values of its parameters.", examples=[{"identity": False}]
    )
    optional: bool = Field(
        default=False,
        description="Allow the transform to find nothing to change; otherwise that is an error.",
        examples=[True],
    )


_Transform = Annotated[
    Annotated[str, Field(max_length=64)] | TransformStep,
    either("Input should be a name of at most 64 characters, or an object with name, params and optional"),
]


class ExtractorSpec(Strict):
    """Specification of an extractor. Equal specs identify the same extractor."""

    model_config = ConfigDict(
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
    return_nodes: Annotated[
        Annotated[list[NodeName], Field(min_length=1, max_length=MAX_NODES)]
        | Annotated[dict[NodeName, OutputKey], Field(min_length=1, max_length=MAX_NODES)],
        either(f"Input should be a list of names or a map from name to key, 1 to {MAX_NODES} of them"),
    ] = Field(
        description="Nodes to return: a list, or a map node → key. A name is an exact node name, a level (`C4`) or a "
        "truncated path, which means the last node under it. In a list, `*` stands for one component of a path: "
        "`blocks.*` is each child of `blocks`. The response keeps this order.",
    )
    name: _ExtractorName | None = Field(
        default=None,
        description="An alias for its id, which must not look like an id: 12 lower-case hex digits. "
        "An extractor keeps the last 32 names it was given.",
    )
    precision: Precision = Field(default="float32", description="The arithmetic the model runs in.")
    backend: Backend = Field(
        default="auto",
        description="Backend that runs the model. A named backend is used or refused, never replaced; `auto` picks "
        "the fastest that agrees with eager.",
    )
    transforms: Annotated[list[_Transform], Field(max_length=32)] = Field(
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
        description="How images are fitted to `image_size`: `crop` is the weights' own resize and centre crop, "
        "scaled; `stretch` resizes to exactly that size; `pad` resizes the image to fit, centres it, fills the rest "
        "with the mean colour, and adds an output `valid_box` with its position; `native` makes the shorter side "
        "`image_size`, does not crop, and rounds each side to the model's `multiple`.",
        examples=["pad"],
    )
    inputs: Annotated[list[NodeName], Field(min_length=1, max_length=MAX_INPUTS)] | None = Field(
        default=None,
        description="Nodes to start from instead of the model's inputs, named as in `return_nodes`. Requests send "
        "tensors with these names, one row per image.",
        examples=[["layer2"]],
    )


_MODEL = re.compile(r"(?P<model>[^:@]+)(@(?P<weights>file:[^:]+|(?!file:)[^:]*))?")
_MODEL_NODES = re.compile(rf"{_MODEL.pattern}:(?P<nodes>.*)")


def model_of_text(text: str) -> tuple[str, str] | None:
    """Parse ``MODEL[@WEIGHTS]`` into the names of a model and of its weights; None if the text has another form.

    >>> model_of_text("resnet50"), model_of_text("resnet50@random"), model_of_text("resnet50:C4")
    (('resnet50', 'DEFAULT'), ('resnet50', 'random'), None)
    """
    match = _MODEL.fullmatch(text.strip())
    return None if match is None else _names(match)


def _names(match: re.Match[str]) -> tuple[str, str]:
    return match["model"].strip(), (match["weights"] or "").strip() or "DEFAULT"


def spec_of_text(text: str) -> ExtractorSpec:
    """Parse ``MODEL[@WEIGHTS]:NODE[=KEY],…`` into a spec.

    Raises:
        ValueError: the text has another form.

    >>> spec_of_text("resnet50@random:layer3=C4,C5").return_nodes
    {'layer3': 'C4', 'C5': 'C5'}
    >>> spec_of_text("resnet50:layer4.*").return_nodes
    ['layer4.*']
    >>> spec_of_text("resnet50@file:mine.safetensors:C4").weights
    'file:mine.safetensors'
    """
    match = _MODEL_NODES.fullmatch(text.strip())
    given = [node.partition("=") for node in match["nodes"].split(",") if node.strip()] if match else []
    pairs = dict.fromkeys((node.strip(), key.strip() or node.strip()) for node, _, key in given)
    if match is None or not pairs:
        raise ValueError(f"{text[:200]!r} is not MODEL:NODE,NODE, such as resnet50:C4,C5")
    nodes = [node for node, _ in pairs]
    if twice := [node for node in nodes if nodes.count(node) > 1]:
        raise ValueError(f"{twice[0]!r} has several keys, but each node has one output")
    model, weights = _names(match)
    return ExtractorSpec(model=model, weights=weights, return_nodes=return_nodes_of(list(pairs)))


def return_nodes_of(pairs: Sequence[tuple[str, str]]) -> list[str] | dict[str, str]:
    """Return pairs of node and key as the ``return_nodes`` of a spec.

    It is a map if any key differs from its node's name, and otherwise a list, in which names may be groups.

    >>> return_nodes_of([("layer3", "C4"), ("layer4", "layer4")])
    {'layer3': 'C4', 'layer4': 'layer4'}
    """
    return dict(pairs) if any(node != key for node, key in pairs) else [node for node, _ in pairs]


def node_pairs(text: str) -> list[tuple[str, str]]:
    """Parse ``"layer3:C4,layer4"`` into pairs of node and key, in order. The key defaults to the node.

    Raises:
        ValueError: a name is empty or too long, a key is not allowed, or there are too many nodes.

    >>> node_pairs("layer3:C4, layer4")
    [('layer3', 'C4'), ('layer4', 'layer4')]
    """
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        node, colon, key = (piece.strip() for piece in part.partition(":"))
        if not node or (colon and not key):
            raise ValueError(f"{part[:100]!r} is not NODE or NODE:KEY")
        if max(len(node), len(key)) > MAX_NAME_LENGTH:
            raise ValueError(f"names and keys have at most {MAX_NAME_LENGTH} characters")
        fault = key_fault(key or node)
        if fault is not None:
            raise ValueError(fault)
        pairs.append((node, key or node))
    if len(pairs) > MAX_NODES:
        raise ValueError(f"at most {MAX_NODES} nodes are allowed")
    return pairs
