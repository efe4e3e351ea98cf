"""Messages about invalid fields: what is allowed, in plain words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from service.schemas.embeddings import EmbeddingsRequest
from service.schemas.problems import invalid_body
from service.schemas.specs import ExtractorSpec
from service.schemas.v1.features import ImagesBody

SPEC = {"model": "resnet18", "return_nodes": ["C4"]}
NAME = "Input should be 1 to 128 letters, digits, dots, hyphens or underscores, the first a letter or a digit"


@pytest.mark.parametrize(
    ("model", "given", "detail"),
    [
        (EmbeddingsRequest, {"model": "x", "input": []}, "field 'input': Input should have at least 1 item, not 0"),
        (
            EmbeddingsRequest,
            {"model": "x", "input": ["AAAA"] * 1025},
            "field 'input': Input should have at most 1024 items, not 1025",
        ),
        (ImagesBody, {"images": []}, "field 'images': Input should have at least 1 item, not 0"),
        (ExtractorSpec, SPEC | {"inputs": []}, "field 'inputs': Input should have at least 1 item, not 0"),
        *((ExtractorSpec, SPEC | {"name": name}, f"field 'name': {NAME}") for name in ("", "a b", "-a", "é", "a\n")),
        (ExtractorSpec, SPEC | {"name": "a" * 129}, f"field 'name': {NAME}"),
    ],
)
def test_what_is_allowed(model: type[BaseModel], given: dict[str, Any], detail: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(given)
    assert invalid_body(caught.value).detail == detail


@pytest.mark.parametrize("name", ["a", "7", "r50-c4_c5.v1", "A" * 128])
def test_names_that_are_allowed(name: str) -> None:
    assert ExtractorSpec.model_validate(SPEC | {"name": name}).name == name
