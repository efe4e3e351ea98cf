"""Exceptions of the client: one tree, with a class for each problem type of the server.

``except Busy`` catches everything that may succeed later, ``except UnknownNode`` one specific mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class FxserveError(Exception):
    """Base class of the client's exceptions."""


class ConnectionFailed(FxserveError):
    """The connection could not be made, or broke."""


class TimedOut(FxserveError, TimeoutError):
    """The server did not answer in time."""


class ExtractorChanged(FxserveError):
    """The server rebuilt an extractor, and its weights or graph differ from before."""


class Problem(FxserveError):
    """An error response of the server (RFC 9457).

    Attributes:
        type: such as ``/problems/unknown-node``.
        title: short summary of the problem type.
        status: HTTP status.
        detail: what was wrong and what would be right.
        extra: the fields that this problem type adds, such as ``suggestions``.
        request_id: identifies the request in the server's log.
    """

    def __init__(self, document: Mapping[str, Any], request_id: str | None = None) -> None:
        self.type = str(document.get("type", "about:blank"))
        self.title = str(document.get("title", ""))
        self.status = int(document.get("status", 0))
        self.detail = str(document.get("detail", ""))
        self.extra = {k: v for k, v in document.items() if k not in ("type", "title", "status", "detail")}
        self.request_id = request_id
        super().__init__(self.detail)

    def __str__(self) -> str:
        return self.detail or f"{self.status} {self.title}"


class NotFound(Problem):
    """404."""


class Invalid(Problem):
    """The request itself is wrong: 400, 405, 406, 409, 415, 421, 422."""


class Unauthorized(Problem):
    """401 or 403."""


class TooLarge(Problem):
    """413."""


class Busy(Problem):
    """429 or 503: the request may succeed later."""


class DeadlineExceeded(Problem, TimedOut):
    """504: the deadline passed before the response was ready."""


class ServerError(Problem):
    """Any other 5xx: not the request's fault."""


class UnknownModel(NotFound):
    """``suggestions`` in ``extra``."""


class UnknownExtractor(NotFound):
    """``suggestions`` in ``extra``."""


class UnknownWeights(Invalid):
    """``available`` and ``suggestions`` in ``extra``."""


class UnknownNode(Invalid):
    """``name`` and ``suggestions`` in ``extra``."""


class DuplicateKey(Invalid):
    """``key`` in ``extra``."""


class NotTraceable(Invalid):
    """``module`` and ``source`` in ``extra``."""


class BackendRefused(Invalid):
    """The requested backend differs too much from eager: ``backend`` and its errors in ``extra``."""


class UnknownTransform(Invalid):
    """``name`` and ``suggestions`` in ``extra``."""


class BadParameter(Invalid):
    """A transform's parameter is wrong: ``transform`` and ``parameter`` in ``extra``."""


class CannotTransform(Invalid):
    """A transform does not apply to this graph: ``transform`` and ``node`` in ``extra``."""


class CannotKeep(Invalid):
    """A transform would remove a requested node: ``transform`` and ``node`` in ``extra``."""


class ImageProblem(Problem):
    """A problem with one image; ``index`` is its position in the call."""

    @property
    def index(self) -> int:
        return int(self.extra.get("index", 0))

    def shift_index(self, offset: int) -> None:
        """Turn an index within a request into one within the call; the request's first image is number ``offset``."""
        index = self.index
        self.extra["index"] = index + offset
        self.detail = re.sub(rf"^image {index}\b", f"image {index + offset}", self.detail)


class BadImage(ImageProblem, Invalid):
    """The bytes are not an image."""


class BadBox(ImageProblem, Invalid):
    """A box is malformed or outside its image; ``box`` in ``extra`` is its index in the image's list."""


class ImageTooLarge(ImageProblem, TooLarge):
    """``pixels`` and ``limit`` in ``extra``."""


class BadTensor(Invalid):
    """A tensor has the wrong name, shape or dtype."""


class Unsupported(Invalid):
    """``field``, ``value`` and ``available`` in ``extra``."""


class NameTaken(Invalid):
    """``extractor`` in ``extra`` is the id of the one that has the name."""


class StoreFull(Invalid):
    """``stored`` and ``limit`` in ``extra``."""


class InvalidRequest(Invalid):
    """``errors`` in ``extra``."""


class BodyTooLarge(TooLarge):
    """``limit`` in ``extra``."""


class RequestTooLarge(TooLarge):
    """``bytes`` and ``limit`` in ``extra``."""


class ResponseTooLarge(TooLarge):
    """``bytes``, ``limit`` and ``ways`` in ``extra``."""


class AdmissionFull(Busy):
    """The server is at its limit of concurrent requests."""


class NotReady(Busy):
    """``reason`` in ``extra``."""


class Draining(NotReady):
    """The server is shutting down."""


class OutOfMemory(Busy):
    """Not even one image fits in the device's memory."""


class WeightsUnavailable(Busy):
    """``file`` and ``folder`` in ``extra``."""


class ComputeFailed(ServerError):
    """``error`` in ``extra``."""


class ExtractorFailed(ServerError):
    """``problem`` in ``extra``."""


_GROUPS: dict[int, type[Problem]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    413: TooLarge,
    429: Busy,
    503: Busy,
    504: DeadlineExceeded,
}


def _by_slug(base: type[Problem]) -> dict[str, type[Problem]]:
    """Map slugs to ``base`` and its subclasses: ``unknown-node`` → ``UnknownNode``."""
    found = {re.sub(r"(?<!^)(?=[A-Z])", "-", base.__name__).lower(): base}
    for kind in base.__subclasses__():
        found |= _by_slug(kind)
    return found


_KINDS = _by_slug(Problem)


def problem_of(status: int, document: Mapping[str, Any], request_id: str | None = None) -> Problem:
    """Build the exception for an error response, by its type, or by its status if the type is unknown."""
    group = _GROUPS.get(status, ServerError if status >= 500 else Invalid)
    kind = _KINDS.get(str(document.get("type", "")).rpartition("/")[2], group)
    return kind({**document, "status": status}, request_id)
