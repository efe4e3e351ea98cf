"""What is written down in several places, so that the client and the command need not import the service, agrees."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fxcore.backends import BACKENDS
from fxcore.exports import FORMATS as EXPORTS
from fxcore.models import entry
from fxcore.pooling import METHODS
from fxcore.rendering.render import FORMATS as DRAWINGS
from service.cli import extract, models, serving
from service.client import base as client
from service.engine.description import PRECISIONS
from service.engine.options import CHOICES, DTYPES
from service.http.access.keys import Scope
from service.http.routes import exports
from service.observability.logs import LogFormat
from service.offline.shards import FORMATS as SHARDS
from service.schemas import features, graphs, v1


@pytest.mark.parametrize(
    "places",
    [
        [v1.Precision, client.Precision, extract.Precision, tuple(PRECISIONS)],
        [v1.Backend, client.Backend, extract.Backend],
        [features.Pool, client.Pool, extract.Pool, CHOICES["pool"], ("none", *METHODS, "roi")],
        [features.FeatureDtype, client.Dtype, extract.Dtype, tuple(DTYPES)],
        [features.Preprocess, client.Preprocess, extract.Preprocess],
        [features.Normalize, extract.Normalize],
        [graphs.GraphFormat, models.Format, ("json", *DRAWINGS)],
        [entry.Task, models.Task],
        [exports.Format, tuple(EXPORTS)],
        [extract.ShardFormat, tuple(SHARDS)],
        [Scope, serving.KeyScope],
        [LogFormat, serving.LogFormat],
    ],
)
def test_choices_are_the_same_everywhere(places: list[Any]) -> None:
    first, *others = [set(get_args(place) or place) for place in places]
    assert all(other == first for other in others)


def test_every_backend_that_can_be_named_is_there() -> None:
    assert set(get_args(v1.Backend)) - {"auto"} <= set(BACKENDS)
