"""Problems: the errors that clients of the service see, in one tree for the engine, HTTP and the Python client.

Each class has a status, a title and the slug at the end of its ``type`` (RFC 9457). An error of fxcore becomes the
problem whose class has the same name. Groups, such as :class:`TooLarge`, have a status shared by their members.
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

FIELDS = ("type", "title", "status", "detail")
"""Fields of every problem document; all others are ``extra``."""


class FxserveError(Exception):
    """Base class of the exceptions of the service and its client."""


class Problem(FxserveError):
    """An error response (RFC 9457).

    Attributes:
        kinds: slug → class.
        slug: the end of ``type``.
        type: the type, such as ``/problems/unknown-node``.
        title: short summary of the problem type.
        status: HTTP status.
        detail: explanation of the error and how to fix it.
        headers: additional headers of the response.
        extra: the fields that this problem type adds, such as ``suggestions``.
        retry_after: seconds after which to retry; None if a retry would not help.
        request_id: id of the request in the server's log; set only on problems received by the Python client.
    """

    kinds: ClassVar[dict[str, type[Problem]]] = {}
    slug: str
    title: str = ""
    status: int = 500
    retry_after: float | None = None
    request_id: str | None = None

    def __init_subclass__(cls, slug: str | None = None, status: int | None = None, title: str | None = None) -> None:
        if slug is not None:
            cls.slug = slug
            cls.kinds[slug] = cls
        if status is not None:
            cls.status = status
        if title is not None:
            cls.title = title

    def __init__(self, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.type = f"/problems/{self.slug}"
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra

    @classmethod
    def received(cls, status: int, document: Mapping[str, Any], request_id: str | None = None) -> Self:
        """Build the problem of an error response."""
        detail = str(document.get("detail", ""))
        problem = cls.__new__(cls, detail)
        problem.type = str(document.get("type", "about:blank"))
        problem.title = str(document.get("title", ""))
        problem.status = status
        problem.detail = detail
        problem.headers = {}
        problem.extra = {key: value for key, value in document.items() if key not in FIELDS}
        problem.request_id = request_id
        return problem

    def __str__(self) -> str:
        return self.detail or f"{self.status} {self.title}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without calling the constructor, whose arguments are others than ``args``."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class NotFound(Problem, slug="not-found", status=404, title="Not found"):
    """Nothing exists at this path or with this name."""


class Invalid(Problem, status=422):
    """The request itself is invalid: 400, 405, 406, 408, 409, 415, 421, 422, 431."""


class Unauthorized(Problem, slug="unauthorized", status=401, title="Unauthorized"):
    """The key is missing or invalid (401), or does not allow this (403)."""


class Forbidden(Unauthorized, slug="forbidden", status=403, title="Forbidden"):
    """The key, or the page's origin, does not allow this."""


class TooLarge(Problem, status=413):
    """The request, an image or the response has more bytes or pixels than the server allows."""


class Busy(Problem, status=503):
    """The request may succeed later: 429 or 503."""


class ServerError(Problem, status=500):
    """Any other 5xx: an error of the server, not of the request."""


class InvalidRequest(Invalid, slug="invalid-request", title="Invalid request"):
    """A parameter or a field of the body is invalid; ``errors``."""


class Misdirected(Invalid, slug="misdirected", status=421, title="Misdirected request"):
    """The request's host is not this server's."""


class RequestTimeout(Invalid, slug="request-timeout", status=408, title="Request timeout"):
    """The body arrives too slowly."""


class NotHTTP(Invalid, slug="not-http", status=400, title="Not HTTP"):
    """The bytes are not an HTTP request."""

    def __init__(self, detail: str = "this is not a valid HTTP/1.1 request") -> None:
        super().__init__(detail)


class HTTPVersion(ServerError, slug="http-version", status=505, title="HTTP version not supported"):
    """The server does not speak this version of HTTP."""


class HeadTooLarge(Invalid, slug="head-too-large", status=431, title="Head too large"):
    """The request line and the headers have too many bytes."""


class MethodNotAllowed(Invalid, slug="method-not-allowed", status=405, title="Method not allowed"):
    """The path does not support this method."""


class NotAcceptable(Invalid, slug="not-acceptable", status=406, title="Not acceptable"):
    """The response cannot have any of the accepted media types; ``available``."""


class UnsupportedMediaType(Invalid, slug="unsupported-media-type", status=415, title="Unsupported media type"):
    """The route does not support the body's media type or encoding; ``available``."""


class UnknownModel(NotFound, slug="unknown-model", title="Unknown model"):
    """No model has that name; ``suggestions``."""


class UnknownExtractor(NotFound, slug="unknown-extractor", title="Unknown extractor"):
    """No extractor has that id or name; ``suggestions``."""


