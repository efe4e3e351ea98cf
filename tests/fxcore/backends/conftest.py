"""Small real extractors with random weights, photographs for them, and a shared cache of compiled artifacts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from fxcore import Extractor, build_extractor, get_model, load_model, model_graph
from fxcore.photos import input_rows, photos

Build = Callable[..., Extractor]


@pytest.fixture(scope="session")
def extractor() -> Build:
    """Build an extractor, as in ``extractor("resnet18", "layer1.0.bn1", "C5")``; those of a model share its weights."""

    @cache
    def model(name: str) -> torch.nn.Module:
        return load_model(get_model(name), "random")

    def build(name: str, *nodes: str) -> Extractor:
        graph = model_graph(name)
        return build_extractor(graph, model(name), graph.resolve(list(nodes)))

    return build


@pytest.fixture(scope="session")
def batch() -> torch.Tensor:
    """Four photographs, preprocessed ``[4, 3, 224, 224]``."""
    graph = model_graph("resnet18")
    rows = input_rows(graph.preprocessing, graph.inputs, photos(), (224, 224))
    return torch.cat([row[0] for row in rows])


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")
