"""What the client raises: one tree, with a class for each kind of problem that the server names.

``except Busy`` catches whatever may pass if tried later, ``except UnknownNode`` that one mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class FxserveError(Exception):
    """Base of everything that the client raises about the server."""


class ConnectionFailed(FxserveError):
    """There was no answer: no connection, or one that broke."""


class TimedOut(FxserveError, TimeoutError):
    """There was no answer in time."""


class ExtractorChanged(FxserveError):
    """The server had to make an extractor again, and its weights or graph are not what they were."""


class Problem(FxserveError):
    """The server refused, and said why.

    Attributes:
        type: ``/problems/unknown-node``.
        title: its name for people.
        status: the HTTP status.
        detail: what was wrong and what would be right.
        extra: the fields that this kind of problem adds, such as ``suggestions``.
        request_id: to find it in the server's log.
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
    """The request cannot be answered as it is: 400, 405, 406, 409, 415, 421, 422."""


class Unauthorized(Problem):
    """401 or 403."""


class TooLarge(Problem):
    """413."""


class Busy(Problem):
    """429 or 503: may pass if tried later."""


class DeadlineExceeded(Problem, TimedOut):
    """504: the server gave up in time."""


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
    """The backend that was named is too far from eager: ``backend`` and its errors in ``extra``."""


class UnknownTransform(Invalid):
    """``name`` and ``suggestions`` in ``extra``."""


class BadParameter(Invalid):
    """Of a transform: ``transform`` and ``parameter`` in ``extra``."""


class CannotTransform(Invalid):
    """``transform`` and ``node`` in ``extra``."""


class CannotKeep(Invalid):
    """A transform would remove what is asked for: ``transform`` and ``node`` in ``extra``."""


class OfImage(Problem):
    """Of one of the images: ``index`` is its place in the call."""

    @property
    def index(self) -> int:
        return int(self.extra.get("index", 0))

    def moved(self, by: int) -> None:
        """The image was number ``index`` of a request; ``by`` images of the call came before that request's."""
        there = self.index
        self.extra["index"] = there + by
        self.detail = re.sub(rf"^image {there}\b", f"image {there + by}", self.detail)


class BadImage(OfImage, Invalid):
    """Bytes that are no image."""


class BadBox(OfImage, Invalid):
    """A region that is no part of its image; ``box`` in ``extra`` is its place in the image's list."""


class ImageTooLarge(OfImage, TooLarge):
    """``pixels`` and ``limit`` in ``extra``."""


class BadTensor(Invalid):
    """A wrong name, shape or dtype."""


class Unsupported(Invalid):
    """``field``, ``value`` and ``available`` in ``extra``."""


class NameTaken(Invalid):
    """``extractor`` in ``extra`` is the one that has the name."""


class InvalidRequest(Invalid):
    """``errors`` in ``extra``."""


class BodyTooLarge(TooLarge):
    """``limit`` in ``extra``."""


class RequestTooLarge(TooLarge):
    """``bytes`` and ``limit`` in ``extra``."""


class ResponseTooLarge(TooLarge):
    """``bytes``, ``limit`` and ``ways`` in ``extra``."""


class AdmissionFull(Busy):
    """As many requests as allowed are being served."""


class NotReady(Busy):
    """``reason`` in ``extra``."""


class Draining(NotReady):
    """It is shutting down."""


class OutOfMemory(Busy):
    """Not even one image fits into the device's memory."""


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


def _leaves(base: type[Problem]) -> dict[str, type[Problem]]:
    """By slug: ``UnknownNode`` is ``unknown-node``."""
    found = {re.sub(r"(?<!^)(?=[A-Z])", "-", base.__name__).lower(): base}
    for kind in base.__subclasses__():
        found |= _leaves(kind)
    return found


_KINDS = _leaves(Problem)


def problem_of(status: int, document: Mapping[str, Any], request_id: str | None = None) -> Problem:
    """The exception for an answer: by its type, and where that is none of ours by its status."""
    group = _GROUPS.get(status, ServerError if status >= 500 else Invalid)
    kind = _KINDS.get(str(document.get("type", "")).rpartition("/")[2], group)
    return kind({"status": status, **document}, request_id)