class UnknownWeights(Invalid, slug="unknown-weights", title="Unknown weights"):
    """The model has no weights with that name; ``available`` and ``suggestions``."""


class UnknownNode(Invalid, slug="unknown-node", title="Unknown node"):
    """The node does not exist, or its value cannot be extracted; ``name`` and ``suggestions``."""


class OpenCut(Invalid, slug="open-cut", title="Open cut"):
    """Outputs also depend on the image in other ways than through ``inputs``; ``missing`` would close the cut."""


class UnneededInput(Invalid, slug="unneeded-input", title="Unneeded input"):
    """No output depends on one of the ``inputs``; ``name``."""


class BadTarget(Invalid, slug="bad-target", title="Bad target"):
    """The target of an attribution does not exist; ``target``."""


class TooManyNodes(Invalid, slug="too-many-nodes", title="Too many nodes"):
    """Groups of names expand to more nodes than the ``limit``; ``count``."""


class DuplicateKey(Invalid, slug="duplicate-key", title="Duplicate key"):
    """Two outputs have the same ``key``."""


class NotTraceable(Invalid, slug="not-traceable", title="Not traceable"):
    """torch.fx cannot trace the model; ``module`` and ``source``."""


class ImageProblem(Problem):
    """A problem with one image; ``index`` is its position in the call."""

    @classmethod
    def received(cls, status: int, document: Mapping[str, Any], request_id: str | None = None) -> Self:
        """Build the problem of an error response; an index that is not an integer is left out."""
        problem = super().received(status, document, request_id)
        if type(problem.extra.get("index")) is not int:
            problem.extra.pop("index", None)
        return problem

    @property
    def index(self) -> int:
        return int(self.extra.get("index", 0))

    def shift_index(self, offset: int) -> None:
        """Convert an index within a request, whose first image is number ``offset``, to one within the call."""
        index = self.index
        self.extra["index"] = index + offset
        self.detail = re.sub(rf"^image {index}\b", f"image {index + offset}", self.detail)


class BadImage(ImageProblem, Invalid, slug="bad-image", title="Bad image"):
    """The bytes are not an image."""


class BadBox(ImageProblem, Invalid, slug="bad-box", title="Bad box"):
    """A box is malformed or outside its image; ``box`` is its index in the image's list."""


class BadPoint(ImageProblem, Invalid, slug="bad-point", title="Bad point"):
    """A point is malformed or outside its image; ``point`` is its index in the image's list."""


class BadMask(ImageProblem, Invalid, slug="bad-mask", title="Bad mask"):
    """A mask is damaged, empty or not of its image's size; ``mask`` is its index in the image's list."""


class BadEdit(Invalid, slug="bad-edit", title="Bad edit"):
    """An edit's node cannot be edited, or its value does not have the selected part; ``edit`` is its index."""


class Overflow(ImageProblem, Invalid, slug="overflow", title="Values too large"):
    """The output ``key`` of an image has values that overflow the requested dtype."""


class ImageTooLarge(ImageProblem, TooLarge, slug="image-too-large", title="Image too large"):
    """According to its header, an image has more ``pixels`` than the ``limit``."""


class BadTensor(Invalid, slug="bad-tensor", title="Bad tensor"):
    """A tensor has the wrong name, shape or dtype."""


class Ragged(Invalid, slug="ragged", title="Images of different sizes"):
    """With ``fit=native``, an output has different shapes for different images of one request; ``key``."""

    def __init__(self, why: str, key: str) -> None:
        super().__init__(
            f"{why} and cannot be one tensor; ask for a pooling to one shape, such as pool=avg, send images of one "
            "size, or send them one by one",
            key=key,
        )


class Unsupported(Invalid, slug="unsupported", title="Not available here"):
    """A backend, precision or transform is not available here; ``field``, ``value`` and ``available``."""

    @classmethod
    def choice(cls, field: str, value: str, available: Sequence[str], why: str | None = None) -> Self:
        """Build the problem for a ``field`` whose ``value`` is not ``available``."""
        listed = ", ".join(available) if available else "none"
        reason = f" ({why})" if why else ""
        return cls(
            f"{field} {value!r} is not available here{reason}; available: {listed}",
            field=field,
            value=value,
            available=list(available),
        )


class BackendRefused(Invalid, slug="backend-refused", title="Backend refused"):
    """The requested ``backend`` cannot run the model or is too far from eager.

    It is not replaced by another one. ``instead`` says what to request.
    """

    def __init__(self, detail: str, backend: str, instead: str, **figures: Any) -> None:
        super().__init__(f"{detail}; {instead}", backend=backend, **figures)


class UnknownTransform(Invalid, slug="unknown-transform", title="Unknown transform"):
    """No transform has that ``name``; ``suggestions``."""


