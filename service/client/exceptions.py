"""Exceptions of the client: one tree, with a class per problem type of the server.

``except Busy`` catches everything that may succeed later, ``except UnknownNode`` one specific mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service import problems
from service.problems import *  # noqa: F403
from service.problems import Busy, FxserveError, Invalid, NotFound, Problem, ServerError, TooLarge, Unauthorized


class ConnectionFailed(FxserveError):
    """The connection could not be made, or broke."""


class TimedOut(FxserveError, TimeoutError):
    """The server did not answer in time."""


class UnreadableResponse(FxserveError):
    """The features in a response are damaged, or not those that were asked for."""


class ExtractorChanged(FxserveError):
    """The server rebuilt an extractor, and its weights or graph differ from before."""


class DeadlineExceeded(problems.DeadlineExceeded, TimedOut):  # type: ignore[no-redef]  # in its place
    """504: the deadline passed before the response was ready."""


_GROUPS: dict[int, type[Problem]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    413: TooLarge,
    429: Busy,
    503: Busy,
    504: DeadlineExceeded,
}


_KINDS: dict[str, type[Problem]] = {**Problem.kinds, DeadlineExceeded.slug: DeadlineExceeded}


def problem_of(status: int, document: Mapping[str, Any], request_id: str | None = None) -> Problem:
    """Build the exception for an error response, from its type, or from its status if the type is unknown."""
    group = _GROUPS.get(status, ServerError if status >= 500 else Invalid)
    kind = _KINDS.get(str(document.get("type", "")).rpartition("/")[2], group)
    return kind.received(status, document, request_id)
