"""Problems, as they cross threads and processes."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from service.problems import BadImage, Problem

VALUES: dict[str, Any] = {"str": "text", "int": 3, "float": 1.5, "Sequence[str]": ["a", "b"]}


def made(kind: type[Problem]) -> Problem:
    """Make a problem with a value for each argument that its class requires."""
    required = [
        p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and "VAR" not in str(p.kind)
    ]
    return kind(*(VALUES[parameter.annotation] for parameter in required))


def same(again: BaseException, error: Problem) -> None:
    assert type(again) is type(error)
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("kind", Problem.kinds.values(), ids=Problem.kinds)
def test_problems_reach_other_processes_whole(kind: type[Problem]) -> None:
    """Ray's actors send theirs to the driver."""
    error = made(kind)
    same(pickle.loads(pickle.dumps(error)), error)


def test_a_received_problem_reaches_other_processes_whole() -> None:
    error = BadImage.received(
        422, {"type": "/problems/bad-image", "title": "No", "detail": "image 3: no", "index": 3}, "id"
    )
    again = pickle.loads(pickle.dumps(error))
    same(again, error)
    assert (again.index, again.request_id) == (3, "id")


@pytest.mark.parametrize("kind", Problem.kinds.values(), ids=Problem.kinds)
def test_a_copy_has_no_traceback(kind: type[Problem]) -> None:
    """It would keep frames and their variables alive."""
    try:
        raise made(kind) from ValueError("cause")
    except Problem as error:
        again = copy.copy(error)
        same(again, error)
        assert again.__traceback__ is again.__cause__ is again.__context__ is None
