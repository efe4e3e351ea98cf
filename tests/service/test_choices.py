"""The values of options, which modules without torch import, are those that the library takes."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fxcore.backends import BACKENDS
from fxcore.exports import FORMATS as EXPORTS
from fxcore.models import catalog, entry
from fxcore.pooling import METHODS
from fxcore.rendering.render import FORMATS as DRAWINGS
from service import choices
from service.cli import models
from service.engine.description import PRECISIONS
from service.engine.options import DTYPES
from service.offline.shards import FORMATS as SHARDS


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        (choices.Precision, PRECISIONS),
        (choices.Pool, ("none", *METHODS, "roi")),
        (choices.Dtype, DTYPES),
        (choices.Source, get_args(catalog.Source)),
        (choices.GraphFormat, ("json", *DRAWINGS)),
        (choices.ExportFormat, EXPORTS),
        (choices.FileFormat, SHARDS),
        (models.Task, get_args(entry.Task)),
    ],
)
def test_what_can_be_named_is_what_is_taken(named: Any, taken: Any) -> None:
    assert set(get_args(named)) == set(taken)


def test_every_backend_that_can_be_named_is_there() -> None:
    assert set(get_args(choices.Backend)) - {"auto"} <= set(BACKENDS)
