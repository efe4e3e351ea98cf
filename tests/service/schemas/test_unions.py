"""Errors of fields of several types: the field as the client sent it, and one message."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from service.schemas.problems import invalid_body
from service.schemas.specs import ExtractorSpec
from service.schemas.v1.features import ImagesBody

NAMES = "Input should be a list of names or a map from name to key, 1 to 1024 of them"
TRANSFORM = "Input should be a name of at most 64 characters, or an object with name, params and optional"
VALUE = "Input should be true, false, a number or a text of at most 256 characters"
VALUES = f"{VALUE}, or a list of at most 64 of those"
NUMBERS = "Input should be a number or a list of numbers"
TEXT = "Input should be a valid string"


def with_params(**params: Any) -> dict[str, Any]:
    return {"transforms": ["remove", {"name": "remove", "params": params}]}


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"return_nodes": 3}, "return_nodes", NAMES),
        ({"return_nodes": []}, "return_nodes", NAMES),
        ({"return_nodes": ["x"] * 1025}, "return_nodes", NAMES),
        ({"return_nodes": ["x", 3]}, "return_nodes.1", TEXT),
        ({"return_nodes": {"x": 3}}, "return_nodes.x", TEXT),
        ({"return_nodes": {"x[0]": 3}}, "return_nodes.x[0]", TEXT),
        ({"return_nodes": {"x" * 300: "a"}}, f"return_nodes.{'x' * 300}", "String should have at most 256 characters"),
        ({"transforms": [{}]}, "transforms.0.name", "Field required"),
        ({"transforms": [3]}, "transforms.0", TRANSFORM),
        ({"transforms": ["x" * 65]}, "transforms.0", TRANSFORM),
        ({"transforms": [{"name": 3}]}, "transforms.0.name", TEXT),
        ({"transforms": [{"name": "x", "params": 3}]}, "transforms.0.params", "Input should be a JSON object"),
        (with_params(x={}), "transforms.1.params.x", VALUES),
        (with_params(float=None), "transforms.1.params.float", VALUES),
        (with_params(x=[1, {}]), "transforms.1.params.x.1", VALUE),
        (with_params(x=[1] * 65), "transforms.1.params.x", VALUES),
    ],
)
def test_specs(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ExtractorSpec.model_validate({"model": "resnet18", "return_nodes": ["C4"], **given})
    assert invalid_body(caught.value).extra["errors"] == [{"in": "body", "field": field, "message": message}]


@pytest.mark.parametrize("name", ["scale", "shift"])
@pytest.mark.parametrize(
    ("value", "where", "message"),
    [("0", "", NUMBERS), (True, "", NUMBERS), (None, "", NUMBERS), ([1, "0"], ".1", "Input should be a valid number")],
)
def test_edits(name: str, value: Any, where: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ImagesBody.model_validate({"images": ["AAAA"], "edits": [{"node": "layer2", name: value}]})
    found = [{"in": "body", "field": f"edits.0.{name}{where}", "message": message}]
    assert invalid_body(caught.value).extra["errors"] == found


def test_values_keep_their_types() -> None:
    params = {"a": [True, 1, 1.5, "1"], "b": True, "c": 1, "d": 1.5, "e": "1"}
    spec = ExtractorSpec.model_validate({"model": "resnet18", "return_nodes": ["C4"], **with_params(**params)})
    found = spec.model_dump()["transforms"][1]["params"]
    assert repr(found) == repr(params)
