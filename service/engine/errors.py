"""The engine's errors: why it cannot do what was asked, or will not do it now.

Each class names the HTTP status that fits; errors of fxcore have none, because fxcore knows no HTTP.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fxcore.errors import FxError, summarize

# Messages of torch's CPU allocator, of the system, and of CUDA outside torch's allocator.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")


class EngineError(FxError):
    """Base of the engine's own errors.

    Attributes:
        status: the HTTP status that fits.
        retry_after: seconds after which to try again; None if that would change nothing.
    """

    status: ClassVar[int] = 500
    retry_after: float | None = None


class AdmissionFull(EngineError):
    """The server has as many requests, or bytes of requests, as it may."""

    status = 429

    def __init__(self, detail: str, retry_after: float) -> None:
        super().__init__(detail, retry_after=retry_after)
        self.retry_after = retry_after


class Forbidden(EngineError):
    """The key may not make extractors."""

    status = 403


class RequestTooLarge(EngineError):
    """One request needs more memory than all requests together may have; ``bytes`` and ``limit``."""

    status = 413

    def __init__(self, bytes: int, limit: int) -> None:
        super().__init__(
            f"the request would need {bytes:,} bytes of memory and the server gives all requests together "
            f"{limit:,}; send fewer images at a time",
            bytes=bytes,
            limit=limit,
        )


class ResponseTooLarge(EngineError):
    """The response would be larger than allowed; ``bytes``, ``limit`` and ``ways`` to shrink it."""

    status = 413

    def __init__(self, bytes: int, limit: int, ways: Sequence[str]) -> None:
        super().__init__(
            f"the response would have {bytes:,} bytes and the limit is {limit:,}; to shrink it: {', '.join(ways)}",
            bytes=bytes,
            limit=limit,
            ways=list(ways),
        )


class DeadlineExceeded(EngineError):
    """The request's deadline passed before its response was ready."""

    status = 504

    def __init__(self, detail: str = "the deadline passed before the response was ready; its queued work was dropped"):
        super().__init__(detail)


class NotReady(EngineError):
    """The service cannot work now; ``reason`` says why."""

    status = 503

    def __init__(self, reason: str, retry_after: float = 5.0) -> None:
        super().__init__(f"the service is not ready: {reason}", reason=reason)
        self.retry_after = retry_after


class Draining(NotReady):
    """The service is shutting down and takes no new work."""

    def __init__(self) -> None:
        super().__init__("it is shutting down and takes no new work")


class OutOfMemory(EngineError):
    """Not even one image of the request fits in the device's memory."""

    status = 503
    retry_after = 5.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means too little memory, on the device or the host, which may pass."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


_SHORTAGES = ("can't start new thread", "Resource temporarily unavailable", "Too many open files", "std::bad_alloc")
_SHORTAGE_NUMBERS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def is_shortage(error: BaseException | None) -> bool:
    """Whether ``error``, or its cause, means that the system is short of threads, processes, memory or open files,
    which may pass."""
    while error is not None:
        if is_out_of_memory(error) or getattr(error, "errno", None) in _SHORTAGE_NUMBERS:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def shortage(error: BaseException) -> NotReady:
    """The response to a request that failed with ``error``, a shortage."""
    return NotReady(f"the system is short of threads or memory: {summarize(error)}")


class ComputeFailed(EngineError):
    """The model raised while it computed this request; ``error`` is its message."""

    status = 500


def as_exception(error: BaseException) -> Exception:
    """``error`` as an exception that does not end the event loop, as a SystemExit, which a library may raise in any
    thread, would.

    A shortage of the system becomes :class:`NotReady`.
    """
    if isinstance(error, FxError):
        return error
    if is_shortage(error):
        return shortage(error)
    if isinstance(error, Exception):
        return error
    return ComputeFailed(f"what this request needed was ended by {summarize(error)}", error=summarize(error))


class UnknownExtractor(EngineError):
    """No extractor has that id or name; ``suggestions``."""

    status = 404


class NameTaken(EngineError):
    """Another extractor has that ``name``; ``extractor`` is its id."""

    status = 409


class StoreFull(EngineError):
    """The store has ``stored`` extractors or names, as many as the ``limit`` allows."""

    status = 409

    def __init__(self, kind: str, stored: int, limit: int) -> None:
        super().__init__(
            f"the store has {stored:,} {kind} and may have {limit:,}; delete extractors that nobody uses, which GET "
            "/v1/extractors lists, or raise FXSERVE_MAX_STORED_EXTRACTORS",
            stored=stored,
            limit=limit,
        )


class Unsupported(EngineError):
    """A backend, precision or transform that is not served here; ``field``, ``value`` and ``available``."""

    status = 422

    def __init__(self, field: str, value: str, available: Sequence[str], why: str | None = None) -> None:
        listed = ", ".join(available) if available else "none"
        reason = f" ({why})" if why else ""
        super().__init__(
            f"{field} {value!r} is not available here{reason}; available: {listed}",
            field=field,
            value=value,
            available=list(available),
        )


class BackendRefused(EngineError):
    """The ``backend`` that was asked for cannot run the model, or is too far from eager, and is not replaced by
    another; ``instead`` says what to ask for."""

    status = 422

    def __init__(self, detail: str, backend: str, instead: str, **figures: Any) -> None:
        super().__init__(f"{detail}; {instead}", backend=backend, **figures)


class ExtractorFailed(EngineError):
    """An extractor could not be built, for a reason other than the request; ``problem`` says which."""

    status = 500

    def __init__(self, detail: str, problem: dict[str, Any]) -> None:
        super().__init__(detail, problem=problem)
