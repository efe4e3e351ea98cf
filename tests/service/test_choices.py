"""What is written down in several places, so that the client and the command need not import the service, agrees."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fxcore import catalog
from fxcore.backends import BACKENDS
from fxcore.exports import FORMATS as EXPORTS
from fxcore.render import FORMATS as DRAWINGS
from service import schemas, schemas_graphs
from service.api import exports
from service.cli import extract, models, serving
from service.client import options as client
from service.engine.options import CHOICES, DTYPES
from service.engine.records import PRECISIONS
from service.keys import Scope
from service.logs import LogFormat
from service.offline.shards import FORMATS as SHARDS


@pytest.mark.parametrize(
    "places",
    [
        [schemas.Precision, client.Precision, extract.Precision, tuple(PRECISIONS)],
        [schemas.Backend, client.Backend, extract.Backend],
        [schemas.Pool, client.Pool, extract.Pool, CHOICES["pool"]],
        [schemas.FeatureDtype, client.Dtype, extract.Dtype, tuple(DTYPES)],
        [schemas.Preprocess, client.Preprocess, extract.Preprocess, CHOICES["preprocess"]],
        [schemas.Normalize, extract.Normalize, tuple(one for one in CHOICES["normalize"] if one is not None)],
        [schemas_graphs.GraphFormat, models.Format, ("json", *DRAWINGS)],
        [catalog.Task, models.Task],
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
    assert set(get_args(schemas.Backend)) - {"auto"} <= set(BACKENDS)
