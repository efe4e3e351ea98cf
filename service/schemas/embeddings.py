"""JSON bodies of ``/v1/embeddings``, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from service.problems import BadImage
from service.schemas.problem_examples import EXAMPLES
from service.schemas.problems import Shape
from service.schemas.strict import Strict
from service.schemas.v1.features import MAX_IMAGES

PATH = "/v1/embeddings"
"""Path of the route whose errors have OpenAI's shape."""

_EXAMPLE_IMAGE = "data:image/jpeg;base64,/9j/4AAQSkZJRg…"


def _listed(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(
            "images", 'Input should be an image as a data URL ("data:image/jpeg;base64,…"), or a list of them'
        )
    return texts


class EmbeddingsRequest(Strict):
    """An embeddings request."""

    model: str = Field(
        min_length=1,
        max_length=1024,
        description="Id or name of an extractor with one output, or a model and one of its nodes: `resnet50:avgpool`, "
        "or with weights `resnet50@random:C5`.",
        examples=["resnet50:avgpool"],
    )
    input: Annotated[
        list[str],
        BeforeValidator(_listed),
        Field(min_length=1, max_length=MAX_IMAGES),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_IMAGES},
                ]
            }
        ),
    ] = Field(
        description="One encoded image or a list of them, as data URLs or plain base64. Other URLs are refused, never "
        "fetched.",
        examples=[_EXAMPLE_IMAGE],
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None,
        description="`float` by default; `base64`: little-endian float32 values, the default of OpenAI's clients.",
        examples=["float"],
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="Keep only this many values, the first, and scale them to unit length.",
        examples=[256],
    )
    user: str | None = Field(default=None, description="Ignored.", examples=["alice"])


class Embedding(BaseModel):
    """The embedding of one image."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="Index of its image in the input.", examples=[0])
    embedding: list[float | None] | str = Field(
        description="The values, with `null` for NaN and infinities, which JSON lacks; a string with "
        "`encoding_format=base64`.",
        examples=[[0.0132, 0.4471, 0.0]],
    )


class Usage(BaseModel):
    """Token counts, which are 0 for images."""

    prompt_tokens: Literal[0] = 0
    total_tokens: Literal[0] = 0


class EmbeddingsDocument(BaseModel):
    """The embeddings, in the order of the images."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str = Field(description="The model as named in the request.", examples=["resnet50:avgpool"])
    usage: Usage


class OpenAIFault(BaseModel):
    """Details of an error."""

    message: str = Field(examples=[EXAMPLES[BadImage].detail])
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(description="The invalid field of the body.", examples=["input"])
    code: str = Field(
        description="OpenAI's code, or the last part of the problem's type with underscores.",
        examples=["bad_image"],
    )


class OpenAIError(BaseModel):
    """An error in OpenAI's shape."""

    error: OpenAIFault


# Problem types for which OpenAI has a code.
_CODES = {
    "unauthorized": "invalid_api_key",
    "admission-full": "rate_limit_exceeded",
    "unknown-model": "model_not_found",
    "unknown-extractor": "model_not_found",
}
# Problem types and the request field that they concern.
_OF_MODEL = frozenset(("unknown-model", "unknown-extractor", "unknown-node", "unknown-weights", "not-traceable"))
_OF_INPUT = frozenset(("bad-image", "image-too-large", "bad-tensor"))


def openai_error(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a problem document to OpenAI's shape.

    >>> problem = {"type": "/problems/unknown-model", "status": 404, "detail": "there is no model 'x'"}
    >>> openai_error(problem)["error"]["code"], openai_error(problem)["error"]["param"]
    ('model_not_found', 'model')
    """
    slug = str(problem["type"]).rpartition("/")[2]
    fields = [error["field"] for error in problem.get("errors", ())]
    param = problem.get("field") or next((field.partition(".")[0] for field in fields if field), None)
    if slug in _OF_MODEL:
        param = "model"
    elif slug in _OF_INPUT:
        param = "input"
    return {
        "error": {
            "message": problem["detail"],
            "type": _type(int(problem["status"])),
            "param": param,
            "code": _CODES.get(slug, slug.replace("-", "_")),
        }
    }


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


SHAPE = Shape("application/json", OpenAIError.__name__, openai_error)
