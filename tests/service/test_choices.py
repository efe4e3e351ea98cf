"""The values of options, which modules without torch import, are those that the library takes."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from fxcore.backends import BACKENDS
from fxcore.exports import FORMATS as EXPORTS
from fxcore.images import fitting
from fxcore.models import catalog, entry
from fxcore.pooling import METHODS
from fxcore.rendering.render import FORMATS as DRAWINGS
from service import choices
from service.cli.commands import models
from service.engine.description import PRECISIONS
from service.engine.options import DTYPES
from service.offline.outputs.shards import FORMATS as SHARDS


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        (choices.Precision, PRECISIONS),
        (choices.VectorPooling, METHODS),
        (choices.Dtype, DTYPES),
        (choices.Fit, get_args(fitting.Fit)),
        (choices.Source, get_args(catalog.Source)),
        (choices.GraphFormat, ("json", *DRAWINGS)),
        (choices.ExportFormat, EXPORTS),
        (choices.FileFormat, SHARDS),
        (models.Task, get_args(entry.Task)),
    ],
)
def test_what_can_be_named_is_what_is_taken(named: Any, taken: Any) -> None:
    assert set(get_args(named)) == set(taken)


@pytest.mark.parametrize("text", ["none", "avg", "roi", "cls+avg", "gem+max+avg+cls"])
def test_poolings_are_those_that_the_documented_pattern_matches(text: str) -> None:
    assert choices.pooling(text) == text
    assert re.match(choices.POOL_PATTERN, text)


@pytest.mark.parametrize(
    "text", ["", "sum", "cls+", "+", "cls+none", "avg+roi", "cls avg", "avg,max", None, 3, ["avg"]]
)
def test_other_poolings_are_refused_with_those_there_are(text: Any) -> None:
    with pytest.raises(
        ValueError, match=r"pool must be none, .*, or one or more of avg, max, gem, cls joined by \+, not "
    ):
        choices.pooling(text)
    assert not isinstance(text, str) or not re.match(choices.POOL_PATTERN, text)


def test_a_pooling_is_named_once() -> None:
    with pytest.raises(ValueError, match=r"not 'avg\+avg'"):
        choices.pooling("avg+avg")


def test_every_backend_that_can_be_named_is_there() -> None:
    assert set(get_args(choices.Backend)) - {"auto"} <= set(BACKENDS)
