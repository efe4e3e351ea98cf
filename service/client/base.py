"""Base classes, options and limits shared by the synchronous and the asyncio client."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from service.choices import Dtype
from service.client.flows import ExtractorRef, RetryPolicy
from service.client.images import Part, split_call

# Large enough to fill a batch, small enough that one request is decoded while another is computed. A request that the
# server rejects as too large is split further.
MAX_ROWS = 16
MAX_BODY_BYTES = 16 * 1024**2
MAX_RESPONSE_BYTES = 64 * 1024**2

HEADERS = {"Accept-Encoding": "identity", "User-Agent": "fxserve-client"}


class BaseClient(ABC):
    """Connection settings of a client.

    Args:
        url: base URL of the server: ``http://host:port``, with a path if it is mounted under one.
        timeout: maximum seconds of a request, including retries. It is sent along, so that the server drops late work.
        retries: number of retries of a request answered with 429 or 503 and ``Retry-After``.
        concurrency: maximum requests of one call in flight.
        headers: headers of every request, for example ``{"Authorization": "Bearer …"}``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 5,
        concurrency: int = 4,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"the server's URL must begin with http:// or https://, not {url!r}")
        try:
            urlsplit(url).port  # noqa: B018  # parsed when it is read
        except ValueError as error:
            raise ValueError(f"{url!r} has no valid port: {error}") from error
        if not 0 < timeout < math.inf or retries < 0 or concurrency < 1:
            raise ValueError("timeout must be positive and finite, retries at least 0 and concurrency at least 1")
        self.url = url.rstrip("/")
        self.retry_policy = RetryPolicy(timeout, retries)
        self.concurrency = concurrency
        self.headers = {**HEADERS, **(headers or {})}
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Create the httpx client, without connecting."""


class BaseExtractor:
    """An extractor as the server describes it.

    Attributes:
        description: the response of ``GET /v1/extractors/{id}``.
        ref: its id and fingerprint, and the spec to recreate it.
    """

    def __init__(self, description: Mapping[str, Any], spec: Mapping[str, Any] | None) -> None:
        self.description = dict(description)
        self.ref = ExtractorRef(self.id, str(self.description["fingerprint"]), spec)

    @property
    def id(self) -> str:
        return str(self.description["id"])

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Key, node, shape, dtype, layout and stride of each output."""
        return list(self.description["outputs"])

    def __repr__(self) -> str:
        keys = ", ".join(output["key"] for output in self.outputs)
        return f"<{type(self).__name__} {self.id} of {self.description['model']}: {keys}>"

    @property
    def one_size(self) -> bool:
        """Whether outputs have the same shape for images of any size.

        If not, images are sent one by one: a detector pads the images of a request to a common size, so their values
        would depend on each other.
        """
        shapes = [output["shape"] for output in self.outputs]  # unknown before the server has built it
        return bool(shapes) and not any(shape is None or None in shape[1:] for shape in shapes)

    def rows(self, pool: str, project: int | None, tokens: Sequence[int] | None = None) -> int:
        """Return the number of images to send per request."""
        bytes_per_image = 0.0
        for output in self.outputs:
            shape = output["shape"] or []
            there = shape[-2] if len(shape) > 2 else None  # tokens, or queries of attention weights
            kept = len(tokens) / there if tokens and there else 1.0
            bytes_per_image += int(output["bytes_per_image"] or 0) * kept
        if pool != "none" or project is not None or not bytes_per_image:
            return MAX_ROWS
        return max(1, min(MAX_ROWS, int(MAX_RESPONSE_BYTES / bytes_per_image)))

    def _split(self, images: Any, max_rows: int, preprocess: str, *regions_and_edits: Any) -> list[Part]:
        """Split the images of a call into requests; see :func:`split_call`."""
        one_by_one = not self.one_size or preprocess == "none"
        return split_call(images, max_rows, MAX_BODY_BYTES, one_by_one, *regions_and_edits)


def token_indices(tokens: Iterable[int] | None) -> list[int] | None:
    """List the tokens of a call.

    Raises:
        TypeError: they are not indices. A text would be one index per digit.
    """
    if tokens is None:
        return None
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise TypeError(f"tokens must be a list of indices, such as [0, 57], not {tokens!r}")
    return list(tokens)


def feature_query(
    pool: str,
    dtype: Dtype | None,
    normalize: str | None,
    preprocess: str,
    tokens: Sequence[int] | None,
    **numbers: int | None,
) -> dict[str, str]:
    """Return the query parameters of a feature request, without defaults."""
    listed = None if tokens is None else ",".join(str(token) for token in tokens)
    given = {"pool": pool, "dtype": dtype, "normalize": normalize, "preprocess": preprocess, "tokens": listed}
    query = {
        name: value for name, value in given.items() if value not in (None, "none" if name == "pool" else "default")
    }
    return query | {name: str(value) for name, value in numbers.items() if value is not None}


def attribution_query(
    of: str, at: str | None, target: int | str, method: str, steps: int, preprocess: str
) -> dict[str, str]:
    """Return the query parameters of an attribution request."""
    given = {"of": of, "at": at, "target": target, "method": method, "steps": steps, "preprocess": preprocess}
    return {name: str(value) for name, value in given.items() if value is not None}
