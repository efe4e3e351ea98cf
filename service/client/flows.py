"""What the two clients do, without doing any of it: generators that say which step comes next.

A flow yields a :class:`Send`, a :class:`Wait` or a :class:`Work`, is sent what came of it (or has it raised), and
returns its result. The clients only differ in how they take these steps.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray

from service.client import tensors
from service.client.exceptions import (
    ConnectionFailed,
    ExtractorChanged,
    ImageTooLarge,
    OfImage,
    Problem,
    TimedOut,
    TooLarge,
    UnknownExtractor,
    problem_of,
)
from service.client.images import Part

Result = TypeVar("Result")
Buffer = NDArray[np.uint8]

DEFAULT_WAIT = 300.0
"""Seconds to wait for an extractor: its weights may have to be downloaded first."""

_GRACE = 2.0
"""Seconds past the deadline that the server has to say itself that it was missed."""

_LONGEST_POLL = 30.0

_REMAKES = 16
"""How often one request may have its extractor made again. Each of several processes on a port knows only what was made
over its own connections, and making it may reach another process than repeating the request does. Each time one process
fewer does not know it; with 16 processes picked at random, all attempts miss for one request in 6,000."""


@dataclass(frozen=True)
class Send:
    """Send a request and give its :class:`Answer`."""

    method: str
    path: str
    query: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    timeout: float = 60.0


@dataclass(frozen=True)
class Wait:
    """Do nothing for some seconds."""

    seconds: float


@dataclass(frozen=True)
class Work:
    """Call a function that takes a while, and give its result."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class Answer:
    """What came of a :class:`Send`; ``content`` is the body."""

    status: int
    headers: Mapping[str, str]
    content: Buffer


Step = Send | Wait | Work
Flow = Generator[Step, Any, Result]


class Receiver:
    """Takes an answer's body as it arrives, into memory that the arrays in it can stay in."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._content: Buffer = np.empty(int(response.headers.get("content-length", 0)), np.uint8)
        self._filled = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next piece of the body."""
        end = self._filled + len(chunk)
        if end > len(self._content):  # no Content-Length: it was sent in chunks
            larger = np.empty(max(end, 2 * len(self._content)), np.uint8)
            larger[: self._filled] = self._content[: self._filled]
            self._content = larger
        self._content[self._filled : end] = np.frombuffer(chunk, np.uint8)
        self._filled = end

    def answer(self) -> Answer:
        """The answer, once all of its body has been fed."""
        return Answer(self._response.status_code, self._response.headers, self._content[: self._filled])


@dataclass(frozen=True)
class Patience:
    """How long a request may take and how often it may be repeated.

    Attributes:
        timeout: seconds for a request with its repetitions; the server is told what is left of them.
        retries: how often to repeat what was answered by 429 or 503 with ``Retry-After``.
    """

    timeout: float
    retries: int


def exchange(send: Send, patience: Patience) -> Flow[Answer]:
    """Send a request until it succeeds, repeating it when the server asks for that.

    Raises:
        Problem: the server refused.
        TimedOut, ConnectionFailed: it did not answer.
    """
    deadline = time.monotonic() + patience.timeout
    for attempt in range(patience.retries + 1):
        left = max(0.001, deadline - time.monotonic())
        headers = {**send.headers, "X-Request-Timeout": f"{left:.3f}"}
        try:
            answer: Answer = yield Send(send.method, send.path, send.query, headers, send.body, left + _GRACE)
        except httpx.TimeoutException as error:
            raise TimedOut(f"{send.method} {send.path} was not answered within {patience.timeout:g} s") from error
        except httpx.TransportError as error:
            raise ConnectionFailed(f"{send.method} {send.path}: {error or type(error).__name__}") from error
        if answer.status < 400:
            return answer
        problem = _problem(answer)
        delay = _retry_after(answer)
        if delay is None or attempt == patience.retries or time.monotonic() + delay >= deadline:
            raise problem
        yield Wait(delay)
    raise AssertionError("unreachable")


def fetch(path: str, patience: Patience, query: Mapping[str, str | int] | None = None) -> Flow[Any]:
    """The JSON at ``path``."""
    return _json((yield from exchange(Send("GET", path, query or {}), patience)))


def models(task: str | None, q: str | None, patience: Patience) -> Flow[list[dict[str, Any]]]:
    """The models that are served; of one ``task``, or with ``q`` in the name."""
    query = {key: value for key, value in (("task", task), ("q", q)) if value is not None}
    found: list[dict[str, Any]] = (yield from fetch("/v1/models", patience, query))["models"]
    return found


def model(name: str, patience: Patience) -> Flow[dict[str, Any]]:
    """What the server says of one model."""
    found: dict[str, Any] = yield from fetch(model_path(name), patience)
    return found


def nodes(name: str, weights: str, transforms: str | None, patience: Patience) -> Flow[dict[str, Any]]:
    """The nodes of one model with ``weights``, and those that ``transforms`` brings."""
    query = {"weights": weights, **({"transforms": transforms} if transforms is not None else {})}
    found: dict[str, Any] = yield from fetch(model_path(name, "nodes"), patience, query)
    return found


