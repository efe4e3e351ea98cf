"""Fixtures for the tests of several routes."""

from __future__ import annotations

import pytest

from tests.service.conftest import Client


@pytest.fixture(scope="module")
def extractor(client: Client) -> str:
    """The features path of an extractor of resnet18's C4 and C5."""
    spec = {"model": "resnet18", "weights": "random", "return_nodes": {"layer3": "C4", "layer4": "C5"}, "name": "r18"}
    assert client.post("/v1/extractors", json=spec).status_code in (200, 201)
    return "/v1/extractors/r18/features"
