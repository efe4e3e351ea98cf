"""JSON bodies of the Open Inference Protocol (``/v2``), with the examples of the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from service.schemas.problems import Shape
from service.schemas.specs import MAX_INPUTS, MAX_NAME_LENGTH, MAX_NODES
from service.schemas.strict import Strict
from service.schemas.v1.features import MAX_DIMENSIONS

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
Size = Annotated[int, Field(strict=True, ge=0, lt=2**40)]


def _unset(value: Any) -> Any:
    """Treat null as unset, because serializers of other languages write unset values as null."""
    return {} if value is None else value


Parameters = Annotated[dict[str, Any], BeforeValidator(_unset, json_schema_input_type=dict[str, Any] | None)]


class ServerMetadata(BaseModel):
    name: str = Field(examples=["fxserve"])
    version: str = Field(examples=["0.1.0"])
    extensions: list[str] = Field(examples=[["binary_tensor_data", "model_repository"]])


class Live(BaseModel):
    live: bool = Field(examples=[True])


class Ready(BaseModel):
    ready: bool = Field(examples=[True])


class ModelReady(BaseModel):
    name: str = Field(examples=["r50-c4c5"])
    ready: bool = Field(examples=[True])


class TensorMetadata(BaseModel):
    """A tensor of a model; -1 in a shape means any size."""

    name: str = Field(examples=["C5"])
    datatype: str = Field(examples=["FP32"])
    shape: list[int] = Field(examples=[[-1, 2048, 7, 7]])


class ModelMetadata(BaseModel):
    """A model's tensors. Requests send either the input ``image`` or all other inputs."""

    name: str = Field(examples=["r50-c4c5"])
    versions: list[str] = Field(examples=[["1"]])
    platform: str = Field(examples=["torch.fx"])
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class RequestInput(BaseModel):
    """One input tensor. Its values are in ``data``, or follow the JSON and are ``binary_data_size`` bytes long."""

    name: Name = Field(examples=["image"])
    shape: Annotated[list[Size], Field(max_length=MAX_DIMENSIONS)] = Field(examples=[[1]])
    datatype: str = Field(max_length=16, examples=["BYTES"])
    parameters: Parameters = Field(default_factory=dict, examples=[{"binary_data_size": 71484}])
    data: Any = Field(
        default=None,
        description="Values in row-major order, flat or nested; for BYTES, base64 strings or data URLs.",
        examples=[["/9j/4AAQ…"]],
    )


class RequestedOutput(BaseModel):
    name: Name = Field(examples=["C5"])
    parameters: Parameters = Field(default_factory=dict, examples=[{"binary_data": True}])


class InferRequest(BaseModel):
    """An inference request.

    Supported parameters: ``binary_data_output``; ``timeout`` in microseconds; ``pool``, ``project``, ``seed``,
    ``tokens``, ``dtype``, ``normalize`` and ``preprocess`` as in feature requests of ``/v1``; and ``weights`` if a
    model is named instead of an extractor.
    """

    id: str | None = Field(default=None, max_length=4096, examples=["42"])
    parameters: Parameters = Field(default_factory=dict, examples=[{"binary_data_output": True}])
    inputs: Annotated[list[RequestInput], Field(min_length=1, max_length=MAX_INPUTS)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=MAX_NODES)] | None = None


class ResponseOutput(BaseModel):
    name: str = Field(examples=["C5"])
    datatype: str = Field(examples=["FP32"])
    shape: list[int] = Field(examples=[[1, 2048, 7, 7]])
    parameters: dict[str, int] | None = Field(default=None, examples=[{"binary_data_size": 401408}])
    data: list[float | None] | list[int] | list[bool] | None = Field(
        default=None,
        description="Values in row-major order, with `null` for NaN and infinities, which JSON lacks; absent if the "
        "values follow the JSON.",
        examples=[[0.0, 0.3126, 1.0417]],
    )


class InferResponse(BaseModel):
    model_name: str = Field(examples=["r50-c4c5"])
    model_version: str = Field(examples=["1"])
    id: str | None = Field(default=None, examples=["42"])
    outputs: list[ResponseOutput]


class IndexRequest(BaseModel):
    ready: bool = Field(default=False, strict=True, description="List only models that are ready.", examples=[True])


class RepositoryEntry(BaseModel):
    name: str = Field(examples=["resnet50"])
    version: str = Field(examples=["1"])
    state: Literal["READY", "LOADING", "UNAVAILABLE"] = Field(examples=["READY"])
    reason: str = Field(examples=[""])


class LoadParameters(Strict):
    config: str | None = Field(
        default=None,
        max_length=2**20,
        description="An extractor's spec as a JSON string. The extractor gets the name in the path. `model` defaults "
        "to that name, `return_nodes` to the model's levels.",
        examples=['{"model": "resnet50", "return_nodes": ["C4", "C5"]}'],
    )


class LoadRequest(BaseModel):
    parameters: Annotated[LoadParameters, BeforeValidator(_unset, json_schema_input_type=LoadParameters | None)] = (
        Field(default_factory=LoadParameters)
    )


class ErrorV2(BaseModel):
    """An error under ``/v2``."""

    error: str = Field(examples=["there is no extractor or model 'resnet5'; did you mean resnet50?"])


SHAPE = Shape("application/json", ErrorV2.__name__, lambda document: {"error": document["detail"]})