class BadParameter(Invalid, slug="bad-parameter", title="Bad parameter"):
    """A transform's parameter is invalid; ``transform`` and ``parameter``."""


class CannotTransform(Invalid, slug="cannot-transform", title="Cannot transform"):
    """A transform does not apply to this graph; ``transform`` and ``node``."""


class CannotKeep(Invalid, slug="cannot-keep", title="Cannot keep a node"):
    """A transform would remove a requested node; ``transform`` and ``node``."""


class CannotExport(Invalid, slug="cannot-export", title="Cannot export"):
    """The ``format`` cannot express this graph."""


class ExportUnavailable(Invalid, slug="export-unavailable", title="Export not available here"):
    """An export to ``format`` needs the packages in ``missing``."""


class NoHeatMap(Invalid, slug="no-heat-map", title="No heat-map"):
    """The node's value is not a feature map."""


class NameTaken(Invalid, slug="name-taken", status=409, title="Name taken"):
    """Another extractor has that name; ``extractor`` is its id."""

    def __init__(self, name: str, extractor: str) -> None:
        super().__init__(
            f"the name {name!r} is taken by extractor {extractor}; choose another name or delete that extractor",
            name=name,
            extractor=extractor,
        )


class StoreFull(Invalid, slug="store-full", status=409, title="Store full"):
    """The store has ``stored`` extractors or names, which is the ``limit``."""

    def __init__(self, kind: str, stored: int, limit: int) -> None:
        super().__init__(
            f"the store has {stored:,} {kind} and the limit is {limit:,}; delete unused extractors (GET "
            "/v1/extractors lists all) or raise FXSERVE_MAX_STORED_EXTRACTORS",
            stored=stored,
            limit=limit,
        )


class BodyTooLarge(TooLarge, slug="body-too-large", title="Body too large"):
    """The body has more bytes than the ``limit``."""


class RequestTooLarge(TooLarge, slug="request-too-large", title="Request too large"):
    """A single request needs more memory than all requests together may use; ``bytes`` and ``limit``."""

    def __init__(self, bytes: int, limit: int) -> None:
        super().__init__(
            f"the request would need {bytes:,} bytes of memory, and all requests together may use {limit:,}; send "
            "fewer or smaller images at a time, or raise FXSERVE_MAX_INFLIGHT_BYTES",
            bytes=bytes,
            limit=limit,
        )


class ResponseTooLarge(TooLarge, slug="response-too-large", title="Response too large"):
    """The response would be larger than allowed; ``bytes``, ``limit`` and ``ways`` to shrink it."""

    def __init__(self, bytes: int, limit: int, ways: Sequence[str]) -> None:
        super().__init__(
            f"the response would have {bytes:,} bytes and the limit is {limit:,}; to shrink it: {', '.join(ways)}",
            bytes=bytes,
            limit=limit,
            ways=list(ways),
        )


class AdmissionFull(Busy, slug="admission-full", status=429, title="Too many requests"):
    """The server is already processing the maximum number or bytes of requests."""

    def __init__(self, detail: str, retry_after: float) -> None:
        super().__init__(detail, retry_after=retry_after)
        self.retry_after = retry_after


class NotReady(Busy, slug="not-ready", title="Not ready"):
    """The service cannot process requests now; ``reason`` says why."""

    def __init__(self, reason: str, retry_after: float = 5.0) -> None:
        super().__init__(f"the service is not ready: {reason}", reason=reason)
        self.retry_after = retry_after


class Draining(NotReady, slug="draining", title="Shutting down"):
    """The service is shutting down and accepts no new work."""

    def __init__(self) -> None:
        super().__init__("it is shutting down and accepts no new work")


class OutOfMemory(Busy, slug="out-of-memory", title="Out of memory"):
    """Not even one image of the request fits in the device's memory."""

    retry_after = 5.0


class WeightsUnavailable(Busy, slug="weights-unavailable", title="Weights unavailable"):
    """The weights' ``file`` is missing from ``folder`` and cannot be downloaded, or is damaged."""


class DeadlineExceeded(Problem, slug="deadline-exceeded", status=504, title="Deadline exceeded"):
    """The request's deadline passed before its response was ready, or would pass long before."""

    def __init__(self, detail: str = "the deadline passed before the response was ready; its queued work was dropped"):
        super().__init__(detail)


class ComputeFailed(ServerError, slug="compute-failed", title="Compute failed"):
    """The model raised an exception while computing this request; ``error`` is its message."""


class ExtractorFailed(ServerError, slug="extractor-failed", title="Extractor failed"):
    """An extractor could not be built for a reason other than the request; ``problem`` has the details."""


class Internal(ServerError, slug="internal", title="Internal error"):
    """A bug of the server; only its log has the details."""

    def __init__(self) -> None:
        super().__init__("something went wrong in the server; its log has the details")
