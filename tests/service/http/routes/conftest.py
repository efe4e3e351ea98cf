"""Fixtures for the tests of several routes."""

from __future__ import annotations

import pytest

from tests.service.conftest import Client
from tests.wire import created


@pytest.fixture(scope="module")
def extractor(client: Client) -> str:
    """The features path of an extractor of resnet18's C4 and C5."""
    created(client, model="resnet18", weights="random", return_nodes={"layer3": "C4", "layer4": "C5"}, name="r18")
    return "/v1/extractors/r18/features"
