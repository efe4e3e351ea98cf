"""The logic shared by both clients: coroutines that do their I/O through methods of the client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx

from service.client import tensors
from service.client.exceptions import (
    ConnectionFailed,
    ExtractorChanged,
    ImageProblem,
    ImageTooLarge,
    TimedOut,
    TooLarge,
    UnknownExtractor,
    UnreadableResponse,
)
from service.client.images import Part
from service.client.responses import Response, json_object, problem_in, retry_after, unexpected
from service.schemas.regions import KINDS

Result = TypeVar("Result")

Flow = Callable[[], Coroutine[Any, Any, None]]
"""Returns the coroutine of a part of a call."""

DEFAULT_WAIT = 300.0
"""Seconds to wait for an extractor; its weights may have to be downloaded first."""

_TIMEOUT_MARGIN = 2.0
"""Seconds after the deadline in which the server can still answer 504 itself."""

_MAX_POLL_SECONDS = 30.0

_MAX_REBUILDS = 16
"""Maximum number of times that one request recreates its extractor. Server processes that share a port but no store
know only the extractors created through themselves, and a retry may reach a different process than the creation."""


OUTPUTS = {kind.field: kind.output for kind in KINDS.values()}
"""The output with the image index of each region, by the regions' field."""


@dataclass(frozen=True)
class Request:
    """The arguments of :meth:`httpx.Client.build_request`."""

    method: str
    url: str
    params: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    timeout: float = 60.0


@dataclass(frozen=True)
class RetryPolicy:
    """Time limit and number of retries of a request.

    Attributes:
        timeout: seconds for a request including retries; the time left is sent with each attempt.
        retries: number of retries after 429 or 503 with ``Retry-After``.
    """

    timeout: float
    retries: int


class AnyClient(Protocol):
    """Either client. The methods of the synchronous one block and never suspend."""

    retry_policy: RetryPolicy

    async def _send(self, request: Request) -> Response: ...

    async def _sleep(self, seconds: float) -> None: ...

    async def _call(self, function: Callable[[], Result]) -> Result: ...


async def exchange(client: AnyClient, request: Request, retry_policy: RetryPolicy) -> Response:
    """Send a request, and retry it after ``Retry-After`` when the server is busy.

    Raises:
        Problem: the server rejected it.
        TimedOut, ConnectionFailed: the server did not answer.
    """
    sent = f"{request.method} {request.url}"
    deadline = time.monotonic() + retry_policy.timeout
    for attempt in range(retry_policy.retries + 1):
        left = max(0.001, deadline - time.monotonic())
        headers = {**request.headers, "X-Request-Timeout": f"{left:.3f}"}
        try:
            response = await client._send(replace(request, headers=headers, timeout=left + _TIMEOUT_MARGIN))
        except httpx.TimeoutException as error:
            raise TimedOut(f"{sent} was not answered within {retry_policy.timeout:g} s") from error
        except httpx.TransportError as error:
            raise ConnectionFailed(f"{sent}: {error or type(error).__name__}") from error
        if response.status < 300:
            return response
        problem = problem_in(response)
        delay = retry_after(response)
        if delay is None or attempt == retry_policy.retries or time.monotonic() + delay >= deadline:
            raise problem
        await client._sleep(delay)
    raise AssertionError("unreachable")


async def fetch(
    client: AnyClient, path: str, field: str, query: Mapping[str, str | int] | None = None
) -> dict[str, Any]:
    """GET ``path`` and decode its JSON, an object with ``field``."""
    return json_object(await exchange(client, Request("GET", path, query or {}), client.retry_policy), field)


async def models(client: AnyClient, task: str | None, q: str | None, source: str | None) -> list[dict[str, Any]]:
    """List the models served, optionally only those for ``task``, with ``q`` in their name, or from ``source``."""
    query = {key: value for key, value in (("task", task), ("q", q), ("source", source)) if value is not None}
    found: list[dict[str, Any]] = (await fetch(client, "/v1/models", "models", query))["models"]
    return found


async def model(client: AnyClient, name: str) -> dict[str, Any]:
    """Describe one model."""
    return await fetch(client, model_path(name), "name")


async def nodes(client: AnyClient, name: str, weights: str, transforms: str | None) -> dict[str, Any]:
    """List the nodes of a model with ``weights``, including those that ``transforms`` adds."""
    query = {"weights": weights, **({"transforms": transforms} if transforms is not None else {})}
    return await fetch(client, model_path(name, "nodes"), "eval_nodes", query)


async def extractors(client: AnyClient) -> list[dict[str, Any]]:
    """Describe all extractors."""
    found: list[dict[str, Any]] = (await fetch(client, "/v1/extractors", "extractors"))["extractors"]
    return found


async def extractor(client: AnyClient, id_or_name: str) -> dict[str, Any]:
    """Describe one extractor."""
    return await fetch(client, extractor_path(id_or_name), "fingerprint")


async def delete(client: AnyClient, path: str) -> None:
    """DELETE ``path``."""
    await exchange(client, Request("DELETE", path), client.retry_policy)


def model_path(model: str, *rest: str) -> str:
    """Return the URL path of a model or of a resource below it. The name is percent-encoded."""
    return "/".join(["/v1/models", _quoted(model), *rest])


def extractor_path(id_or_name: str, *rest: str) -> str:
    """Return the URL path of an extractor or of a resource below it. The name is percent-encoded."""
    return "/".join(["/v1/extractors", _quoted(id_or_name), *rest])