def delete(path: str, patience: Patience) -> Flow[None]:
    """Delete what is at ``path``."""
    yield from exchange(Send("DELETE", path), patience)


def model_path(model: str, *rest: str) -> str:
    """The path of a model, or of what is below it; any name is safe in it."""
    return "/".join(["/v1/models", quote(model, safe=""), *rest])


def extractor_path(id_or_name: str, *rest: str) -> str:
    """The path of an extractor, or of what is below it; any name is safe in it."""
    return "/".join(["/v1/extractors", quote(id_or_name, safe=""), *rest])


def make_extractor(spec: Mapping[str, Any], wait: float, patience: Patience) -> Flow[dict[str, Any]]:
    """The description of an extractor, once it is ready.

    Raises:
        TimedOut: it is not, after ``wait`` seconds.
    """
    body = json.dumps(spec).encode()
    deadline = time.monotonic() + wait
    while True:
        left = max(0.0, deadline - time.monotonic())
        poll = min(left, _LONGEST_POLL)
        send = Send("POST", "/v1/extractors", {"wait": f"{poll:.3f}"}, {"Content-Type": "application/json"}, body)
        answer = yield from exchange(send, Patience(max(patience.timeout, poll), patience.retries))
        description: dict[str, Any] = _json(answer)
        if description["state"] == "ready":
            return description
        if time.monotonic() >= deadline:
            raise TimedOut(f"extractor {description['id']} is still being built after {wait:g} s")


@dataclass(frozen=True)
class Held:
    """An extractor to ask.

    Attributes:
        id: what the server calls it.
        fingerprint: of its model's graph.
        spec: what it was made from, to make it again; None where only its id is known.
    """

    id: str
    fingerprint: str
    spec: Mapping[str, Any] | None


def extract(
    held: Held, part: Part, query: Mapping[str, str], assembly: tensors.Assembly, patience: Patience
) -> Flow[None]:
    """Put the features of ``part`` into ``assembly``, in several requests if the server finds one too large.

    Where the server does not know the extractor it is made again, for ``patience.timeout`` seconds at most.

    Raises:
        ExtractorChanged: what is made of its spec now is something else.
    """
    body, content_type = yield Work(part.body)
    headers = {"Content-Type": content_type, "Accept": tensors.MEDIA_TYPE}
    send = Send("POST", extractor_path(held.id, "features"), query, headers, body)
    try:
        answer = yield from _known(held, send, patience)
    except OfImage as problem:
        problem.moved(part.start)
        raise
    except TooLarge as problem:
        if part.rows == 1 or isinstance(problem, ImageTooLarge):
            raise
        rows = _fitting(part.rows, problem)
    else:
        yield Work(lambda: assembly.put(part.place, answer.content, 0 if part.boxes is None else part.start))
        return
    del body, send
    for smaller in part.split(rows):
        yield from extract(held, smaller, query, assembly, patience)


def _known(held: Held, send: Send, patience: Patience) -> Flow[Answer]:
    """The answer of a server that knows the extractor, or does once it has been made again."""
    remakes = 0
    while True:
        try:
            return (yield from exchange(send, patience))
        except UnknownExtractor:
            if held.spec is None or remakes == _REMAKES:
                raise
        remakes += 1
        made = yield from make_extractor(held.spec, patience.timeout, patience)
        if (made["id"], made["fingerprint"]) != (held.id, held.fingerprint):
            raise ExtractorChanged(
                f"the server does not know extractor {held.id}, and makes another one of its spec now"
            )


def _fitting(rows: int, problem: TooLarge) -> int:
    """How many images may fit where ``rows`` did not; at most half as many."""
    size, limit = problem.extra.get("bytes"), problem.extra.get("limit")
    fitting = rows * limit // size if isinstance(size, int) and isinstance(limit, int) and size > 0 else rows
    return max(1, min(fitting, rows // 2))


def _json(answer: Answer) -> Any:
    return json.loads(answer.content.tobytes())


def _problem(answer: Answer) -> Problem:
    request_id = answer.headers.get("x-request-id")
    try:
        document = _json(answer)
    except ValueError:
        document = None
    if not isinstance(document, dict):  # not of the server but of something in between
        document = {"title": "no problem document", "detail": answer.content[:200].tobytes().decode("utf-8", "replace")}
    return problem_of(answer.status, document, request_id)


def _retry_after(answer: Answer) -> float | None:
    """Seconds until the server wants to be asked again, and a little more, so that not all come at once."""
    value = answer.headers.get("retry-after", "").strip()
    if answer.status not in (429, 503) or not value:
        return None
    try:
        seconds = (
            float(value) if value.isdigit() else (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        )
    except (TypeError, ValueError):
        return None
    return max(0.0, seconds) * random.uniform(1.0, 1.25)


def spec_of(model: str, nodes: Sequence[str] | Mapping[str, str], **options: Any) -> dict[str, Any]:
    """The body that makes an extractor."""
    named = dict(nodes) if isinstance(nodes, Mapping) else [nodes] if isinstance(nodes, str) else list(nodes)
    return {"model": model, "return_nodes": named, **{k: v for k, v in options.items() if v is not None}}