def _quoted(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name must be a string, not {name!r}")
    return quote(name, safe="")


async def create_extractor(client: AnyClient, spec: Mapping[str, Any], wait: float) -> dict[str, Any]:
    """Create an extractor and return its description once it is ready.

    Raises:
        Problem: the server cannot build it.
        TimedOut: it is not ready after ``wait`` seconds.
    """
    body, policy = json.dumps(spec).encode(), client.retry_policy
    deadline = time.monotonic() + wait
    while True:
        left = max(0.0, deadline - time.monotonic())
        poll = min(left, _MAX_POLL_SECONDS)
        request = Request("POST", "/v1/extractors", {"wait": f"{poll:.3f}"}, {"Content-Type": "application/json"}, body)
        # The server begins to wait once it has resolved the nodes, for which it may have to trace the model.
        response = await exchange(client, request, RetryPolicy(policy.timeout + poll, policy.retries))
        description = json_object(response, "state")
        if description["state"] == "ready":
            return description
        if time.monotonic() >= deadline:
            raise TimedOut(f"extractor {description['id']} is still being built after {wait:g} s")


@dataclass(frozen=True)
class ExtractorRef:
    """Identifies an extractor on the server.

    Attributes:
        id: its id.
        fingerprint: hash of its model's graph.
        spec: the spec to recreate it; None if only the id is known.
    """

    id: str
    fingerprint: str
    spec: Mapping[str, Any] | None


async def extract(
    client: AnyClient,
    ref: ExtractorRef,
    part: Part,
    query: Mapping[str, str],
    assembly: tensors.Assembly,
    resource: str = "features",
) -> None:
    """Request the features (or another ``resource``) of ``part`` and put them into ``assembly``.

    The request is split if the server rejects it as too large.

    An extractor unknown to the server is recreated, within the timeout of a request.

    Raises:
        Problem: the server rejected the request.
        ExtractorChanged: the recreated extractor differs from the original.
        UnreadableResponse: its features cannot be read.
    """
    body, content_type = await client._call(part.body)
    headers = {"Content-Type": content_type, "Accept": tensors.MEDIA_TYPE}
    request = Request("POST", extractor_path(ref.id, resource), query, headers, body)
    try:
        response = await _send_rebuilding(client, ref, request)
    except ImageProblem as problem:
        if "index" in problem.extra or part.rows == 1:
            problem.shift_index(part.start)
            raise
        rows = part.rows // 2  # the regions of all its images are too many together
    except TooLarge as problem:
        if part.rows == 1 or isinstance(problem, ImageTooLarge):
            raise
        rows = _rows_that_fit(part.rows, problem)
    else:
        if response.headers.get("content-type") != tensors.MEDIA_TYPE:
            raise unexpected(response, "safetensors")
        indices = None if part.regions is None else OUTPUTS[part.regions.field]
        put = partial(assembly.put, part.first_row, part.row_end, response.content, part.start, indices)
        try:
            await client._call(put)
        except ValueError as error:
            raise UnreadableResponse(f"the features in the response cannot be read: {error}") from error
        return
    del body, request
    for smaller in part.split(rows):
        await extract(client, ref, smaller, query, assembly, resource)


def call(
    client: AnyClient, ref: ExtractorRef, parts: Sequence[Part], query: Mapping[str, str], resource: str = "features"
) -> tuple[list[Flow], tensors.Assembly]:
    """Return the flows of a call, one per part, and the assembly that they fill; see :func:`extract`."""
    assembly = tensors.Assembly(parts[-1].row_end)
    return [partial(extract, client, ref, part, query, assembly, resource) for part in parts], assembly


async def _send_rebuilding(client: AnyClient, ref: ExtractorRef, request: Request) -> Response:
    """Send a request to an extractor, recreating the extractor whenever the server does not know it."""
    rebuilds = 0
    while True:
        try:
            return await exchange(client, request, client.retry_policy)
        except UnknownExtractor:
            if ref.spec is None or rebuilds == _MAX_REBUILDS:
                raise
        rebuilds += 1
        created = await create_extractor(client, ref.spec, client.retry_policy.timeout)
        if (created["id"], created["fingerprint"]) != (ref.id, ref.fingerprint):
            raise ExtractorChanged(
                f"the server lost extractor {ref.id}, and its spec now builds one with different weights or a "
                "different graph"
            )


def _rows_that_fit(rows: int, problem: TooLarge) -> int:
    """Return the number of images to try next, after ``rows`` were too many; at most half of them."""
    size, limit = problem.extra.get("bytes"), problem.extra.get("limit")
    fitting = rows * limit // size if isinstance(size, int) and isinstance(limit, int) and size > 0 else rows
    return max(1, min(fitting, rows // 2))


def extractor_spec(
    model: str,
    nodes: Sequence[str] | Mapping[str, str],
    *,
    inputs: Sequence[str] | None = None,
    transforms: Sequence[str | Mapping[str, Any]] | None = None,
    image_size: int | Sequence[int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the request body that creates an extractor.

    Options that are None, and a default ``fit``, are omitted.
    """
    options["transforms"] = None if transforms is None else _listed(transforms)
    options["image_size"] = tensors.to_array(image_size).tolist()  # NumPy's integers are not JSON
    named = dict(nodes) if isinstance(nodes, Mapping) else _listed(nodes)
    given = {k: v for k, v in options.items() if v is not None and (k, v) != ("fit", "crop")}
    begin = {} if inputs is None else {"inputs": _listed(inputs)}
    return {"model": model, "return_nodes": named, **given, **begin}


def _listed(given: Any) -> list[Any]:
    """List names or transforms; a single one is a list of one."""
    return [given] if isinstance(given, str | Mapping) else list(given)
